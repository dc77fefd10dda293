"""The dry run: the plan's own code on fake tensors, one distinct rank after another, in this process.

parallelize, accumulate, the agreement, clipping and the optimizer are the engine's; only what would hold or move data
is not there. An empty update comes first, so that the step is what every later one is: optimizer states exist.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from shardwise.data.micros import MicroBatch
from shardwise.errors import BadInput, ShardwiseError
from shardwise.models.decoder import Decoder
from shardwise.optimizer import build as optimizers
from shardwise.parallel.parallelize import parallel_of, parallelize
from shardwise.parallel.pipeline import Shape
from shardwise.plan import check
from shardwise.plan.check import Violation
from shardwise.plan.plan import Plan
from shardwise.plan.rule_of_thumb import usable_bytes
from shardwise.train import setup
from shardwise.train.loss import LossFunction, named
from shardwise.train.step import (
    Inputs,
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
from shardwise.units import format_bytes
from shardwise.verify import agreement
from shardwise.verify.agreement import Call
from shardwise.verify.distinct import Distinct, distinct_ranks, micro_batch_sizes, split_lengths
from shardwise.verify.fake_world import FakeWire, FakeWorld
from shardwise.verify.live_bytes import Watch
from shardwise.verify.values import DryRun, LiveBytes, RankRun

Batch = Callable[[int], Any]  # samples -> a batch of fake tensors


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is trained: how to build it on meta, its batches, its loss, its optimizer."""

    build: Callable[[], nn.Module]
    batch: Batch
    loss: LossFunction
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Inputs | str = "auto"

    @property
    def splits_vocabulary(self) -> bool:
        """Whether its loss takes logits split over the vocabulary; the Trainer asks the same."""
        return bool(getattr(self.loss, "takes_vocabulary_shards", False))


def dry_run(plan: Plan, subject: Subject | None = None) -> DryRun:
    """Run each distinct rank of `plan`; what would end the run is in its violations and mismatches.

    `subject` absent: the decoder that the plan's arch describes. Raises: BadInput for a plan without an arch.
    """
    started = time.perf_counter()
    world, limit = plan.decision.mesh.world, usable_bytes(plan.cluster, plan.decision.mesh.world)
    refused = check.check(plan, world)
    if refused:
        return DryRun(world, limit, (), (), refused, (), time.perf_counter() - started)
    eager, said = as_run(plan)
    subject = subject or decoder_subject(eager)
    lengths = split_lengths(plan.arch) if plan.arch is not None else _lengths(subject)
    runs, calls, failed = list[RankRun](), dict[int, list[Call]](), list[Violation]()
    kinds, shapes = distinct_ranks(eager, lengths), dict[int, list[Shape]]()
    names = loss_layout(eager, subject)
    for kind in kinds:
        try:
            run, crossed = run_rank(eager, subject, kind, names, shapes)
        except ShardwiseError as error:
            failed.append(Violation("runs", f"rank {kind.rank}: {error.what}", error.why, error.fix))
            break
        runs.append(run)
        calls[kind.rank] = crossed
    mismatches = agreement.mismatches(plan.decision.mesh, kinds, calls) if not failed else ()
    found = tuple(failed) or fits(plan, runs, limit)
    return DryRun(world, limit, tuple(runs), mismatches, found, said, time.perf_counter() - started)


