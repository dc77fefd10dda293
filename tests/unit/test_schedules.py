"""Schedules: laws of the factor over a whole run."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import RecipeError
from shardwise.inputs.recipe import ScheduleSpec
from shardwise.optimizer.schedules import Schedule

DECAYING = (sw.linear, sw.cosine, sw.wsd)
runs = st.tuples(st.integers(0, 40), st.integers(41, 200), st.floats(0.0, 1.0))


@pytest.mark.parametrize("make", DECAYING)
@given(run=runs)
def test_the_last_step_has_the_final_factor_and_later_ones_keep_it(make, run):
    warmup, total, final = run
    factor = make(warmup_steps=warmup, final_factor=final).resolve(total)
    assert factor(total) == final
    assert factor(total + 7) == final


@pytest.mark.parametrize("make", DECAYING)
@given(run=runs)
def test_it_rises_to_one_and_never_again(make, run):
    warmup, total, final = run
    factor = make(warmup_steps=warmup, final_factor=final).resolve(total)
    values = [factor(step) for step in range(1, total + 1)]
    assert all(later > earlier for earlier, later in pairwise(values[:warmup]))
    assert all(later <= earlier for earlier, later in pairwise(values[warmup:]))
    assert all(min(final, 1 / max(1, warmup)) <= value <= 1.0 for value in values)


@pytest.mark.parametrize("make", [*DECAYING, sw.constant])
def test_warm_up_goes_in_equal_parts_and_ends_at_one(make):
    factor = make(warmup_steps=8).resolve(100)
    assert [factor(step) for step in range(1, 9)] == [step / 8 for step in range(1, 9)]


@pytest.mark.parametrize("make", DECAYING)
@given(run=runs)
def test_no_step_jumps_at_the_joins(make, run):
    warmup, total, final = run
    schedule = make(warmup_steps=warmup, final_factor=final)
    factor = schedule.resolve(total)
    decay = max(1, round(0.1 * total)) if make is sw.wsd else total - warmup
    # A cosine's steepest step is pi / 2 of the straight line's.
    steepest = max(1.5708 * (1.0 - final) / min(decay, total - warmup), 1 / max(1, warmup)) * (1 + 1e-9)
    before = factor(1) if warmup else 1.0
    for step in range(1, total + 1):
        assert abs(factor(step) - before) <= steepest
        before = factor(step)


def test_a_cosine_is_half_way_in_the_middle_and_a_line_everywhere():
    assert sw.cosine(final_factor=0.2).factor(50, 100) == pytest.approx(0.6)
    assert sw.linear(final_factor=0.5).factor(25, 100) == pytest.approx(0.875)


def test_wsd_is_flat_until_its_last_steps():
    factor = sw.wsd(warmup_steps=10, decay_steps=20, final_factor=0.1).resolve(100)
    assert {factor(step) for step in range(10, 81)} == {1.0}
    assert factor(81) == pytest.approx(1 - 0.9 / 20)
    assert sw.wsd().resolve(100)(90) == 1.0
    assert sw.wsd().resolve(100)(91) < 1.0


def test_decay_steps_count_from_the_end_of_warm_up():
    factor = sw.linear(warmup_steps=10, decay_steps=30).resolve(100)
    assert factor(10) == 1.0
    assert factor(40) == factor(100) == 0.0


def test_a_run_inside_its_warm_up_just_rises():
    for make in (*DECAYING, sw.constant):
        factor = make(warmup_steps=50).resolve(5)
        assert [factor(step) for step in range(1, 6)] == [step / 50 for step in range(1, 6)]


def test_a_schedule_is_a_value_and_the_recipe_makes_the_same():
    assert sw.cosine(warmup_steps=3) == sw.cosine(warmup_steps=3)
    assert sw.cosine(warmup_steps=3) == Schedule(ScheduleSpec(name="cosine", warmup_steps=3))


@pytest.mark.parametrize("keys", [{"warmup_steps": -1}, {"decay_steps": 0}, {"final_factor": 1.5}])
def test_values_out_of_range_are_refused(keys):
    with pytest.raises(RecipeError, match=next(iter(keys))):
        sw.cosine(**keys)
