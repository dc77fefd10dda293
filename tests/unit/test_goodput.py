"""Goodput: parts that sum to the whole, and what was lost is found by what the next attempt begins after."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.events.goodput import goodput
from shardwise.events.values import AnyEvent, Evaluated, RolledBack, RunStarted, Saved, Step, Stopped


def started(time: float, attempt: int, step: int) -> RunStarted:
    return RunStarted(
        time=time, run="r", attempt=attempt, world=1, pids=(1,), device="cpu", plan="", step=step, steps=100
    )


def stepped(time: float, number: int, seconds: float) -> Step:
    return Step(
        time=time, step=number, steps=100, loss=1.0, grad_norm=1.0, lr=0.1, samples=number, tokens=None,
        step_seconds=seconds,
    )  # fmt: skip


def attempt(time: float, number: int, after: int, steps: int, seconds: float, gap: float) -> list[AnyEvent]:
    events: list[AnyEvent] = [started(time, number, after)]
    for k in range(1, steps + 1):
        time += seconds + gap
        events.append(stepped(time, after + k, seconds))
    return events


def test_a_run_that_was_never_stopped_loses_nothing():
    """Ten steps of 2 s, each 0.5 s after the one before; the first one's half second is the way to it."""
    found = goodput([attempt(1000.0, 1, 0, 10, 2.0, 0.5)])
    assert found is not None
    assert (found.useful, found.replayed, found.attempts, found.lost_steps) == (20.0, 0.0, 1, 0)
    assert found.restarting == pytest.approx(0.5)
    assert found.stalled == pytest.approx(4.5)


def test_steps_after_the_checkpoint_are_lost_and_the_way_back_is_restarting():
    """Killed after step 7, resumed after step 5, 30 s later: two steps of 2 s are made again."""
    first = attempt(1000.0, 1, 0, 7, 2.0, 0.0)
    second = attempt(1000.0 + 14.0 + 30.0, 2, 5, 5, 2.0, 0.0)
    found = goodput([first, second])
    assert found is not None
    assert (found.useful, found.replayed, found.lost_steps, found.attempts) == (20.0, 4.0, 2, 2)
    assert found.restarting == pytest.approx(30.0)
    assert found.stalled == pytest.approx(0.0)


def test_a_pause_that_was_chosen_counts_for_nothing_and_a_preemption_does():
    for code, restarting in ((130, 0.0), (75, 600.0)):
        first = [*attempt(0.0, 1, 0, 5, 1.0, 0.0), Stopped(time=5.0, step=5, reason="signal", exit_code=code)]
        found = goodput([first, attempt(605.0, 2, 5, 5, 1.0, 0.0)])
        assert found is not None
        assert found.restarting == pytest.approx(restarting)
        assert found.useful == 10.0


def test_a_rollback_within_an_attempt_undoes_its_steps():
    events = attempt(0.0, 1, 0, 8, 1.0, 0.0)
    events.append(RolledBack(time=9.0, step=4, from_step=8, path="c", why="spike"))
    events += [stepped(9.0 + k, 4 + k, 1.0) for k in range(1, 7)]
    found = goodput([events])
    assert found is not None
    assert (found.useful, found.replayed, found.lost_steps) == (10.0, 4.0, 4)


def test_evaluations_are_useful_and_saves_are_not():
    events = attempt(0.0, 1, 0, 2, 1.0, 0.0)
    events += [
        Evaluated(time=5.0, step=2, loss=1.0, count=1.0, seconds=3.0),
        Saved(time=9.0, step=2, path="c", bytes=1, seconds=4.0, why="policy"),
    ]
    found = goodput([events])
    assert found is not None
    assert (found.useful, found.stalled) == (5.0, 4.0)


def test_nothing_is_told_before_a_first_step():
    assert goodput([]) is None
    assert goodput([[started(0.0, 1, 0)]]) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.floats(0, 3), st.floats(0, 3), st.floats(0, 100)),
        min_size=1,
        max_size=6,
    )
)
def test_shares_sum_to_one_and_kept_steps_are_counted_once(history):
    attempts, time, at = [], 0.0, 0
    for number, (steps, lost, seconds, gap, pause) in enumerate(history, start=1):
        events = attempt(time, number, at, steps + lost, seconds, gap)
        at += steps
        time = events[-1].time + pause
        attempts.append(events)
    found = goodput(attempts)
    if found is None or found.total == 0:
        return
    # Ten sums of doubles: far below one part in 10^9.
    assert sum(found.shares().values()) == pytest.approx(1.0, rel=1e-9)
    assert min(found.shares().values()) >= 0
    assert found.lost_steps == sum(lost for _, lost, *_ in history[:-1])