def as_run(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan that a dry run obeys, and what it does otherwise than the plan says."""
    decision, said = plan.decision, ["a step after the first one: the optimizer's states exist"]
    if decision.compile != "off":
        decision = msgspec.structs.replace(decision, compile="off")
        said.append("blocks run eagerly, where the plan compiles them")
    return msgspec.structs.replace(plan, decision=decision), tuple(said)


def decoder_subject(plan: Plan) -> Subject:
    """Our decoder with fake tokens of the plan's shape. Raises: BadInput where the plan's model is the user's own."""
    arch = plan.arch
    if arch is None:
        raise BadInput(
            "This plan's model is a module of your own, which the plan does not hold.",
            fix="call shardwise.verify.dry_run.dry_run(plan, subject) with it, a sample batch and its loss",
        )
    length = min(plan.recipe.data.sequence_length, arch.max_sequence_length)

    def batch(samples: int) -> Any:
        tokens = torch.zeros((samples, length), dtype=torch.int64)
        return {"tokens": tokens, "labels": torch.zeros_like(tokens)}

    return Subject(
        build=lambda: Decoder(arch),
        batch=batch,
        loss=setup.next_token_loss,
        optimizer=lambda module: optimizers.build(plan.recipe.optimizer, module),
    )


def _lengths(subject: Subject) -> tuple[int, ...]:
    with torch.device("meta"):
        return tuple(sorted({length for p in subject.build().parameters() for length in p.shape}))


def loss_layout(plan: Plan, subject: Subject) -> Layout:
    """The names that the loss function gives, from the whole module on meta: in a pipeline one stage alone knows them.

    Raises: what forward and the loss raise for these shapes.
    """
    with torch.device("meta"), torch.no_grad():
        module, batch = subject.build(), subject.batch(1)
        args, kwargs = call_inputs(module, subject.inputs)(batch)
        losses = named(subject.loss(module(*args, **kwargs), batch))
    metrics = [metric for loss in losses.values() for metric in sorted(loss.metrics)]
    return Layout(list(losses), list(dict.fromkeys(metrics)), [loss.weight for loss in losses.values()])


def run_rank(
    plan: Plan,
    subject: Subject,
    kind: Distinct,
    names: Layout,
    shapes: dict[int, list[Shape]],
    world: type[FakeWorld] = FakeWorld,
) -> tuple[RankRun, list[Call]]:
    """One rank through the engine; `shapes` of hidden tensors are kept from stage to stage. Raises: what it raises."""
    started = time.perf_counter()
    mesh = plan.decision.mesh
    plan = msgspec.structs.replace(plan)  # each rank's own: one pipeline a plan is what the engine allows a process
    with world(kind.rank, mesh.world) as fake:
        with torch.device("meta"):
            module = subject.build()
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
            parallel.pipeline.wire = FakeWire(parallel.mesh, shapes)
        optimizer = subject.optimizer(module)
        fake.watch.built(module)
        without_update(optimizer)
        fake.watch.states(optimizer)
        # Shapes of hidden tensors cross in the first step alone.
        steps = 1 if parallel.pipeline is None else 2
        sizes = micro_batch_sizes(plan, mesh.data_coord(kind.rank))
        train(module, optimizer, subject, [lambda n=size: subject.batch(n) for size in sizes], fake.watch, steps)
        phases, calls = fake.watch.ledger.phases(), fake.watch.traffic.calls
    seconds = time.perf_counter() - started
    run = RankRun(
        kind.rank, mesh.coord(kind.rank), len(kind.stands_for), phases, agreement.in_rows(mesh, calls), seconds
    )
    return run, calls


class _WatchedWork(Work):
    """Tells the watch which phase the step is in, as `accumulate` does to whoever catches its errors."""

    watch: Watch | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "phase" and self.watch is not None:
            self.watch.enter("forward" if value == "forward" else "backward")


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    subject: Subject,
    batches: Sequence[Callable[[], Any]],
    watch: Watch,
    steps: int = 1,
) -> None:
    """Steps of the Trainer's own parts on the same batches; the last one is measured."""
    parallel = parallel_of(module)
    watch.built(module)
    micros = [MicroBatch(make(), 1.0, 1) for make in batches]
    norm_limit = parallel.plan.recipe.optimizer.clip_norm
    clip = None if norm_limit == "off" else norm_limit
    with watch.hooks():
        for number in range(1, steps + 1):
            optimizer.zero_grad(set_to_none=True)
            watch.begin()
            work = _WatchedWork(module, micros, subject.loss, call_inputs(module, subject.inputs), number)
            work.watch = watch
            sums = accumulate(parallel, work)
            watch.enter("optimizer")
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


def fits(plan: Plan, runs: Sequence[RankRun], limit: int) -> tuple[Violation, ...]:
    """A violation where the fullest rank's peak is above what a rank may use, with the numbers by category."""
    fullest = max(runs, key=lambda run: run.peak.live.total)
    peak = fullest.peak
    if peak.live.total <= limit:
        return ()
    parts = sorted(((getattr(peak.live, name), name) for name in LiveBytes.__struct_fields__), reverse=True)
    listed = ", ".join(f"{name} {format_bytes(size)}" for size, name in parts if size)
    fix, apply = _smaller(plan, parts[0][1])
    return (
        Violation(
            rule="peak_fits",
            what=f"{format_bytes(peak.live.total)} of live tensors at the peak of rank {fullest.rank} "
            f"({peak.phase}), {format_bytes(limit)} usable on {plan.cluster.device.name}.",
            why=f"{listed}; what a dry run does not cover comes on top",
            fix=fix,
            apply=apply,
        ),
    )


def _smaller(plan: Plan, largest: str) -> tuple[str, dict[str, str | int] | None]:
    """What to change where this category is the largest."""
    decision = plan.decision
    if largest in ("activations", "other", "communication"):
        if decision.micro_batch > 1:
            half = decision.micro_batch // 2
            return f"batch.micro_batch = {half}", {"batch.micro_batch": half}
        if decision.recompute != "full":
            return 'train.plan.recompute = "full"', {"train.plan.recompute": "full"}
        return "a larger train.plan.tp, or a shorter data.sequence_length", None
    if decision.zero < 3 and decision.mesh.pp == 1 and decision.mesh.data_parallel > 1:
        return 'train.plan.zero = 3 and dp_shard = "auto"', {
            "train.plan.zero": 3,
            "train.plan.dp_shard": "auto",
            "train.plan.dp_replicate": "auto",
        }
    return "more devices, or a smaller model", None
