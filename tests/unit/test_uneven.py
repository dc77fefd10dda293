"""Groups of machines that differ: blocks and shares of the batch by speed, laws of what is chosen and predicted."""

import math

import msgspec
import pytest

from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import from_keys
from shardwise.plan import automatic, choice, uneven
from shardwise.plan.check import check
from shardwise.plan.choice import Choice
from shardwise.plan.plan import Plan
from shardwise.plan.questions import Question
from shardwise.plan.subject import Subject
from shardwise.report import plan as plain
from shardwise.report.planned import name

MIXED = ("8xA100-SXM4-80GB+8xL4", "8xL4+8xA100-SXM4-80GB", "2x8xH100+4x8xA100-SXM4-80GB")
MODEL = automatic.costs()
# Seconds that no prediction tells apart: blocks are shared out by a straight line through two depths.
ALIKE = choice.ALIKE


def question(cluster: str, batch: int = 256) -> Question:
    keys = {
        "model": {"preset": "llama-3-8b"},
        "data": {"given": "not given", "sequence_length": 4096},
        "batch": {"global_batch": batch},
        "train": {"steps": 10},
        "run": "runs/test",
    }
    return Question(from_keys(keys), preset("llama-3-8b"), parse_cluster(cluster), {})


@pytest.fixture(scope="module", params=MIXED)
def mixed(request: pytest.FixtureRequest) -> tuple[Subject, tuple[Choice, ...]]:
    subject = question(request.param).subject()
    return subject, uneven.choices(subject, MODEL)


def test_even_stages_written_out_are_predicted_as_even_ones_on_machines_that_do_not_differ() -> None:
    subject = question("2x8xA100-SXM4-80GB").subject()
    for plan in automatic.searched(question("2x8xA100-SXM4-80GB"), MODEL, 8).running:
        mesh, layers = plan.decision.mesh, subject.workload.arch.num_layers
        stages = mesh.pp * plan.decision.stages_per_rank
        if mesh.pp == 1 or layers % stages:
            continue
        written = msgspec.structs.replace(plan.decision, stage_blocks=(layers // stages,) * stages)
        told = uneven.of_any(subject, MODEL, written)
        assert told.step_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-9)
        assert told.memory_bytes == pytest.approx(plan.estimate.memory_bytes, rel=1e-9)
        break
    else:
        pytest.fail("no pipeline was searched")


def test_every_choice_gives_each_rank_what_its_own_device_holds_and_the_model_once(
    mixed: tuple[Subject, tuple[Choice, ...]],
) -> None:
    subject, choices = mixed
    assert choices
    for one in choices:
        decided = one.decision
        held = uneven.memory_by_rank(subject, decided)
        assert all(rank.interval[1] <= rank.limit for rank in held)
        assert max(rank.interval[1] / rank.limit for rank in held) == pytest.approx(
            one.estimate.memory_bytes_interval[1] / one.estimate.memory_limit_bytes
        )
        assert sum(one.estimate.seconds.values()) == pytest.approx(one.estimate.step_seconds)
        if decided.stage_blocks != "even":
            assert sum(decided.stage_blocks) == subject.workload.arch.num_layers
            assert len(decided.stage_blocks) == decided.mesh.pp


def test_stages_on_faster_machines_have_no_fewer_blocks(mixed: tuple[Subject, tuple[Choice, ...]]) -> None:
    subject, choices = mixed
    best = next(one.decision for one in choices if not one.planned_only and one.decision.stage_blocks != "even")
    each, peaks = best.mesh.world // best.mesh.pp, []
    for group in subject.groups:
        peaks += [group.node.device.dense_bf16_flops_per_second or 0.0] * (group.devices // each)
    blocks = dict(zip(peaks, best.stage_blocks, strict=True))
    assert blocks[max(peaks)] > blocks[min(peaks)]


def test_no_other_number_of_blocks_is_faster(mixed: tuple[Subject, tuple[Choice, ...]]) -> None:
    subject, choices = mixed
    best = next(one for one in choices if not one.planned_only and one.decision.mesh.pp in (2, 3))
    sizes = best.decision.stage_blocks
    assert sizes != "even"
    layers, slow = subject.workload.arch.num_layers, min(sizes)
    for fewer in range(1, layers // len(sizes) + 1):
        # The stages of the slower group with so many blocks each, the rest to the others.
        ranks = [size == slow for size in sizes]
        rest, faster = layers - fewer * sum(ranks), ranks.count(False)
        others = iter([rest // faster + (at < rest % faster) for at in range(faster)])
        tried = tuple(fewer if is_slow else next(others) for is_slow in ranks)
        told = uneven.of_any(subject, MODEL, msgspec.structs.replace(best.decision, stage_blocks=tried))
        if told.memory_bytes_interval[1] <= told.memory_limit_bytes:
            assert best.estimate.step_seconds <= (1 + ALIKE) * told.step_seconds, tried


def test_shares_take_the_whole_batch_and_beat_equal_ones() -> None:
    subject = question("2x8xH100+4x8xA100-SXM4-80GB", batch=1024).subject()
    shared = [one for one in uneven.choices(subject, MODEL) if one.decision.shares != "equal"]
    assert shared
    for one in shared:
        decided, width = one.decision, one.decision.mesh.tp * one.decision.mesh.cp
        ranks = [group.devices // width for group in subject.groups]
        assert decided.shares != "equal"
        taken = sum(count * share for count, share in zip(ranks, decided.shares, strict=True)) * decided.micro_batch
        # One micro-batch more on each rank of a group at most.
        assert 1024 <= taken < 1024 + max(ranks) * decided.micro_batch
        equal = math.ceil(1024 / (sum(ranks) * decided.micro_batch))
        same = msgspec.structs.replace(decided, shares=(equal,) * len(ranks), accumulation=equal)
        assert one.estimate.step_seconds <= uneven.of_any(subject, MODEL, same).step_seconds * (1 + ALIKE)
        assert any("shares" in reason for reason in one.planned_only)
    asked = question("2x8xH100+4x8xA100-SXM4-80GB", batch=1024)
    made = automatic.plan_of(asked.recipe, asked.arch, asked.cluster, shared[0], ())
    refused = [one for one in check(made, made.decision.mesh.world) if one.rule == "shares_run"]
    assert len(refused) == 1 and refused[0].apply == {"train.plan": "auto"}
    assert automatic.plan(asked.recipe, asked.arch, asked.cluster).decision.shares == "equal"


def test_the_plan_of_groups_that_differ_is_the_uneven_one_it_runs_and_comes_back_from_json() -> None:
    asked = question("8xA100-SXM4-80GB+8xL4")
    made = automatic.plan(asked.recipe, asked.arch, asked.cluster)
    sizes = made.decision.stage_blocks
    assert sizes != "even" and made.decision.shares == "equal"
    assert Plan.from_json(made.to_json()) == made
    assert f"stages of {' and '.join(map(str, sizes))} blocks" in name(made.decision)
    assert f"{' and '.join(map(str, sizes))} blocks" in plain.text(made)
    # Against the best even plan, by the same model.
    subject = asked.subject()
    even = [one for one in automatic.searched(asked, MODEL, 8).running if not uneven.is_uneven(one.decision)]
    assert made.estimate is not None
    assert all(made.estimate.step_seconds < one.estimate.step_seconds for one in even)
    assert subject.peak_flops_per_second == pytest.approx((312e12 + 121e12) / 2, rel=0.01)


def test_machines_that_do_not_differ_have_no_uneven_plans() -> None:
    assert uneven.choices(question("2x8xA100-SXM4-80GB").subject(), MODEL) == ()
