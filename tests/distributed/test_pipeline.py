"""The pipeline on real ranks: every schedule and kind of module gives one process's gradients in fp64."""

from typing import Any

import pytest

from tests.distributed.pool import Pool

# (schedule, ranks, stages a rank, micro-batches); five blocks on three and four stages are uneven.
SCHEDULES = [
    ("gpipe", 2, 1, 4), ("gpipe", 3, 1, 2), ("1f1b", 2, 1, 4), ("1f1b", 3, 1, 5), ("1f1b", 4, 1, 3), ("1f1b", 4, 1, 7),
    ("interleaved-1f1b", 2, 2, 4), ("interleaved-1f1b", 3, 2, 3), ("interleaved-1f1b", 4, 2, 8),
    ("interleaved-zb", 2, 1, 4), ("interleaved-zb", 3, 2, 3), ("interleaved-zb", 4, 1, 8),
    ("zbv", 2, 2, 4), ("zbv", 3, 2, 6), ("zbv", 4, 2, 2),
]  # fmt: skip


def run(pool: Pool, world: int, **arguments: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.run(world, "tests.distributed.pipeline_work:parity", **arguments)
    return found


def worst(found: list[dict[str, Any]]) -> float:
    return max(value for result in found for value in result["differences"].values())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("schedule", "world", "stages", "micros"), SCHEDULES)
def test_every_schedule_gives_one_process_s_gradients(
    pool: Pool, schedule: str, world: int, stages: int, micros: int, tied: bool
) -> None:
    """fp64 logic tier: 1e-10 leaves rounding a factor of 1e5."""
    blocks = max(5, world * stages)
    arguments = {"schedule": schedule, "stages_per_rank": stages, "micros": micros, "blocks": blocks, "tied": tied}
    found = run(pool, world, kind="decoder", **arguments)
    assert worst(found) < 1e-10
    assert all(result["same_bits"] for result in found), "the same step twice gives the same bits"
    assert all(result["alive"] == 0 for result in found), "nothing is held after a step"
    for key in ("loss", "evaluated"):
        values = [result[key] for result in found if result[key] is not None]
        assert values == [pytest.approx(1.0, rel=1e-12)]
    held = [name for result in found for name in result["names"]]
    assert len(held) == len(set(held)), "every name lies on one rank"
    for result in found:
        lasts = [stage for stage, last in result["announced"] if last]
        assert len(result["announced"]) == micros * stages
        assert len(lasts) == len(set(lasts)) >= 1
