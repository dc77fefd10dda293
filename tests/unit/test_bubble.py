"""The closed forms of the pipeline's waiting, held against the tables that the ranks run."""

import numpy as np
import pytest

from shardwise.cost.bubble import bubble
from shardwise.cost.candidates import SCHEDULES
from shardwise.plan import schedules

# Of the step's length. interleaved-zb with fewer micro-batches than ranks has rounds that no short form gives exactly.
TOLERANCE = {"interleaved-zb": 0.12}


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("held", [1, 2, 3, 4, 6])
def test_the_waiting_is_that_of_the_tables(schedule: str, pp: int, held: int) -> None:
    for micros in (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 20, 24, 32, 48):
        if schedules.requires(schedule, pp, held, micros):
            continue
        spans = schedules.timeline(schedules.actions(schedule, pp, held, micros), pp * held).values()
        length, own = max(span.end for span in spans), 3 * held  # F + B, or F + I + W, of each stage
        told = float(bubble(*(np.array([n]) for n in (SCHEDULES.index(schedule), pp, held, micros)))[0])
        enough = TOLERANCE.get(schedule, 0.0) if micros < pp else 1e-9
        assert told == pytest.approx(length / own - micros, abs=1e-9 + enough * length / own)


def test_one_rank_waits_for_nobody() -> None:
    assert bubble(np.array([0]), np.array([1]), np.array([1]), np.array([3])) == 0
