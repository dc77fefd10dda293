"""Spikes: a planted one is seen, an ordinary training is not, and what is seen survives a resume."""

import json
import math
import random

import pytest

from shardwise.train.spikes import IN_A_ROW, Spikes


def curve(step: int, rng: random.Random) -> float:
    """A falling loss with noise of two per cent."""
    return (2.0 + 8.0 / math.sqrt(step)) * (1 + 0.02 * rng.gauss(0, 1))


@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_training_has_no_spike(seed):
    rng, watch = random.Random(seed), Spikes()
    assert [watch.look(step, curve(step, rng)) for step in range(1, 2001)] == [None] * 2000


def test_a_planted_spike_is_seen_at_once_and_lasts_until_the_loss_is_back():
    rng, watch = random.Random(0), Spikes()
    for step in range(1, 501):
        assert watch.look(step, curve(step, rng)) is None
    seen = [watch.look(step, 2 * curve(step, rng)) for step in range(501, 501 + IN_A_ROW)]
    assert [(one.step, one.since, one.lasting) for one in seen if one is not None] == [
        (501, 501, False),
        (502, 501, False),
        (503, 501, True),
    ]
    assert watch.look(504, curve(504, rng)) is None
    again = watch.look(505, 2 * curve(505, rng))
    assert again is not None and again.since == 505


def test_a_spike_does_not_become_what_is_usual():
    rng, watch = random.Random(0), Spikes()
    for step in range(1, 501):
        watch.look(step, curve(step, rng))
    assert all(watch.look(step, 9.0) is not None for step in range(501, 1501))


def test_nothing_is_said_before_enough_steps_and_of_what_is_not_finite():
    watch = Spikes()
    assert watch.look(1, 1.0) is None
    assert watch.look(2, 1e9) is None
    assert watch.look(3, math.nan) is None
    assert watch.look(4, math.inf) is None


def test_a_resumed_watch_says_what_an_unbroken_one_says():
    rng, whole, first = random.Random(1), Spikes(), Spikes()
    losses = [curve(step, rng) for step in range(1, 301)]
    losses[200:202] = [50.0, 50.0]
    said = [whole.look(step, loss) for step, loss in enumerate(losses, start=1)]
    for step, loss in enumerate(losses[:201], start=1):
        first.look(step, loss)
    resumed = Spikes()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [resumed.look(step, loss) for step, loss in enumerate(losses[201:], start=202)] == said[201:]
    assert said[200] is not None and said[201] is not None and said[201].since == 201
