"""Loops of a user's own under every split: tied weights come back from a checkpoint, ranks that part are found, and
what cannot be right is an error that says so."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool

WORK = "tests.distributed.own_loop_work"
ONE: tuple[int, dict[str, Any]] = (1, {})
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (3, {"zero": 0}),
    "zero 2": (3, {"zero": 2}),
    "zero 3": (3, {"zero": 3}),
    "hybrid": (4, {"zero": 3, "dp_replicate": 2, "dp_shard": 2}),
    "pp": (2, {"pp": 2}),
    "pp and replicas": (4, {"pp": 2, "zero": 0}),
    "pp and zero 1": (4, {"pp": 2, "zero": 1}),
    "pp and zero 3": (4, {"pp": 2, "zero": 3}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}),
    "tp": (2, {"tp": 2}),
    "tp and zero 3": (4, {"tp": 2, "zero": 3}),
    "pp and tp": (4, {"pp": 2, "tp": 2}),
}
# Axes that stand beside others below are by themselves at night.
BY_NIGHT = ("zero 2", "zero 3", "pp", "pp and replicas", "tp")
SPLIT = pytest.mark.parametrize(
    "split", [pytest.param(one, marks=pytest.mark.nightly if one in BY_NIGHT else ()) for one in SPLITS]
)


def same(told: list[Any]) -> Any:
    assert all(each == told[0] for each in told), "every rank says the same"
    return told[0]


def close(steps: list[list[float]], expected: list[list[float]]) -> bool:
    """fp64 leaves rounding of sums in another order: far below 1e-10."""
    pairs = [pair for a, b in zip(steps, expected, strict=True) for pair in zip(a, b, strict=True)]
    return all(abs(a - b) <= 1e-10 * abs(b) for a, b in pairs)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    """One process: four steps of the tied module, and what it is tied to afterwards."""
    return {"steps": pool.run(1, f"{WORK}:told", plan={}, fault="tied", steps=4)[0]["steps"]}


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("saves", "loads"), [("pp", "pp"), ("pp", "one"), ("one", "pp"), ("zbv", "pp and replicas")])
def test_tied_weights_of_a_pipeline_come_back_under_any_split_without_a_word_of_the_user_s(
    pool: Pool, tmp_path: Path, alone: dict[str, Any], saves: str, loads: str
) -> None:
    """sw.Checkpointer is handed the module alone: that one weight lies on two ranks it knows by itself."""
    (first, plan), (second, other) = ({**SPLITS, "one": ONE}[name] for name in (saves, loads))
    before = pool.run(first, f"{WORK}:resumed", folder=str(tmp_path), plan=plan, save_at=2)
    after = pool.run(second, f"{WORK}:resumed", folder=str(tmp_path), plan=other)
    assert {each["start"] for each in before} == {0} and {each["start"] for each in after} == {2}
    for each in before:
        assert close(each["steps"], alone["steps"][:2])
    for each in after:
        assert close(each["steps"], alone["steps"][2:])
    tied = [value for each in after for value in each["tied"].values()]
    assert len(tied) == (1 if second == 1 else second) and all(one == tied[0] for one in tied)


# ---------------------------------------------------------------- guards


@SPLIT
def test_a_sound_loop_passes_its_checks(pool: Pool, split: str) -> None:
    world, plan = SPLITS[split]
    assert pool.run(world, f"{WORK}:checked", plan=plan) == [{"what": "", "done": 4}] * world


@pytest.mark.parametrize(
    ("split", "fault", "name", "done", "words"),
    [
        ("replicas", "flip", "norm.weight", 4, "norm.weight [0:12] has other bits on rank 1 (dp_replicate 1)"),
        ("hybrid", "flip", "norm.weight", 4, "At step 4 norm.weight ["),
        ("pp", "flip", "head.weight", 4, "At step 4 embed.weight [0:257, 0:12] has other bits on rank 1 (pp 1)"),
        ("replicas", "untie", "", 4, "At step 4 head.weight is no longer tied to embed.weight on rank 1"),
        ("replicas", "silent", "", 4, "and rank 0 divided by"),
        ("replicas", "apart", "norm.weight", -1, "At step 0 norm.weight [0:12] has other bits on rank 1"),
    ],
)  # fmt: skip
def test_ranks_that_part_are_found_in_an_own_loop(
    pool: Pool, split: str, fault: str, name: str, done: int, words: str
) -> None:
    world, plan = SPLITS[split]
    found = same(pool.run(world, f"{WORK}:checked", plan=plan, fault=fault, name=name))
    assert words in found["what"] and found["done"] == done and found["why"] and found["fix"]


# ---------------------------------------------------------------- what has no gradient


@pytest.fixture(scope="module")
def declared(pool: Pool) -> Any:
    return pool.run(1, f"{WORK}:unused", plan={}, declared=True)[0]["steps"]


@SPLIT
def test_a_parameter_without_a_gradient_is_an_error_unless_declared(pool: Pool, declared: Any, split: str) -> None:
    world, plan = SPLITS[split]
    refused = same(pool.run(world, f"{WORK}:unused", plan=plan, declared=False))
    assert refused["what"] == "blocks.2.extra.weight has no gradient after a step, nor have 1 more."
    assert "unused_parameters" in refused["fix"]
    accepted = pool.run(world, f"{WORK}:unused", plan=plan, declared=True)
    assert all(close(each["steps"], declared) for each in accepted)
    moved = {name: value for each in accepted for name, value in each["moved"].items()}
    assert moved.keys() == {"blocks.2.extra.weight", "spare.weight"}
    assert max(moved.values()) <= 1e-15, "its gradient counts as zero under every plan"


# ---------------------------------------------------------------- tensor parallel: a weight read elsewhere


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "zero": 3}])
def test_a_module_that_reads_another_one_s_weight_is_told_and_the_fix_trains(
    pool: Pool, alone: dict[str, Any], plan: dict[str, Any]
) -> None:
    """An own loop has no sample before its first forward: the error comes there, in our words and not in torch's."""
    world = 2 if plan == {"tp": 2} else 4
    found = same(pool.run(world, f"{WORK}:told", plan=plan, fault="functional"))
    assert found["what"] == "The forward of the model computes with a weight of another module."
    assert "its own module's forward alone" in found["why"]
    assert "tie the two" in found["fix"]
    mended = pool.run(world, f"{WORK}:told", plan=plan, fault="tied", steps=4)
    assert all(close(each["steps"], alone["steps"]) for each in mended)
