"""The dry run: the plan's own code on fake tensors, one distinct rank after another, in this process.

parallelize, accumulate, the agreement, clipping and the optimizer are the engine's; only what would hold or move data
is not there. An empty update comes first, so that the step is what every later one is: optimizer states exist.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from shardwise.data.micros import MicroBatch
from shardwise.models.hf import build as hf
from shardwise.parallel.parallelize import parallel_of, parallelize
from shardwise.parallel.pipeline import Shape
from shardwise.plan import check, schedules
from shardwise.plan.plan import Plan
from shardwise.plan.rough_memory import usable_bytes
from shardwise.torch_private import load_split_backward
from shardwise.train.loss import named
from shardwise.train.step import (
    Layout,
    Work,
    accumulate,
    agree,
    call_inputs,
    clip_factor,
    divisor,
    local_gradients,
    loss_key,
    scale_gradients,
    squares,
)
from shardwise.verify import agreement, repeats
from shardwise.verify.agreement import Call
from shardwise.verify.distinct import Distinct, distinct_ranks, micro_batch_sizes, split_lengths
from shardwise.verify.failure import Doing, RunFailed, rank_in_words, told
from shardwise.verify.fake_world import FakeWorld, KnownShapes
from shardwise.verify.fits import fits
from shardwise.verify.live_bytes import Watch
from shardwise.verify.repeats import Mark
from shardwise.verify.subject import Subject, subject_of
from shardwise.verify.values import DryRun, PhaseBytes, RankRun


class Ran(NamedTuple):
    """What a rank's step left: bytes by phase, calls, the marks between micro-batches, and what the engine assumed."""

    phases: tuple[PhaseBytes, ...]
    calls: list[Call]
    marks: list[Mark]
    said: tuple[str, ...]


def dry_run(plan: Plan, subject: Subject | None = None) -> DryRun:
    """Run each distinct rank of `plan`; what would end the run is in its violations and mismatches.

    `subject` absent: what the plan's recipe trains. Raises: BadInput for a plan whose model is not in it.
    """
    started = time.perf_counter()
    world, limit = plan.decision.mesh.world, usable_bytes(plan.cluster, plan.decision.mesh.world)
    refused = check.check(plan, world)
    if refused:
        return DryRun(world, limit, (), (), refused, (), time.perf_counter() - started)
    eager, said = as_run(plan)
    subject = subject or subject_of(eager)
    runs, calls = list[RankRun](), dict[int, list[Call]]()
    shapes, also = dict[Hashable, Shape](), list[str]()
    try:
        kinds, names = distinct_ranks(eager, _lengths(eager, subject)), loss_layout(eager, subject)
        for kind in kinds:
            run, calls[kind.rank], assumed = run_rank(eager, subject, kind, names, shapes)
            runs.append(run)
            also += assumed
        mismatches, found = agreement.mismatches(plan.decision.mesh, kinds, calls), fits(plan, runs, limit)
    except RunFailed as failed:
        mismatches, found = (), (failed.violation,)
    said = (*said, *dict.fromkeys(also))
    return DryRun(world, limit, tuple(runs), mismatches, found, said, time.perf_counter() - started)


