"""Micro-batches that repeat others are not run, and what a dry run says of the whole step stays the same."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.inputs.recipe import PipelineSchedule
from shardwise.plan import schedules
from shardwise.plan.plan import Decision, Plan
from shardwise.verify import repeats
from shardwise.verify.agreement import Call
from shardwise.verify.distinct import distinct_ranks, micro_batch_sizes, split_lengths
from shardwise.verify.dry_run import loss_layout, run_rank
from shardwise.verify.repeats import Mark, Run
from shardwise.verify.subject import subject_of
from tests.distributed import work
from tests.unit.test_dry_run import made

SHORTENED: dict[str, Plan] = {
    "zero 0": made({"dp_replicate": 2}, 0, accumulation=7),
    "zero 2, uneven": made({"dp_shard": 3}, 2, accumulation=12, global_batch=70),
    "zero 3, uneven, full recompute": made({"dp_shard": 2}, 3, accumulation=11, global_batch=42, recompute="full"),
    "1f1b": made({"pp": 3}, 0, schedule="1f1b", accumulation=14),
    "1f1b, tied, uneven": made(
        {"pp": 2}, 0, {"tied_embeddings": True}, schedule="1f1b", accumulation=18, global_batch=34
    ),
    "1f1b, zero 1, tensor, mixed, uneven": made(
        {"pp": 2, "dp_shard": 2, "tp": 2}, 1, schedule="1f1b", accumulation=18, global_batch=68, precision="bf16"
    ),
    "interleaved": made(
        {"pp": 2}, 0, {"num_layers": 4}, schedule="interleaved-1f1b", stages_per_rank=2, accumulation=18
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORTENED)
def test_a_shortened_step_is_the_whole_one(name: str) -> None:
    """Bytes of every phase and category, and every collective in its order."""
    plan = SHORTENED[name]
    subject, shapes = subject_of(plan), dict[Any, Any]()
    names = loss_layout(plan, subject)
    kinds = distinct_ranks(plan, split_lengths(work.arch()))
    # Along the other axes ranks differ by the lengths of their shards alone.
    for kind in {plan.decision.mesh.coord(kind.rank).pp: kind for kind in kinds}.values():
        short, calls, said = run_rank(plan, subject, kind, names, shapes)
        whole, every, told = run_rank(plan, subject, kind, names, shapes, every=True)
        assert any("micro-batches" in one for one in said) and told == [], "it was shortened, the other was not"
        assert msgspec.structs.replace(short, seconds=whole.seconds) == whole
        assert calls == every


@st.composite
def steps(draw: st.DrawFn) -> tuple[Decision, tuple[int, ...]]:
    schedule = draw(st.sampled_from(["none", *get_args(PipelineSchedule)]))
    pp = 1 if schedule == "none" else draw(st.integers(2, 4))
    stages = 2 if schedule.startswith("inter") or schedule in schedules.V_SHAPED else 1
    count = draw(st.integers(1, 40)) + (2 * pp if schedule == "dualpipev" else 0)
    samples = draw(st.integers(count, 4 * count))
    if schedule != "none" and schedules.requires(schedule, pp, stages, count):
        count, samples = count * pp, samples * pp
    plan = work.plan(pp, zero=0, global_batch=samples, mesh={"pp": pp}, schedule=schedule, stages_per_rank=stages,
                     accumulation=count)  # fmt: skip
    return plan.decision, micro_batch_sizes(plan, 0)


def pretended(decision: Decision, pp: int, sizes: tuple[int, ...]) -> tuple[list[Mark], list[Call]]:
    """One call a forward or backward, of as many bytes as samples; bytes live by the forwards without a backward."""
    marks, calls, live = list[Mark](), list[Call](), 0
    for kind, stage, run in repeats.events(decision, pp, repeats.runs(sizes)):
        samples = repeats.runs(sizes)[run].samples
        marks.append(Mark(len(calls), live, live))
        calls.append(Call(f"{kind}{stage}", samples, (0,), "forward"))
        live += samples if kind == "F" else -samples if kind in "BW" else 0
    return marks, calls


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_shorter_step_filled_up_is_the_step_for_any_schedule_and_sizes(
    given_step: tuple[Decision, tuple[int, ...]],
) -> None:
    decision, sizes = given_step
    for place in range(decision.mesh.pp):
        short = repeats.enough(decision, place, sizes)
        marks, calls = pretended(decision, place, short)
        chosen = repeats.found(decision, place, short, sizes, marks, calls)
        assert chosen is not None
        assert repeats.whole(chosen, marks, calls) == pretended(decision, place, sizes)[1]


def test_a_long_run_is_cut_and_a_short_one_stays() -> None:
    decision = made({"dp_replicate": 1}, 0, accumulation=40).decision
    assert len(repeats.enough(decision, 0, (3,) * 40)) <= 6
    assert repeats.enough(decision, 0, (2, 3, 2, 3)) == (2, 3, 2, 3)
    assert repeats.runs((2, 3, 3, 2)) == (Run(2, 1), Run(3, 2), Run(2, 1))


def test_bytes_that_still_grow_or_other_calls_are_no_period() -> None:
    decision = made({"dp_replicate": 1}, 0, accumulation=40).decision
    short = repeats.enough(decision, 0, (3,) * 40)
    marks, calls = pretended(decision, 0, short)
    growing = [mark._replace(live=mark.live + index, most=mark.most + index) for index, mark in enumerate(marks)]
    assert repeats.found(decision, 0, short, (3,) * 40, growing, calls) is None
    others = [call._replace(bytes=index) for index, call in enumerate(calls)]
    assert repeats.found(decision, 0, short, (3,) * 40, marks, others) is None
    assert repeats.found(decision, 0, short, (3,) * 40, [*marks, marks[-1]], calls) is None
