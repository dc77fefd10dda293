"""Hugging Face models from a folder: every family under every kind of split is transformers' own, in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.export import export
from shardwise.checkpoint.store import LocalStore
from tests import chats
from tests.distributed import hf_work
from tests.distributed.pool import Pool

nightly = pytest.mark.nightly
STEPS = 2
# transformers computes norms in fp32 whatever the weights are: one rounding there may fall to the other side. SGD, as
# AdamW divides such a difference by a gradient that may be next to nothing.
BOUND = 1e-7
SPLITS = {
    "zero3": ({"dp_shard": 2, "zero": 3}, 2),
    "tp2": ({"tp": 2}, 2),
    "pp2": ({"pp": 2}, 2),
    "tp2-pp2": ({"tp": 2, "pp": 2}, 4),
}
IN_CI = {("llama", "zero3"), ("qwen3", "tp2-pp2"), ("gemma3_text", "pp2"), ("gpt2", "tp2"), ("phi3", "tp2")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {family: hf_work.write(family, root / family) for family in hf_work.FAMILIES}


@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param(family, split, marks=() if (family, split) in IN_CI else nightly)
        for family in hf_work.FAMILIES if family not in hf_work.SPARSE for split in SPLITS
    ],
)  # fmt: skip
def test_a_family_under_a_split_is_transformers_own(
    pool: Pool, folders: dict[str, Path], tmp_path: Path, family: str, split: str
) -> None:
    plan, world = SPLITS[split]
    expected = hf_work.by_hand(folders[family], STEPS)
    asked: dict[str, Any] = {"folder": str(folders[family]), "run": str(tmp_path / "run"), "plan": plan, "steps": STEPS}
    told = pool.run(world, "tests.distributed.hf_work:train", **asked)
    seen = set()
    for rank in told:
        np.testing.assert_allclose([loss for loss, _ in rank["steps"]], expected["losses"], rtol=BOUND)
        np.testing.assert_allclose([norm for _, norm in rank["steps"]], expected["norms"], rtol=BOUND)
        for name, value in rank["start"].items():
            # A tied weight of a later stage has its second name there.
            name = name if name in expected["start"] else next(iter(expected["start"]))
            np.testing.assert_array_equal(np.asarray(value), expected["start"][name], err_msg=name)
            seen.add(name)
    assert seen == set(expected["start"])
    out = tmp_path / "out"
    store, folder = LocalStore(tmp_path / "run" / "checkpoints"), newest(tmp_path / "run").name
    export(store, folder, out, folders[family], file_bytes=40_000)
    module, loading = AutoModelForCausalLM.from_pretrained(out, use_kernels=False, output_loading_info=True)
    assert not any(loading.values()), loading
    for name, parameter in module.named_parameters():
        wanted = expected["end"][name]
        size = np.abs(wanted).max()
        np.testing.assert_allclose(parameter.detach().numpy() / size, wanted / size, rtol=0, atol=BOUND, err_msg=name)


@pytest.mark.parametrize("split", ["tp2-pp2", pytest.param("zero3", marks=nightly)])
def test_packed_conversations_train_as_each_by_itself_under_a_split(pool: Pool, tmp_path: Path, split: str) -> None:
    """All of GPT-NeoX is computed in fp64, so nothing but its rounding may differ."""
    plan, world = SPLITS[split]
    folder = hf_work.write("gpt_neox", tmp_path / "model", vocab_size=chats.VOCABULARY, max_position_embeddings=256)
    chats.write_tokenizer(folder)
    asked = {"folder": str(folder), "chat": str(chats.write_rows(tmp_path / "chat.jsonl", 40))}
    expected = hf_work.packed_by_hand(folder, hf_work.chat_data(**asked), STEPS)
    told = pool.run(world, "tests.distributed.hf_work:train_packed", **asked, run=str(tmp_path / "run"), plan=plan,
                    steps=STEPS)  # fmt: skip
    for steps in told:
        np.testing.assert_allclose([loss for loss, _ in steps], expected["losses"], rtol=1e-10)
        np.testing.assert_allclose([norm for _, norm in steps], expected["norms"], rtol=1e-10)


# In fp32, as products of experts are on CPU. A sum of some hundred of terms, through 3 blocks there and back.
ROUNDING = 6 * 100 * 2.0**-24


@pytest.mark.parametrize(
    ("family", "split", "world"),
    [
        pytest.param("mixtral", {"dp_shard": 3, "zero": 3}, 3, id="mixtral-zero3"),
        pytest.param("qwen3_moe", {"dp_replicate": 2, "zero": 0}, 2, id="qwen3_moe-zero0"),
        pytest.param("qwen3_moe", {"dp_shard": 2, "zero": 3}, 2, id="qwen3_moe-zero3", marks=nightly),
        pytest.param("mixtral", {"dp_shard": 2, "zero": 2}, 2, id="mixtral-zero2", marks=nightly),
    ],
)
def test_experts_are_read_one_by_one_and_trained_as_transformers_does(
    pool: Pool, folders: dict[str, Path], tmp_path: Path, family: str, split: dict[str, Any], world: int
) -> None:
    expected = hf_work.by_hand(folders[family], STEPS, torch.float32)
    asked = {"folder": str(folders[family]), "run": str(tmp_path / "run"), "plan": split, "steps": STEPS}
    for rank in pool.run(world, "tests.distributed.hf_work:train", precision="fp32", **asked):
        np.testing.assert_allclose([loss for loss, _ in rank["steps"]], expected["losses"], rtol=ROUNDING)
        np.testing.assert_allclose([norm for _, norm in rank["steps"]], expected["norms"], rtol=ROUNDING)
        assert set(rank["start"]) == set(expected["start"])
        for name, value in rank["start"].items():
            np.testing.assert_array_equal(np.asarray(value, np.float32), expected["start"][name], err_msg=name)
    store, saved = LocalStore(tmp_path / "run" / "checkpoints"), newest(tmp_path / "run").name
    export(store, saved, tmp_path / "out", folders[family])
    module, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", use_kernels=False, output_loading_info=True
    )
    assert not any(loading.values()), loading
    for name, parameter in module.named_parameters():
        wanted = expected["end"][name]
        size = np.abs(wanted).max()
        np.testing.assert_allclose(
            parameter.detach().numpy() / size, wanted / size, rtol=0, atol=ROUNDING, err_msg=name
        )


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))
