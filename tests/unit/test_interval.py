"""How often to save: the formula against a simulation of failures, and the clock that decides."""

import math
import random

import pytest

from shardwise.checkpoint.interval import (
    DAY,
    MOST_STEPS,
    UNFLUSHED_SECONDS,
    Interval,
    between_failures,
    interval_seconds,
    record_of,
)
from shardwise.events.values import RunStarted, Stopped


def goodput(interval: float, stall: float, lag: float, mean: float, restart: float, rng: random.Random) -> float:
    """Useful share of a long run whose failures come at random: a save commits `lag` after its stall."""
    clock = kept = 0.0
    for _ in range(4000):
        left = rng.expovariate(1 / mean)
        saves = math.floor(max(0.0, left - lag) / (interval + stall))
        kept += saves * interval
        clock += left + restart
    return kept / clock


@pytest.mark.parametrize(
    ("stall", "lag", "mean"), [(2.0, 60.0, 1800.0), (10.0, 120.0, 11_160.0), (30.0, 30.0, 14_400.0)]
)
def test_the_interval_is_within_two_points_of_the_best_of_a_simulation(stall, lag, mean):
    """The optimum is flat. 4,000 failures leave a standard error of about 0.5 points."""
    chosen = interval_seconds(stall, lag, mean)
    others = [chosen * factor for factor in (0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)]
    found = {one: goodput(max(one, lag), stall, lag, mean, 180.0, random.Random(7)) for one in others}
    assert found[chosen] > max(found.values()) - 0.02
    assert found[chosen] > found[others[-1]]


def test_the_interval_grows_with_the_cost_and_falls_with_failures_and_is_no_shorter_than_the_lag():
    assert interval_seconds(4.0, 0.0, 1e6) == 2 * interval_seconds(1.0, 0.0, 1e6)
    assert interval_seconds(1.0, 0.0, 1e4) < interval_seconds(1.0, 0.0, 1e6)
    assert interval_seconds(0.001, 900.0, 10.0) == 900.0


def test_published_rates_stand_until_the_run_has_a_record_of_its_own():
    """Five failures of 1,000 node-days: 200 days for a node, 2,048 nodes 2.3 hours."""
    assert between_failures(1, 0.0, 0) == 200 * DAY
    assert between_failures(2048, 0.0, 0) == pytest.approx(200 * DAY / 2048)
    # A spot machine that died 20 times in ten days: every half day or so, not every 200 days.
    assert between_failures(1, 10 * DAY, 20) == pytest.approx(10 * DAY)
    assert between_failures(1, 1000 * DAY, 2000) == pytest.approx(0.6 * DAY, rel=0.01)


def test_attempts_that_do_not_say_that_they_stop_are_failures():
    def began(at: float, attempt: int) -> RunStarted:
        return RunStarted(time=at, run="r", attempt=attempt, world=1, pids=(1,), device="cpu", plan="", step=0)

    died = [began(0.0, 1)]
    stopped = [began(100.0, 2), Stopped(time=160.0, step=3, reason="signal", exit_code=75)]
    assert record_of([died, stopped, []]) == (60.0, 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_given_steps_are_kept_to():
    interval = Interval(5)
    assert [step for step in range(1, 16) if interval.due(step, asked=False)] == [5, 10, 15]
    assert not interval.asks()
    never = Interval(0)
    assert not any(never.due(step, asked=False) for step in range(1, 2000))


def test_auto_asks_when_its_time_is_over_and_learns_from_each_save():
    clock = Clock()
    interval = Interval("auto", nodes=128, clock=clock)
    interval.started(0)
    clock.now = 599.0
    assert not interval.asks()
    clock.now = 600.0
    assert interval.asks() and interval.due(7, asked=True) and not interval.due(7, asked=False)
    interval.saved(7, stall=2.0, lag=40.0)
    # sqrt(2 x 2 s x (200 days / 128 + 600 s))
    assert interval.seconds == pytest.approx(math.sqrt(4.0 * (200 * DAY / 128 + 600.0)))
    clock.now += interval.seconds - 1
    assert not interval.asks()
    clock.now += 1
    assert interval.asks()


def test_auto_is_never_rarer_than_every_so_many_steps_and_is_shorter_where_a_stop_cannot_be_flushed():
    interval = Interval("auto", clock=Clock())
    interval.started(100)
    assert not interval.due(100 + MOST_STEPS - 1, asked=False)
    assert interval.due(100 + MOST_STEPS, asked=False)
    interval.saved(600, stall=5.0, lag=10.0, flushes=False)
    assert interval.seconds == UNFLUSHED_SECONDS
    interval.saved(700, stall=5.0, lag=500.0, flushes=False)
    assert interval.seconds == 500.0
    interval.saved(800, stall=5.0, lag=10.0)
    assert interval.seconds > UNFLUSHED_SECONDS