def as_run(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan that a dry run obeys, and what it does otherwise than the plan says."""
    decision, said = plan.decision, ["a step after the first one: the optimizer's states exist"]
    if decision.compile != "off":
        decision = msgspec.structs.replace(decision, compile="off")
        said.append("blocks run eagerly, where the plan compiles them")
    return msgspec.structs.replace(plan, decision=decision), tuple(said)


def _lengths(plan: Plan, subject: Subject) -> tuple[int, ...]:
    if plan.ours and plan.arch is not None:
        return split_lengths(plan.arch)
    with told("Every rank", Doing("the module is built on meta")), torch.device("meta"):
        return tuple(sorted({length for p in subject.build().parameters() for length in p.shape}))


def loss_layout(plan: Plan, subject: Subject) -> Layout:
    """The names that the loss function gives, from the whole module on meta: in a pipeline one stage alone knows them.

    Raises: RunFailed for what forward and the loss raise for these shapes.
    """
    doing = Doing("the module is built on meta")
    reading = hf.NumbersAreOne() if plan.recipe.model.hf is not None else nullcontext()
    with told("Every rank", doing), torch.device("meta"), torch.no_grad(), reading:
        module = doing.module = subject.build()
        doing.what = "a batch goes through the whole module on meta"
        batch = subject.batch(1)
        args, kwargs = call_inputs(module, subject.inputs)(batch)
        outputs = module(*args, **kwargs)
        doing.what = "the loss is computed from the outputs of the whole module"
        losses = named(subject.loss(outputs, batch))
    metrics = [metric for loss in losses.values() for metric in sorted(loss.metrics)]
    return Layout(list(losses), list(dict.fromkeys(metrics)), [loss.weight for loss in losses.values()])


def run_rank(
    plan: Plan,
    subject: Subject,
    kind: Distinct,
    names: Layout,
    shapes: dict[Hashable, Shape],
    world: type[FakeWorld] = FakeWorld,
    *,
    every: bool = False,
) -> tuple[RankRun, list[Call], list[str]]:
    """One rank through the engine: its run, its calls, and what was assumed.

    Micro-batches that repeat what others do are seen twice and not run again, unless `every` one shall be. `shapes` of
    hidden tensors are kept from stage to stage. Raises: RunFailed.
    """
    started, mesh, said = time.perf_counter(), plan.decision.mesh, list[str]()
    sizes = micro_batch_sizes(plan, mesh.data_coord(kind.rank))
    coord = mesh.coord(kind.rank)
    short = sizes if every else repeats.enough(plan.decision, coord.pp, sizes)
    ran = _through_the_engine(plan, subject, kind.rank, names, shapes, world, sizes, short)
    calls = ran.calls
    if len(short) < len(sizes):
        repeated = repeats.found(plan.decision, coord.pp, short, sizes, ran.marks, ran.calls)
        if repeated is None:
            ran = _through_the_engine(plan, subject, kind.rank, names, shapes, world, sizes, sizes)
            calls = ran.calls
        else:
            calls = repeats.whole(repeated, ran.marks, ran.calls)
            said.append(
                f"not all of a rank's {len(sizes)} micro-batches are run: those left out make the same calls and hold "
                "the same bytes as others, which was seen twice in a row"
            )
    seconds = time.perf_counter() - started
    rows = agreement.in_rows(mesh, calls)
    run = RankRun(kind.rank, coord, len(kind.stands_for), ran.phases, rows, seconds)
    return run, calls, [*said, *ran.said]


def _through_the_engine(
    plan: Plan, subject: Subject, rank: int, names: Layout, shapes: dict[Hashable, Shape],
    world: type[FakeWorld], sizes: Sequence[int], run: Sequence[int],
) -> Ran:  # fmt: skip
    """A step in which micro-batches of the sizes `run` run; the others of `sizes` are there, and wait."""
    mesh = plan.decision.mesh
    plan = msgspec.structs.replace(plan)  # each rank's own: one pipeline a plan is what the engine allows a process
    if plan.decision.schedule in schedules.SPLIT_BACKWARD:
        load_split_backward()
    doing = Doing("the module is built")
    with world(rank, mesh.world) as fake, told(rank_in_words(rank, mesh.coord(rank), mesh.degrees), doing):
        with torch.device("meta"):
            module = doing.module = subject.build()
        doing.what = "the module is split and gets its storage"
        module = parallelize(
            module,
            plan,
            blocks=plan.recipe.model.blocks,
            initialize=fake.begin,
            vocabulary_loss=subject.splits_vocabulary,
        )
        parallel = parallel_of(module)
        parallel.layouts[loss_key(subject.loss, training=True)] = names
        if parallel.pipeline is not None:
            parallel.pipeline.shapes = KnownShapes(shapes)
        doing.what = "the optimizer is built, and updates once"
        optimizer = subject.optimizer(module)
        fake.watch.built(module)
        without_update(optimizer)
        fake.watch.states(optimizer)
        waiting = list((Counter(sizes) - Counter(run)).elements())
        batches = [lambda n=size: subject.batch(n) for size in (*run, *waiting)]
        train(module, optimizer, subject, batches, fake.watch, run=len(run), doing=doing)
        said = parallel.tensor.why if parallel.tensor is not None else ()
        return Ran(fake.watch.ledger.phases(), list(fake.watch.traffic.calls), list(fake.watch.marks), said)


class _WatchedWork(Work):
    """Tells the watch which phase the step is in, as `accumulate` does to whoever catches its errors."""

    watch: Watch | None = None
    doing: Doing | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "phase" or self.watch is None or self.doing is None:
            return
        self.watch.enter("forward" if value == "forward" else "backward")
        self.doing.what = f"the step is in its {value}"
        if value in ("forward", "backward"):
            self.watch.mark()


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    subject: Subject,
    batches: Sequence[Callable[[], Any]],
    watch: Watch,
    steps: int = 1,
    run: int | None = None,
    doing: Doing | None = None,
) -> None:
    """Steps of the Trainer's own parts on the same batches; the last one is measured.

    `run`: how many of the batches are trained on; all exist. `doing` is kept up to date.
    """
    doing = doing or Doing("")
    parallel = parallel_of(module)
    watch.built(module)
    watch.sharded([module, *(parallel.pipeline.stages.values() if parallel.pipeline is not None else ())])
    waiting = [MicroBatch(make(), 1.0, 1) for make in batches]
    watch.given([micro.batch for micro in waiting])
    norm_limit = parallel.plan.recipe.optimizer.clip_norm
    clip = None if norm_limit == "off" else norm_limit
    with watch.hooks():
        for number in range(1, steps + 1):
            optimizer.zero_grad(set_to_none=True)
            watch.begin()
            work = _WatchedWork(module, waiting[:run], subject.loss, call_inputs(module, subject.inputs), number)
            work.watch, work.doing = watch, doing
            sums = accumulate(parallel, work)
            watch.enter("optimizer")
            doing.what = "the ranks agree and the optimizer updates"
            watch.gradients(module.parameters())
            outcome, extra = agree(parallel, sums, [squares(parallel)])
            norm = float(extra[0]) ** 0.5 / divisor(outcome)
            # Halved: a factor of one would be left out.
            scale_gradients(local_gradients(parallel), clip_factor(norm, clip) / divisor(outcome) / 2)
            optimizer.step()
            watch.states(optimizer)
            del sums, outcome, extra, work
            watch.enter("rest")


def without_update(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's states as its first step does, from gradients of zero. For tensors without data."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
