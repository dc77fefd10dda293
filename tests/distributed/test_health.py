"""A run that is not well goes back to a state that was, reads on or passes over, and ends where it should."""

import math
from pathlib import Path
from typing import Any

import pytest

from shardwise.data.ledger import Segment, prove
from shardwise.events.reader import read
from shardwise.events.values import LossSpike, NonFiniteLoss, RolledBack
from tests.distributed.pool import Pool

WORK = "tests.distributed.health_work:run"
# Eight samples a step, in order: samples 80 to 103 are those of steps 11 to 13.
MARKED, STEPS = [80, 104], 20
WELL = {"once": False, "value": 1.0, "steps": STEPS, "marked": MARKED}
NAN = {"once": False, "value": math.nan, "steps": STEPS, "marked": MARKED}


def events(folder: Path, kind: Any) -> list[Any]:
    return [event for path in sorted(folder.glob("events/attempt-*.jsonl")) for event in read(path)
            if isinstance(event, kind)]  # fmt: skip


def same(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert all(one == results[0] for one in results)
    return results[0]


def test_what_a_machine_did_wrong_once_is_undone_and_the_run_ends_in_the_bits_of_one_that_was_well(
    pool: Pool, tmp_path: Path
) -> None:
    once = {**NAN, "once": True, "on_spike": "roll_back"}
    found = same(pool.run(3, WORK, folder=str(tmp_path / "a"), **once))
    well = same(pool.run(3, WORK, folder=str(tmp_path / "b"), on_spike="tell", **WELL))
    # The third in a row is step 13; the newest checkpoint from before step 11 is step 8.
    assert found["made"] == [*range(1, 14), *range(9, STEPS + 1)]
    assert found["digest"] == well["digest"] and found["told"] == []
    assert found["segments"] == well["segments"] == [[0, 8 * STEPS, False]]
    (back,) = events(tmp_path / "a", RolledBack)
    assert (back.step, back.from_step, back.passed_over) == (8, 13, 0)


def test_the_same_samples_again_are_not_the_machine_and_the_run_ends_and_says_so(pool: Pool, tmp_path: Path) -> None:
    found = same(pool.run(2, WORK, folder=str(tmp_path), on_spike="roll_back", **NAN))
    assert found["made"][-1] == 12 and len(events(tmp_path, RolledBack)) == 1
    assert "not the machine" in found["told"][0] and "pass_over" in found["told"][0]


@pytest.mark.parametrize("breaks", [0, 10, 16])
def test_bad_samples_are_passed_over_and_the_ledger_says_which(pool: Pool, tmp_path: Path, breaks: int) -> None:
    found = same(pool.run(3, WORK, folder=str(tmp_path), on_spike="pass_over", breaks=breaks, **NAN))
    assert found["told"] == [] and found["number"] == STEPS
    assert [one for one in found["segments"] if one[2]] == [[*MARKED, True]]
    assert sum(end - first for first, end, over in found["segments"] if not over) == 8 * STEPS
    assert len(events(tmp_path, NonFiniteLoss)) == 3
    (back,) = events(tmp_path, RolledBack)
    assert back.passed_over == MARKED[1] - MARKED[0]


def test_told_only_a_run_that_is_not_finite_ends(pool: Pool, tmp_path: Path) -> None:
    found = same(pool.run(2, WORK, folder=str(tmp_path), on_spike="tell", **NAN))
    assert "3 steps in a row, to step 13" in found["told"][0]
    assert events(tmp_path, RolledBack) == []


@pytest.mark.parametrize("on_spike", ["tell", "pass_over"])
def test_a_spike_that_lasts_is_told_and_passed_over_where_asked(pool: Pool, tmp_path: Path, on_spike: str) -> None:
    """Steps 41 to 46, after the 30 that say what is usual."""
    spike = {"once": False, "value": 1e4, "steps": 50, "marked": [320, 368]}
    found = same(pool.run(2, WORK, folder=str(tmp_path), on_spike=on_spike, **spike))
    told = events(tmp_path, LossSpike)
    assert told[0].step == 41 and told[0].times > 10
    if on_spike == "tell":
        assert len(told) == 1 and events(tmp_path, RolledBack) == []
        return
    backs = events(tmp_path, RolledBack)
    # Three steps in a row are a spike that lasts: they are passed over, and then the other three.
    assert [(one.step, one.from_step, one.passed_over) for one in backs] == [(40, 43, 24), (40, 43, 24)]
    assert [one for one in found["segments"] if one[2]] == [[320, 344, True], [344, 368, True]]


def test_samples_that_were_passed_over_are_in_the_proof(pool: Pool, tmp_path: Path) -> None:
    found = same(pool.run(1, WORK, folder=str(tmp_path), on_spike="pass_over", **NAN))
    step, made = 0, []
    for first, end, over in found["segments"]:
        steps = 0 if over else (end - first) // 8
        each, why = (end - first, "x") if over else (8, "")
        made.append(Segment(1, step + 1, step + max(steps, 1), first, end, each, why))
        step += steps
    assert prove(made).faults == ()
