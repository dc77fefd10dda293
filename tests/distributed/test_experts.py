"""Promises 1 and 2 with experts: every data-parallel split is held against a loop written by hand with torch alone.

The first block is dense, an expert may get no token, and five experts' rows are shared out unevenly.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import work
from tests.distributed.pool import Pool
from tests.distributed.test_matrix import STEPS, case, trained
from tests.distributed.test_parity import EPS32, worst

ROUTED = {"count": 5, "per_token": 2, "ffn_size": 10, "dense_layers": 1}
EXPERTS: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "tied_embeddings": False, "qk_norm": True,
    "experts": ROUTED,
}  # fmt: skip
SHARED = {
    **EXPERTS, "tied_embeddings": True,
    "experts": {**ROUTED, "shared_ffn_size": 14, "shared_gate": True, "scoring": "sigmoid", "dense_layers": 0},
}  # fmt: skip

# Qwen3's attention without experts meets the other axes too.
NORMED: dict[str, Any] = {**EXPERTS, "experts": None, "tied_embeddings": True, "num_layers": 4}
SHAPES = {"experts": EXPERTS, "shared": SHARED, "normed": NORMED}

MATRIX = [
    case("dp_replicate3", 0, EXPERTS, accumulation=2),
    case("dp_shard2", 1, SHARED, accumulation=2),
    case("dp_shard3", 2, SHARED),
    case("dp_shard4", 3, EXPERTS, accumulation=2),
    case("tp2", 0, NORMED, accumulation=2),
]
AT_NIGHT = [
    case("dp_replicate2", 0, SHARED),
    case("dp_shard3", 1, EXPERTS),
    case("dp_shard2", 2, EXPERTS, accumulation=2),
    case("dp_shard3", 3, SHARED, accumulation=2),
    case("dp_replicate2 dp_shard2", 1, EXPERTS, accumulation=2),
    case("dp_replicate2 dp_shard2", 2, SHARED),
    case("dp_replicate2 dp_shard2", 3, SHARED, accumulation=2),
    case("dp_shard2", 3, SHARED, recompute="full", accumulation=2),
    case("dp_shard3", 2, EXPERTS, recompute="selective"),
    case("dp_replicate2", 0, EXPERTS, recompute="full"),
    case("tp2 dp_shard2", 3, NORMED),
    case("pp2 tp2", 0, NORMED, schedule="1f1b", accumulation=3),
]
CELLS = [*MATRIX, *(pytest.param(*one.values, id=one.id, marks=pytest.mark.nightly) for one in AT_NIGHT)]


@cache
def reference(shape: str, precision: str, optimizer: str) -> dict[str, Any]:
    return work.reference(steps=STEPS, shape=SHAPES[shape], precision=precision, optimizer=optimizer)


def named(shape: dict[str, Any]) -> str:
    return next(name for name, one in SHAPES.items() if one == shape)


@pytest.mark.parametrize("case", CELLS)
def test_experts_under_every_split_are_the_hand_written_loop_in_fp64(
    pool: Pool, tmp_path: Path, case: dict[str, Any]
) -> None:
    """Logic tier, as in test_matrix: 1e-10 leaves fp64 rounding a factor of 1e5."""
    expected = reference(named(case["shape"]), "fp64", "adamw")
    results, tensors = trained(pool, tmp_path / "out", case)
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-10)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-10)
    assert worst(tensors, expected["tensors"], "grad/") < 1e-10
    assert worst(tensors, expected["tensors"], "param/") < 1e-10


@pytest.mark.parametrize("case", [one for one in MATRIX if one.id.startswith("dp_shard4")])
def test_experts_stay_within_the_rounding_bound_in_fp32(pool: Pool, tmp_path: Path, case: dict[str, Any]) -> None:
    """Rounding tier, as in test_matrix. A token whose two best experts score alike within rounding would go elsewhere:
    of 12 x 12 tokens in 2 blocks none is."""
    expected = reference(named(case["shape"]), "fp32", "sgd")
    results, tensors = trained(pool, tmp_path / "out", case, precision="fp32", optimizer="sgd")
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-5)
    assert worst(tensors, expected["tensors"], "grad/") < 4 * 1.03**4 * np.sqrt(32 * 12 * 12) * EPS32
    assert worst(tensors, expected["tensors"], "param/") < 1e-5


def test_in_bf16_experts_mean_one_thing_under_two_splits(pool: Pool, tmp_path: Path) -> None:
    """As test_matrix's: twice one rounding of bf16 bounds a gradient's norm."""
    one = {"mesh": {"dp_replicate": 1}, "zero": 0, "shape": EXPERTS}
    single, expected = trained(pool, tmp_path / "one", one, precision="bf16")
    many, tensors = trained(
        pool, tmp_path / "many", {**one, "mesh": {"dp_shard": 3}, "zero": 3, "accumulation": 2}, precision="bf16"
    )
    for rank in many:
        np.testing.assert_allclose(rank["losses"][0], single[0]["losses"][0], rtol=1e-6)
    assert worst(tensors, expected, "grad/") < 2 * 2.0**-9


CONFIGS = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.02},
    "qwen3-moe": {
        "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
}  # fmt: skip
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
RECIPE = """
schema_version = 1
run = "run"
[model]
config = "config.json"
[data]
text = ["text.txt"]
sequence_length = 16
valid_fraction = 0.1
[batch]
tokens_per_step = 192
[optimizer]
lr = 1e-2
[train]
steps = 6
devices = {devices}
plan = {{ zero = {zero} }}
"""


@pytest.mark.parametrize(("family", "zero"), [("qwen3-moe", 3), pytest.param("mixtral", 1, marks=pytest.mark.nightly)])
def test_a_family_with_experts_trains_from_its_config_on_three_ranks(tmp_path: Path, family: str, zero: int) -> None:
    """The whole command: it says what is left out, and the loss falls."""
    from tests.distributed.test_command import SHARDWISE, run

    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **CONFIGS[family]}))
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text to learn\n" for n in range(300)))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(devices=3, zero=zero))
    done = run([SHARDWISE, "train", "recipe.toml", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["decision"]["mesh"]["dp_shard"] == 3
    assert any("no balancing loss" in why and "left out" in why for why in plan["why"])
    summary = json.loads(done.stdout)
    assert summary["finished"] and summary["last_loss"] < summary["first_loss"]
