"""The score of predictions: laws that hold whatever the model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks import fit_cost
from shardwise.cost import naive, scoring
from shardwise.cost.predicting import Interval, Predictions, blocks, predict
from shardwise.cost.published import Row, rows
from shardwise.cost.scored_model import memory_model, time_model
from shardwise.errors import BadInput, DataError, RecipeError
from shardwise.report import score as report

MEASURED = rows(Path(__file__).with_name("measured_runs.csv"))


def interval(values: Sequence[float | None], spread: float = 1.2) -> Interval:
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return Interval(array, array / spread, array * spread)


def scaled(found: Sequence[Row], factor: float) -> Predictions:
    held = interval([row.measured_bytes and row.measured_bytes * factor for row in found])
    seconds = interval([row.measured_seconds and row.measured_seconds * factor for row in found])
    return Predictions(seconds, held, interval([1e9] * len(found)), {})


def test_perfect_predictions_have_no_error_and_lie_in_every_interval() -> None:
    overall = scoring.score(MEASURED, scaled(MEASURED, 1.0)).overall
    assert (overall.time.median, overall.time.p90, overall.memory.median, overall.memory.p90) == (0, 0, 0, 0)
    assert overall.interval_coverage == 1


def test_predictions_a_tenth_too_large_are_off_by_a_tenth_everywhere() -> None:
    found = scoring.score(MEASURED, scaled(MEASURED, 1.1))
    for errors in (found.overall.time, found.overall.memory, *(source.time for source in found.sources.values())):
        if errors.rows:
            assert [errors.median, errors.p90, errors.bias] == pytest.approx([0.1] * 3, rel=1e-9)


def test_the_order_of_rows_does_not_matter() -> None:
    order = list(range(len(MEASURED)))
    Random(0).shuffle(order)
    noise = np.random.default_rng(0).uniform(0.5, 1.5, len(MEASURED))
    found = scaled(MEASURED, 1.0)
    noisy = replace(found, seconds=Interval(found.seconds.value * noise, found.seconds.low, found.seconds.high))
    turned = Predictions(*(_taken(each, order) for each in (noisy.seconds, noisy.held, noisy.device)), problems={})
    straight, mixed = scoring.score(MEASURED, noisy), scoring.score([MEASURED[place] for place in order], turned)
    assert straight.sources == mixed.sources
    assert straight.overall.time == mixed.overall.time and straight.overall.memory == mixed.overall.memory


def _taken(each: Interval, order: list[int]) -> Interval:
    return Interval(each.value[order], each.low[order], each.high[order])


def test_every_family_has_the_same_weight_however_many_rows_it_has() -> None:
    wrong = [row for row in MEASURED if row.family == "vtrain"]
    right = [row for row in MEASURED if row.family == "SimuMax"]
    many = [*wrong * 20, *right]
    found = Predictions(
        interval([row.measured_seconds and row.measured_seconds * (1.4 if row in wrong else 1.0) for row in many]),
        interval([row.measured_bytes for row in many]), interval([1e9] * len(many)), {},
    )  # fmt: skip
    assert scoring.score(many, found).overall.time.median == pytest.approx(0.2, rel=1e-9)


def test_what_a_row_does_not_say_widens_its_interval_and_moves_no_value() -> None:
    known = [replace(row, unknown=frozenset()) for row in MEASURED]
    vague = [replace(row, unknown=frozenset({"recompute"})) for row in MEASURED]
    sure, unsure = (predict(each, constant_time, constant_memory).seconds for each in (known, vague))
    usable = np.isfinite(sure.value)
    assert usable.any() and (sure.value[usable] == unsure.value[usable]).all()
    assert (unsure.high[usable] > sure.high[usable]).all() and (unsure.low[usable] < sure.low[usable]).all()


def constant_time(workload, cluster, candidates):  # type: ignore[no-untyped-def]
    return interval([2.0] * len(candidates))


def constant_memory(workload, cluster, candidates, kind, rank):  # type: ignore[no-untyped-def]
    each = interval([6e9] * len(candidates))
    return each, each


def test_rows_of_one_workload_and_cluster_are_asked_for_together_and_each_once() -> None:
    many = MEASURED * 3
    found = list(blocks(many))
    places = sorted(place for block in found for place in block.places)
    assert places == [place for place, row in enumerate(many) if row.workload is not None]
    assert len(found) <= sum(row.workload is not None for row in MEASURED)
    assert all(len(block.candidates) == len(block.places) for block in found)


def test_a_model_that_refuses_a_row_leaves_a_reason() -> None:
    def refusing(workload, cluster, candidates):  # type: ignore[no-untyped-def]
        if workload.precision == "fp8":
            raise RecipeError("no peak is known")
        return constant_time(workload, cluster, candidates)

    found = scoring.score(MEASURED, predict(MEASURED, refusing, constant_memory))
    assert "no peak is known" in {each.reason for each in found.skipped}
    assert "bridge" in found.sources  # its other row is still scored


def test_out_of_memory_rows_are_called_fitting_where_the_high_end_fits() -> None:
    failed = [row for row in MEASURED if row.out_of_memory]
    assert failed
    for gigabytes, called in ((200e9, 0), (10e9, 1)):
        device = interval([gigabytes] * len(MEASURED))
        found = scoring.score(MEASURED, replace(scaled(MEASURED, 1.0), device=device)).overall
        assert (found.oom_rows, found.oom_called_fitting) == (1, called)


def test_out_of_memory_rows_without_a_prediction_are_not_counted() -> None:
    found = scoring.score(MEASURED, replace(scaled(MEASURED, 1.0), device=interval([None] * len(MEASURED)))).overall
    assert (found.oom_rows, found.oom_called_fitting) == (0, 0)


def test_regret_is_what_the_choice_costs_over_the_best_of_a_sweep() -> None:
    first = next(row for row in MEASURED if row.family == "vtrain")
    assert first.candidate is not None
    sweep = [
        replace(first, candidate=replace(first.candidate, micro_batch=np.array([size])), measured_seconds=seconds)
        for size, seconds in ((1, 5.0), (2, 3.0), (4, 2.0), (8, 2.5), (16, 4.0))
    ]
    chosen_second = [9.0, 8.0, 7.0, 1.0, 9.0]
    held = interval([None] * 5)
    found = scoring.score(sweep, Predictions(interval(chosen_second), held, held, {})).overall.regret
    assert (found.count, found.median) == (1, pytest.approx(0.25, rel=1e-12))
    right = scoring.score(sweep, Predictions(interval([9, 8, 1, 7, 9]), held, held, {})).overall.regret
    assert right.median == 0
    few = Predictions(interval(chosen_second[:4]), interval([None] * 4), interval([None] * 4), {})
    assert scoring.score(sweep[:4], few).overall.regret.count == 0


def test_the_naive_model_is_fitted_on_other_families_alone() -> None:
    plain = naive.seconds(MEASURED)
    slower = [
        replace(row, measured_seconds=row.measured_seconds * 2)
        if row.family == "vtrain" and row.measured_seconds
        else row
        for row in MEASURED
    ]
    for place, row in enumerate(MEASURED):
        if row.family == "vtrain":
            assert naive.seconds(slower).value[place] == pytest.approx(plain.value[place], rel=1e-12)
    alone = [row for row in MEASURED if row.family == "vtrain"]
    assert np.isnan(naive.seconds(alone).value).all()


def test_rotation_predicts_each_family_by_a_model_that_never_saw_it() -> None:
    seen: dict[str, set[str]] = {}

    def refit(others: Sequence[Row]):  # type: ignore[no-untyped-def]
        families = {row.family for row in others}

        def fitted(left_out: Sequence[Row]) -> Predictions:
            seen.update({row.family: families for row in left_out})
            return scaled(left_out, 1.1)

        return fitted

    found = scoring.score(MEASURED, scoring.rotated(MEASURED, refit))
    assert found.overall.time.median == pytest.approx(0.1, rel=1e-9)
    assert seen and all(family not in families for family, families in seen.items())


def test_without_a_row_to_score_the_first_reason_is_said() -> None:
    skipped = [row for row in MEASURED if row.reason_to_skip]
    with pytest.raises(DataError, match="No row can be scored") as caught:
        scoring.score(skipped, scaled(skipped, 1.0))
    assert isinstance(caught.value, BadInput) and caught.value.fix


def test_the_report_names_every_source_and_every_reason() -> None:
    found = scoring.score(MEASURED, scaled(MEASURED, 1.1))
    text = report.text(found)
    assert all(name in text for name in found.sources)
    assert all(each.reason.partition(":")[0] in text for each in found.skipped)
    assert "10.0%" in text


# Every 20th or so public row of each family, in full; the figures on all of them stand in benchmarks/RESULTS.md.
SAMPLE = rows(Path(__file__).with_name("published_runs_sample.csv"))
# Continuous-integration runs of toy models, four fifths of which is the host's time: their host cost is half explained.
TOY = "megatron-golden"


def test_the_committed_constants_reach_the_bar_on_public_rows() -> None:
    """The aim of 10 % and 25 % with a tenth more, as 178 rows are few; intervals hold four of five, to a tenth."""
    found = scoring.score(SAMPLE, predict(SAMPLE, time_model, memory_model))
    time = found.overall.time
    assert len(found.sources) >= 10 and time.rows >= 150
    assert time.median is not None and time.p90 is not None and time.coverage is not None
    assert time.median < 0.11 and time.p90 < 0.275
    assert 0.7 < time.coverage < 0.9
    assert found.overall.oom_called_fitting == 0
    for name, source in found.sources.items():
        if name != TOY:
            assert source.time.median is not None and source.time.median < 0.18, name


@pytest.mark.nightly
def test_families_left_out_of_the_fit_are_predicted_two_and_a_half_times_better_than_by_one_utilisation() -> None:
    """Each family by constants fitted on the others from their values before any fit; a few minutes of one core."""
    start = fit_cost.before_any_fit()
    left_out = scoring.rotated(SAMPLE, lambda others: fit_cost.refitted(others, start, 12))
    overall = scoring.score(SAMPLE, left_out).overall
    ours, plain, time = overall.dense_time, overall.naive, overall.time
    assert ours.median is not None and plain.median is not None and ours.p90 is not None and plain.p90 is not None
    assert ours.median < plain.median / 2.5
    assert ours.p90 < plain.p90 / 1.5
    assert time.median is not None and time.median < 0.16
    assert time.coverage is not None and 0.7 < time.coverage < 0.9
    assert overall.regret.median is not None and overall.regret.median <= 0.05
