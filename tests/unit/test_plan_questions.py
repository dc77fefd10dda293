"""The questions beside the plan: laws that their answers keep, with the roofline of the tests."""

import msgspec
import numpy as np
import pytest

from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import from_keys, with_overrides
from shardwise.plan import automatic, evaluate, fixed, machines, questions, space
from shardwise.plan.questions import Question
from shardwise.plan.search import search
from shardwise.plan.shortfall import shortfall
from tests.unit.roofline import ROOFLINE


def question(cluster: str = "8xH100-SXM5-80GB", model: str = "llama-3-8b", *overrides: str, fix: str = "") -> Question:
    keys = {
        "model": {"preset": model},
        "data": {"given": "not given", "sequence_length": 4096},
        "batch": {"global_batch": 256},
        "train": {"steps": 10},
        "run": "runs/test",
    }
    recipe = from_keys(with_overrides(keys, overrides))
    return Question(recipe, preset(model), parse_cluster(cluster), fixed.parse(fix.split()))


def test_what_fits_has_no_shortfall_to_tell_and_what_does_not_is_short_by_a_real_amount() -> None:
    asked = question(model="llama-3-70b", fix="offload=none")
    assert not len(search(asked.subject(), ROOFLINE).best.seconds)
    short = shortfall(asked, ROOFLINE)
    assert short is not None and short.short_bytes > 0
    assert short.closest.estimate.memory[short.binding] == short.binding_bytes
    # With so many more bytes it fits, with a little less it does not.
    subject = asked.subject()
    assert len(search(subject._replace(limit=subject.limit + short.short_bytes), ROOFLINE).best.seconds)
    assert not len(search(subject._replace(limit=subject.limit + 0.999 * short.short_bytes), ROOFLINE).best.seconds)


def test_the_nearest_plan_needs_no_more_than_any_other() -> None:
    asked = question(model="llama-3-70b", fix="offload=none")
    subject = asked.subject()
    nearest = evaluate.needed(subject, ROOFLINE, evaluate.nearest(subject, ROOFLINE))[0]
    task = subject.task
    table = space.with_splits(task, space.with_pipelines(task, space.cores(task)))
    assert nearest == pytest.approx(evaluate.needed(subject, ROOFLINE, table).min(), rel=1e-9)


@pytest.mark.parametrize("fix", ["recompute=none", "offload=none", "zero=0", "tp=1 pp=1 zero=0"])
def test_each_change_that_is_told_gives_a_plan(fix: str) -> None:
    asked = question("2x8xA100-SXM4-40GB", "llama-3-70b", fix=fix)
    if len(search(asked.subject(), ROOFLINE).best.seconds):
        return
    short = shortfall(asked, ROOFLINE)
    assert short is not None and short.changes
    assert all(change.step_seconds > 0 and change.arguments for change in short.changes)


def test_more_time_needs_no_more_machines() -> None:
    gpus = []
    for days in (5.0, 10.0, 20.0, 40.0, 400.0):
        enough, _ = questions.machines_for(question(), ROOFLINE, 1e12, days)
        assert enough is not None and enough.days <= days
        gpus.append(enough.gpus)
    assert gpus == sorted(gpus, reverse=True)
    none, fastest = questions.machines_for(question(), ROOFLINE, 1e15, 1.0)
    assert none is None and fastest is not None and fastest.days > 1


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    subject = question().subject()
    plan = search(subject, ROOFLINE, top=1).best.table
    most = questions.largest_micro_batch(subject, ROOFLINE, plan)
    for size, fits in ((most, True), (most + 1, False)):
        table = {**plan, "micro_batch": np.array([size])}
        assert (evaluate.needed(subject, ROOFLINE, table)[0] <= subject.limit) == fits


def test_the_deepest_model_fits_and_a_much_deeper_one_does_not() -> None:
    asked = question(fix="offload=none")
    deepest = questions.deepest_model(asked, ROOFLINE)
    assert deepest is not None
    for layers, fits in ((deepest.num_layers, True), (deepest.num_layers * 9 // 8 + 1, False)):
        arch = msgspec.structs.replace(asked.arch, num_layers=layers)
        assert (len(search(asked._replace(arch=arch).subject(), ROOFLINE, 1).best.seconds) > 0) == fits


def test_slower_links_are_never_faster_and_each_what_if_is_of_the_plans_told() -> None:
    asked = question("4xp5.48xlarge", "llama-3-70b")
    done = automatic.searched(asked, ROOFLINE)
    found = questions.what_ifs(done.subject, ROOFLINE, done.running, done.running[0])
    assert {"fp8 products", "fp32", "gradients as int8 on the wire"} <= {one.what for one in found}
    for one in found:
        assert one.speedup == pytest.approx(done.running[0].estimate.step_seconds / one.step_seconds)
        if "half as fast" in one.what:
            assert one.speedup <= 1 + 1e-12


def test_that_another_plan_is_faster_already_is_no_gain_of_a_choice() -> None:
    """Beside a chosen plan that is not the fastest, slower links still make nothing faster."""
    done = automatic.searched(question("4xp5.48xlarge", "llama-3-70b"), ROOFLINE)
    slowest = max(done.running, key=lambda one: one.estimate.step_seconds)
    assert slowest.estimate.step_seconds > done.running[0].estimate.step_seconds
    for one in questions.what_ifs(done.subject, ROOFLINE, done.running, slowest):
        if "half as fast" in one.what:
            assert one.speedup <= 1 + 1e-12


def test_groups_that_differ_count_as_their_weakest_and_every_rank_fits_the_smallest() -> None:
    asked = question("1x8xA100-SXM4-80GB+1x8xL4")
    subject = asked.subject()
    assert subject.task.world == 16
    assert subject.limit == asked.cluster.smallest_device.hbm_bytes
    for group in asked.cluster.groups:
        ours, theirs = subject.cluster.device, group.node.device
        assert (ours.dense_bf16_flops_per_second or 0) <= (theirs.dense_bf16_flops_per_second or 0)
    one = question("16xL4")
    slowest = search(one.subject(), ROOFLINE, 1).best.seconds
    assert machines.alike(one.cluster) == one.cluster
    assert len(slowest) == len(search(subject, ROOFLINE, 1).best.seconds)


@pytest.mark.parametrize("cluster", ["8xH100-SXM5-80GB", "4xp5.48xlarge"])
def test_the_plainest_of_equally_fast_plans_is_chosen_and_none_that_is_slower(cluster: str) -> None:
    done = automatic.searched(question(cluster), ROOFLINE, top=3)
    best, fastest = done.chosen, done.running[0].estimate.step_seconds
    assert best is not None and not best.planned_only and best in done.candidates
    assert fastest <= best.estimate.step_seconds <= fastest * (1 + automatic.ALIKE)
    assert fastest == pytest.approx(float(done.found.running.seconds[0]))
    plain = question(cluster, fix="pp=1 tp=1 cp=1")
    alone = automatic.searched(plain, ROOFLINE, top=1).running
    if alone and alone[0].estimate.step_seconds <= fastest * (1 + automatic.ALIKE):
        assert best.decision.mesh.pp * best.decision.mesh.tp == 1


def test_candidates_are_as_many_as_asked_for_and_show_what_runs() -> None:
    for top in (1, 2, 5):
        done = automatic.searched(question("4xp5.48xlarge", "llama-3-70b"), ROOFLINE, top)
        assert len(done.candidates) == top
        assert any(not one.planned_only for one in done.candidates)
        seconds = [one.estimate.step_seconds for one in done.candidates]
        assert seconds == sorted(seconds)
