"""Guards over real ranks: a right run passes under every split, and each planted fault is caught and named."""

from typing import Any

import pytest

from tests.distributed.pool import Pool

GUARDED = "tests.distributed.guards_work:guarded"
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicated": (3, {"mesh": {"dp_replicate": 3}}),
    "sharded": (2, {"mesh": {"dp_shard": 2}, "zero": 3}),
    "zero 1": (2, {"mesh": {"dp_shard": 2}, "zero": 1, "accumulation": 2}),
    "hybrid": (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 3}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "tp and zero 3": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 3}),
    "tp and replicas": (4, {"mesh": {"dp_replicate": 2, "tp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}, "schedule": "1f1b", "accumulation": 2}),
    "pp and zero 1": (4, {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 1, "schedule": "1f1b", "accumulation": 2}),
    "pp and replicas": (4, {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "1f1b", "accumulation": 2}),
    "pp and tp": (4, {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b", "accumulation": 2}),
}
NORM, EMBED, HEAD = "norm.weight", "embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("split", SPLITS)
def test_a_right_run_passes_and_only_replicated_parts_are_compared(pool: Pool, split: str) -> None:
    world, settings = SPLITS[split]
    told = pool.run(world, GUARDED, **settings)
    assert [(each["what"], each["at"]) for each in told] == [("", 4)] * world
    shared = [set(each["shared"]) for each in told]
    if split in ("replicated", "hybrid", "tp and replicas"):
        assert all(len(each) == len(shared[0]) > 10 for each in shared)
    if split in ("sharded", "zero 1"):
        assert shared == [set(), set()]
    if split.startswith("tp"):
        assert all(any("norm" in name for name in each) for each in shared)
    if split == "tp":
        assert EMBED not in shared[0]
    if split in ("pp", "pp and zero 1"):
        assert shared == [{EMBED}] * world


def caught(pool: Pool, split: str, fault: str, on: int, **more: Any) -> dict[str, Any]:
    """What is said, the same on every rank, at the first look after the fault."""
    world, settings = SPLITS[split]
    told = pool.run(world, GUARDED, fault=fault, on=on, **settings, **more)
    assert all({**each, "shared": 0} == {**told[0], "shared": 0} for each in told)
    assert told[0]["at"] == 4 and told[0]["what"].startswith("At step 4 ")
    assert "go on from a checkpoint of step 2 or before" in told[0]["fix"]
    return dict(told[0])


@pytest.mark.parametrize(
    ("split", "on", "name", "words"),
    [
        ("replicated", 1, NORM, "norm.weight [0:32] has other bits on rank 1 (dp_replicate 1) than on ranks 0, 2."),
        ("hybrid", 2, NORM, "norm.weight [0:16] has other bits on rank 2 (dp_replicate 1, dp_shard 0) than on rank 0 "),
        ("tp", 1, NORM, "norm.weight [0:32] has other bits on rank 1 (tp 1) than on rank 0 (tp 0)."),
        ("tp and zero 3", 3, NORM, "norm.weight [16:32] has other bits on rank 3 (dp_shard 1, tp 1) than on rank 2 "),
        ("tp and replicas", 3, EMBED, f"{EMBED} [31:61, 0:32] has other bits on rank 3 (dp_replicate 1, tp 1) than on"),
        ("pp and replicas", 3, NORM, "norm.weight [0:32] has other bits on rank 3 (pp 1, dp_replicate 1) than on "),
        ("pp", 1, HEAD, f"{EMBED} [0:61, 0:32] has other bits on rank 1 (pp 1) than on rank 0 (pp 0)."),
        ("pp and tp", 2, HEAD, f"{EMBED} [0:31, 0:32] has other bits on rank 2 (pp 1, tp 0) than on rank 0"),
    ],
)  # fmt: skip
def test_one_flipped_bit_is_caught_and_its_tensor_and_ranks_are_named(
    pool: Pool, split: str, on: int, name: str, words: str
) -> None:
    assert words in caught(pool, split, "flip", on, name=name)["what"]


@pytest.mark.parametrize("split", ["replicated", "tp", "hybrid"])
def test_weights_that_come_untied_are_caught(pool: Pool, split: str) -> None:
    what = caught(pool, split, "untie", 1)["what"]
    assert what == f"At step 4 {HEAD} is no longer tied to {EMBED} on rank 1."


@pytest.mark.parametrize(
    ("split", "on", "fault", "words"),
    [
        ("replicated", 2, "count", "and rank 0 divided by"),
        ("tp", 1, "count", "rank 1 counted"),
        ("pp and tp", 3, "count", "rank 3 counted"),
        ("replicated", 1, "divisor", "and rank 1 divided by"),
        ("tp", 1, "twice", "and rank 0 divided by"),
        ("pp and tp", 3, "twice", "and rank 0 divided by"),
        ("replicated", 1, "norm", "the gradient norm is"),
        ("pp", 1, "norm", "the gradient norm is"),
    ],
)
def test_wrong_counts_and_norms_are_caught(pool: Pool, split: str, on: int, fault: str, words: str) -> None:
    assert words in caught(pool, split, fault, on)["what"]


def test_a_gradient_that_was_not_summed_is_told_from_settings_that_differ(pool: Pool) -> None:
    assert "not summed over the ranks along dp_replicate" in caught(pool, "replicated", "settings", 1)["why"]
    one = caught(pool, "tp and replicas", "gradient", 1, name=NORM)
    assert "norm.weight [0:32] has other bits on rank 1" in one["what"]


def test_a_look_costs_little(pool: Pool) -> None:
    """Below the time in which one core reads the weights five times over, at 1 GB/s, and a tenth of a second."""
    told = pool.run(2, "tests.distributed.guards_work:cost", hidden=1024, layers=8)[0]
    assert told["look"] < 5 * told["numbers"] * 4 / 1e9 + 0.1
