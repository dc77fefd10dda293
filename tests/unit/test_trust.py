"""What a trace lacks is counted, and below a coverage nothing is concluded from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.profiling.breakdown import steps_of
from shardwise.profiling.trace import read
from shardwise.profiling.trust import Trust, trust_of

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"


def job(kernels: int, lost: int, late: int = 0) -> list[dict[str, Any]]:
    """Launches 1 us long, each with a kernel 2 us later but for the first `lost` and those after the last kernel."""
    at = {"ph": "X", "pid": 1, "tid": 1, "dur": 1}
    events = []
    for n in range(kernels + late):
        args = {"correlation": n + 1}
        events.append({**at, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 10 * n, "args": args})
        if lost <= n < kernels:
            events.append({**at, "cat": "kernel", "name": "k", "ts": 10 * n + 2, "args": {**args, "device": 0}})
    return events


def trusted(path: Path, events: list[dict[str, Any]]) -> Trust:
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read(path)
    return trust_of(trace, steps_of(trace))


def test_lost_work_is_counted_and_refused_from_a_tenth_on(tmp_path: Path) -> None:
    few, many = trusted(tmp_path / "a", job(100, lost=10)), trusted(tmp_path / "b", job(100, lost=11))
    assert (few.launches, few.lost, few.work) == (100, 10, 90) and few.refusal == ""
    assert "10 of 100 launches have no work in the trace" in few.said
    assert "lost 11 of 100 launches' work (11%)" in many.refusal


def test_what_was_launched_last_may_run_after_the_profiler_stopped(tmp_path: Path) -> None:
    assert trusted(tmp_path / "a", job(5, lost=0, late=50)).lost == 0


def test_no_work_of_a_device_is_refused_with_and_without_launches(tmp_path: Path) -> None:
    assert "20 launches were recorded, none of their work" in trusted(tmp_path / "a", job(20, lost=20)).refusal
    nothing = trusted(tmp_path / "b", [])
    assert "no launch" in nothing.refusal and nothing.coverage == 1.0


def test_times_that_cannot_be_are_told_and_many_are_refused(tmp_path: Path) -> None:
    wrong = {"ph": "X", "cat": "kernel", "name": "k", "pid": 1, "tid": 1, "ts": 5, "dur": 7.4e15}
    few, many = (trusted(tmp_path / "a", job(50, lost=0) + [wrong] * n) for n in (3, 30))
    assert few.refusal == "" and "3 events with times that cannot be were left out" in few.said
    assert "have no time, or one that cannot be" in many.refusal


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside this checkout")
def test_public_traces_are_believed_but_those_without_work_of_a_device() -> None:
    refused = set()
    for path in sorted(TRACES.glob("*.json.gz")):
        trace = read(path)
        found = trust_of(trace, steps_of(trace))
        if found.refusal:
            refused.add(path.name)
        else:
            assert found.coverage == 1.0
    assert refused == {"hta_rank_non_gpu.json.gz"}
