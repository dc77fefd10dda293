"""What binds a rank: on public traces of which it is known, and by laws on shares."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.profiling.breakdown import CATEGORIES, Breakdown, Steps, broken_down, steps_of
from shardwise.profiling.trace import Doubts, read
from shardwise.profiling.trust import Trust, trust_of
from shardwise.profiling.verdict import EXCELLENT, LEAST_SHARE, Judged, judge, status_of

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
SOUND = Trust(launches=1, lost=0, work=1, events=2, steps=1, doubts=Doubts(False, 0, 0))
public = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside this checkout")


@cache
def of(name: str) -> Judged:
    trace = read(TRACES / name)
    steps = steps_of(trace)
    return judge(broken_down(trace, steps), trust_of(trace, steps))


@public
@pytest.mark.parametrize(
    ("name", "verdict", "status"),
    [
        ("resnet50_num_workers_0.pt.trace.json.gz", "data_loader", "poor"),
        ("resnet50_num_workers_4.pt.trace.json.gz", "host", "acceptable"),
        ("tracelens_mi300_resnet.json.gz", "communication", "critical"),
        ("tracelens_h100_bert_small.json.gz", "host", "critical"),
        ("hta_ns_resolution.json.gz", "compute", "excellent"),
        ("hta_df_index_resolver.json.gz", "host", "critical"),
        ("hta_nccl_data.json.gz", "host", "critical"),
        ("hta_trace_diff_test.json.gz", "memcpy", "acceptable"),
        ("hta_rank_non_gpu.json.gz", "unknown", None),
    ],
)
def test_what_binds_a_public_trace(name: str, verdict: str, status: str | None) -> None:
    found = of(name)
    assert (found.verdict, found.status) == (verdict, status)
    assert bool(found.why) == (verdict == "unknown")


@public
def test_the_gain_of_a_mended_loader_lies_within_what_is_promised() -> None:
    """The same job with workers took 141.068 ms a step where it took 177.592: 1.26 times as fast."""
    before, after = of("resnet50_num_workers_0.pt.trace.json.gz"), of("resnet50_num_workers_4.pt.trace.json.gz")
    assert before.step_seconds is not None and after.step_seconds is not None
    gained = before.step_seconds / after.step_seconds
    assert gained == pytest.approx(1.26, abs=0.005) and 1 < gained <= before.losses[0].gain


@public
def test_communication_that_is_hidden_is_no_loss() -> None:
    hides, alone = of("hta_trace_diff_test.json.gz").hidden, of("hta_df_index_resolver.json.gz").hidden
    assert hides is not None and 0.68 < hides < 0.72 and alone == 0.0


SHARES = st.lists(st.integers(0, 10**9), min_size=len(CATEGORIES), max_size=len(CATEGORIES))


def judged(spent: list[int]) -> Judged:
    row = np.array([spent], np.int64)
    steps = Steps(("ProfilerStep#1",), np.zeros(1, np.int64), row.sum(1), True)
    return judge(Breakdown(steps, CATEGORIES, row, 0), SOUND)


@given(SHARES)
def test_shares_sum_to_one_and_the_verdict_is_the_largest_loss(spent: list[int]) -> None:
    found = judged(spent)
    if not sum(spent):
        assert found.verdict == "unknown" and found.why
        return
    assert found.utilization is not None and 0 <= found.utilization <= 1
    assert found.utilization + sum(loss.share for loss in found.losses) <= 1 + 1e-12
    # What is not told is less than the least share of each of four losses.
    assert found.utilization + sum(loss.share for loss in found.losses) > 1 - 4 * LEAST_SHARE - 1e-12
    assert all(loss.gain > 1 and loss.share >= LEAST_SHARE for loss in found.losses)
    assert (found.verdict == "compute") == (found.utilization >= EXCELLENT)
    if found.verdict != "compute":
        assert found.verdict == found.losses[0].kind
        assert found.losses[0].share == max(loss.share for loss in found.losses)


@given(SHARES, st.integers(1, 5))
def test_a_clock_that_runs_otherwise_changes_no_verdict(spent: list[int], times: int) -> None:
    once, more = judged(spent), judged([times * each for each in spent])
    assert (once.verdict, once.status) == (more.verdict, more.status)


@pytest.mark.parametrize(
    ("used", "status"),
    [(1.0, "excellent"), (0.85, "excellent"), (0.8499, "acceptable"), (0.7, "acceptable"), (0.6999, "poor"),
     (0.5, "poor"), (0.4999, "critical"), (0.0, "critical")],
)  # fmt: skip
def test_the_names_of_a_utilization(used: float, status: str) -> None:
    assert status_of(used) == status


def test_a_trace_that_is_not_believed_has_no_verdict() -> None:
    row = np.ones((1, len(CATEGORIES)), np.int64)
    steps = Steps(("ProfilerStep#1",), np.zeros(1, np.int64), row.sum(1), True)
    found = judge(Breakdown(steps, CATEGORIES, row, 0), SOUND._replace(launches=100, lost=50))
    assert found.verdict == "unknown" and "lost 50 of 100" in found.why and found.utilization is None
