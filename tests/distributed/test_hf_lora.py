"""Low-rank adapters of a Hugging Face model: under every split that runs they are peft's own, in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.export import export
from shardwise.checkpoint.store import LocalStore
from tests.distributed import hf_work
from tests.distributed.pool import Pool
from tests.distributed.test_hf import BOUND, newest

nightly = pytest.mark.nightly
# What peft itself asks of transformers, in the reference alone.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
STEPS = 2
# An adapter's B begins at zero, so what it is after two steps is gradient alone, and a gradient has met each of the
# norms, which transformers computes in fp32 (2**-24): at most 4 a block of 3, and the last.
OF_GRADIENTS = 13 * 2.0**-24
LORA = {"rank": 3, "alpha": 5.0}
PEFT = {"r": 3, "lora_alpha": 5.0}
# The family, the split, its ranks, and what peft is told beside the rank. The first is llama's queries and values.
CASES = [
    pytest.param("llama", {"dp_shard": 3, "zero": 3}, 3, {"target_modules": ["q_proj", "v_proj"]}, id="llama-zero3"),
    pytest.param("gpt2", {"dp_replicate": 2, "zero": 0}, 2, {"target_modules": ["c_attn"], "fan_in_fan_out": True},
                 id="gpt2-zero0"),
    pytest.param("phi3", {"pp": 2}, 2, {"target_modules": ["qkv_proj"]}, id="phi3-pp2"),
    pytest.param("llama", {"dp_shard": 2, "zero": 2}, 2, {"target_modules": ["q_proj", "v_proj"]}, id="llama-zero2",
                 marks=nightly),
    pytest.param("qwen3", {"dp_shard": 2, "zero": 1}, 2, {"target_modules": ["q_proj", "v_proj"]}, id="qwen3-zero1",
                 marks=nightly),
]  # fmt: skip


@pytest.mark.parametrize(("family", "plan", "world", "told"), CASES)
def test_adapters_under_a_split_are_peft_s_own_and_come_out_as_peft_loads_them(
    pool: Pool, tmp_path: Path, family: str, plan: dict[str, Any], world: int, told: dict[str, Any]
) -> None:
    folder = hf_work.write(family, tmp_path / family)
    asked = {"folder": str(folder), "run": str(tmp_path / "run"), "plan": plan, "steps": STEPS, "lora": LORA}
    ranks = pool.run(world, "tests.distributed.hf_work:train_adapters", **asked)
    start = {name: value for rank in ranks for name, value in rank["start"].items()}
    end = {name: value for rank in ranks for name, value in rank["end"].items()}
    expected = hf_work.adapters_by_hand(folder, STEPS, {**PEFT, **told}, start)
    for rank in ranks:
        assert rank["moved"] == [], "what is frozen stays to the bit"
        np.testing.assert_allclose([loss for loss, _ in rank["steps"]], expected["losses"], rtol=BOUND)
        np.testing.assert_allclose([norm for _, norm in rank["steps"]], expected["norms"], rtol=BOUND)
    assert set(end) == set(expected["end"])
    for name, wanted in expected["end"].items():
        size = np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(end[name]) / size, wanted / size, rtol=0, atol=OF_GRADIENTS, err_msg=name)
    assert not any(np.any(value) for name, value in start.items() if "lora_B" in name), "it begins as the model is"

    # Out again: the adapters alone as peft loads them, and merged as transformers does.
    store, saved = LocalStore(tmp_path / "run" / "checkpoints"), newest(tmp_path / "run").name
    export(store, saved, tmp_path / "adapter", folder)
    export(store, saved, tmp_path / "merged", folder, merged=True)
    base = AutoModelForCausalLM.from_pretrained(folder, use_kernels=False).to(torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").to(torch.float64).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64, use_kernels=False).eval()
    tokens = torch.arange(24).reshape(2, 12) % hf_work.VOCABULARY
    with torch.no_grad():
        ours, theirs = (module(input_ids=tokens, use_cache=False).logits for module in (merged, adapted))
    # Norms are computed in fp32 by transformers: their rounding is the bound.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=float(theirs.abs().max()) * 1e-6)


def test_what_is_frozen_lies_in_the_dtype_that_it_computes_in(pool: Pool, tmp_path: Path) -> None:
    """Half the bytes of a master that nothing is added to; what is asked to be fp32 is, frozen or not."""
    folder = hf_work.write("llama", tmp_path / "llama")
    asked = {"folder": str(folder), "run": str(tmp_path / "run"), "lora": LORA}
    told = [
        *pool.run(2, "tests.distributed.hf_work:held_in", plan={"dp_shard": 2, "zero": 3}, **asked),
        *pool.run(1, "tests.distributed.hf_work:held_in", plan={}, **{**asked, "run": str(tmp_path / "alone")}),
    ]
    for rank in told:
        for kept in ("bf16", "fp32"):
            for name, dtype in rank[kept].items():
                in_fp32 = "lora_" in name or (kept == "fp32" and name.startswith("model.layers.0."))
                assert dtype == ("float32" if in_fp32 else "bfloat16"), name
        # bf16 keeps eight bits of a number; losses are means of some hundred of terms.
        np.testing.assert_allclose(rank["bf16 loss"], told[-1]["bf16 loss"], rtol=2.0**-8)
