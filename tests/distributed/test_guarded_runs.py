"""Guards in whole runs: a Trainer of every split passes them all, and a planted fault stops it at the next one."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.test_split_runs import SPLITS

WORK = "tests.distributed.guard_work"
NORM, EMBED, HEAD = "norm.weight", "embed_tokens.weight", "lm_head.weight"
REPLICAS: dict[str, Any] = {"zero": 0}
HYBRID: dict[str, Any] = {"zero": 3, "dp_replicate": 2, "dp_shard": 2}
PIPED: dict[str, Any] = {"pp": 2, "dp_replicate": 2}


@pytest.mark.parametrize("split", SPLITS)
def test_a_sound_run_passes_a_guard_at_every_step(pool: Pool, tmp_path: Path, split: str) -> None:
    world, plan = SPLITS[split]
    told = pool.run(world, f"{WORK}:guarded", folder=str(tmp_path), plan=plan)
    assert told == [{"what": "", "stepped": 6, "passed": 6}] * world


@pytest.mark.parametrize(("world", "plan"), [(2, REPLICAS), (2, {"pp": 2}), (2, {"tp": 2})])
def test_so_does_one_with_two_named_losses(pool: Pool, tmp_path: Path, world: int, plan: dict[str, Any]) -> None:
    told = pool.run(world, f"{WORK}:named", folder=str(tmp_path), plan=plan)
    assert told == [{"what": "", "stepped": 6, "passed": 6}] * world


@pytest.mark.parametrize(
    ("world", "plan", "on", "fault", "name", "words"),
    [
        (3, REPLICAS, 1, "flip", NORM, "norm.weight [0:32] has other bits on rank 1 (dp_replicate 1) than on ranks"),
        (4, HYBRID, 3, "flip", NORM, "norm.weight [16:32] has other bits on rank 3 (dp_replicate 1, dp_shard 1) than"),
        (4, PIPED, 3, "flip", NORM, "norm.weight [0:32] has other bits on rank 3 (pp 1, dp_replicate 1) than on rank"),
        (2, {"pp": 2}, 1, "flip", HEAD, f"{EMBED} [0:61, 0:32] has other bits on rank 1 (pp 1) than on rank 0 (pp 0)"),
        (2, REPLICAS, 1, "untie", "", f"{HEAD} is no longer tied to {EMBED} on rank 1"),
    ],
)  # fmt: skip
def test_a_planted_fault_stops_the_run_at_the_next_guard(
    pool: Pool, tmp_path: Path, world: int, plan: dict[str, Any], on: int, fault: str, name: str, words: str
) -> None:
    """It comes in the body of step 3, and guards look at every second."""
    told = pool.run(
        world, f"{WORK}:guarded", folder=str(tmp_path), plan=plan, every=2, fault=fault, on=on, name=name
    )  # fmt: skip
    assert all(each == told[0] for each in told)
    assert told[0]["what"].startswith("At step 4 ") and words in told[0]["what"]
    assert told[0]["stepped"] == 3 and told[0]["why"]
    assert "go on from a checkpoint of step 2 or before" in told[0]["fix"]


def test_a_rank_whose_sums_do_not_count_is_seen_by_the_ledger_in_that_very_step(pool: Pool, tmp_path: Path) -> None:
    """What it read is missing from the samples of step 4, before the guard there compares its counts."""
    told = pool.run(2, f"{WORK}:guarded", folder=str(tmp_path), plan=REPLICAS, every=2, fault="silent", on=1)
    assert told[0] == told[1] and told[0]["stepped"] == 3
    assert "did not read samples" in told[0]["what"] and told[0]["why"] and told[0]["fix"]


def test_off_means_off(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(
        2, f"{WORK}:guarded", folder=str(tmp_path), plan=REPLICAS, every=0, fault="flip", on=1, name=NORM
    )  # fmt: skip
    assert [each["what"] for each in told] == ["", ""]


def test_ranks_that_start_with_other_weights_do_not_train(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(2, f"{WORK}:apart", folder=str(tmp_path))
    assert said[0] == said[1] and said[0].startswith("At step 0 norm.weight [0:32] has other bits on rank 1")
