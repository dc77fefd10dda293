"""One step: forward and backward over this rank's micro-batches, one agreement over the ranks, one scaling.

Gradients are of the summed loss. They are divided once, at the end, by what the whole global batch counts; clipping
rides in the same multiplication, and the gradient norm, the stop flag and the counts ride in the same all-reduce.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ranks
from shardwise.data.micros import MicroBatch, Micros
from shardwise.data.order import seed_of
from shardwise.errors import DataError, LossError, ModelError
from shardwise.launch.heartbeat import HEART
from shardwise.parallel.parallelize import LastStep, Parallel, parallel_of
from shardwise.parallel.pipeline import Pipeline, signature_of
from shardwise.parallel.staging import Split, Stage
from shardwise.torch_private import norms, scale_, tree_map
from shardwise.train.loss import Loss, LossFunction, named

Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The agreed outcome of one step: the same value on every rank.

    `loss` and `metrics` are averages over the global batch, `count` what it counted, `losses` each named one's average.
    """

    loss: float
    count: float
    losses: Mapping[str, float]
    metrics: Mapping[str, float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)


@dataclasses.dataclass
class LocalSums:
    """What this rank adds to the agreement: (sum, count) by name, and each loss's weight. `key`: of which function."""

    key: str
    losses: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    metrics: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    weights: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, losses: Mapping[str, Loss], weight: float) -> None:
        """Raises: LossError where these are not the names of the micro-batches before."""
        here = {*losses, *(metric for loss in losses.values() for metric in loss.metrics)}
        if self.losses and here != (before := {*self.losses, *self.metrics}):
            raise _names_differ(here, before)
        for name, loss in losses.items():
            self.weights[name] = loss.weight
            _add(self.losses, name, (loss.total.detach() * weight, _times(loss.count, weight)))
            for metric, (hits, items) in sorted(loss.metrics.items()):
                _add(self.metrics, metric, (_times(hits, weight), _times(items, weight)))

    def counts(self) -> dict[str, float]:
        """What this rank counted, by loss; {} where it computes none. Waits for the device."""
        return {name: float(count) for name, (_, count) in self.losses.items()}

    def join(self, other: "LocalSums") -> None:
        """Add another's sums of the same names."""
        self.weights.update(other.weights)
        for mine, theirs in ((self.losses, other.losses), (self.metrics, other.metrics)):
            for name, (total, count) in theirs.items():
                _add(mine, name, (total, count))


def _times(value: Any, weight: float) -> Any:
    return (value.detach() if isinstance(value, torch.Tensor) else value) * weight


def _add(sums: dict[str, list[Any]], name: str, pair: tuple[Any, Any]) -> None:
    if name in sums:
        sums[name][0] = sums[name][0] + pair[0]
        sums[name][1] = sums[name][1] + pair[1]
    else:
        sums[name] = [pair[0], pair[1]]


def call_inputs(module: nn.Module, inputs: Inputs | str) -> Inputs:
    """`inputs="auto"` as a function: a dict gives the keys that forward takes, a tuple all but the last item.

    An sw.Split's forward takes what its `before` does.
    """
    if not isinstance(inputs, str):
        return inputs
    entry = module.before if isinstance(module, Split) else module
    parameters = inspect.signature(entry.forward if isinstance(entry, nn.Module) else entry).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def auto(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            taken = {k: v for k, v in batch.items() if takes_all or k in parameters}
            if not taken:
                raise ModelError(
                    f"forward takes {', '.join(parameters)}; the batch has {', '.join(map(str, batch))}.",
                    fix="give inputs=lambda batch: (args, kwargs)",
                )
            return (), taken
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return tuple(batch[:-1]), {}
        if isinstance(batch, tuple | list):
            return tuple(batch), {}
        return (batch,), {}

    return auto


def to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)


@dataclasses.dataclass
class Work:
    """One step's inputs to `accumulate`, where it stands (for an error's message), and what it divided by.

    `divisors`: of several named losses each one's count over the global batch; {} for a single loss.
    """

    module: nn.Module
    micros: list[MicroBatch]
    loss: LossFunction
    inputs: Inputs
    step: int
    scale: float = 1.0
    phase: str = "forward"
    divisors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def at(self, phase: str, micro: int = 0) -> None:
        """Where it stands, also for whoever watches from outside."""
        self.phase = phase
        HEART.at(phase, micro)

    @property
    def key(self) -> str:
        return loss_key(self.loss, training=True)

    def signature(self, index: int) -> Hashable:
        """Equal for micro-batches whose tensors have equal shapes."""
        return signature_of(self.micros[index].batch)


def loss_key(loss: LossFunction, *, training: bool) -> str:
    """A loss function's name among those that this module is trained and evaluated with; the same on every rank."""
    code = getattr(loss, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(loss).__qualname__
    return f"{place}, {'training' if training else 'evaluation'}"


def accumulate(parallel: Parallel, work: Work) -> LocalSums:
    """Forward and backward over this rank's micro-batches; gradients end as sums over all ranks. Collective.

    What forward draws comes from a seed of the micro-batch; the caller's CPU generator is as it was afterwards.
    """
    callers = torch.get_rng_state()
    try:
        sums = _accumulate(parallel, work)
    finally:
        torch.set_rng_state(callers)
    work.at("gradient reduction")
    _every_parameter_has_a_gradient(parallel)
    parallel.finish_gradients()
    return sums


def _accumulate(parallel: Parallel, work: Work) -> LocalSums:
    sums = LocalSums(work.key)
    divisors: Mapping[str, float] = {}
    if parallel.pipeline is not None:
        return _pipelined(parallel, parallel.pipeline, work)
    for index, micro in enumerate(work.micros):
        losses = _forward(parallel, work, index)
        sums.add(losses, micro.weight)
        if index == 0 and len(layout(parallel, sums).losses) > 1:
            divisors = work.divisors = _global_counts(parallel, work, sums)
        objective = _objective(losses, micro.weight, divisors) * work.scale
        work.at("backward", index)
        parallel.gradients.before_backward(last=index == len(work.micros) - 1)
        objective.backward()
    return sums


def _pipelined(parallel: Parallel, pipeline: Pipeline, work: Work) -> LocalSums:
    """The same over the stages of a pipeline: forward and backward in the schedule's order.

    Several named losses are each divided by what the global batch counts before any backward, so then the micro-batches
    run forward once more; so does the first one when a loss function is new, for its names.
    """
    divisors: Mapping[str, float] = {}
    if work.key not in parallel.layouts:
        layout(parallel, counted(parallel, pipeline, work, work.key, 1))
    if len(parallel.layouts[work.key].losses) > 1:
        counts = counted(parallel, pipeline, work, work.key, len(work.micros))
        divisors = work.divisors = _summed_counts(parallel, counts.counts(), work.key)
    sums = LocalSums(work.key)

    def call(stage: Stage, index: int, received: torch.Tensor | None) -> torch.Tensor:
        outputs, batch = _through(parallel, work, stage, index, received)
        if not stage.last:
            return outputs
        losses = named(work.loss(outputs, batch))
        sums.add(losses, work.micros[index].weight)
        return _objective(losses, work.micros[index].weight, divisors) * work.scale

    def before_backward(stage: int, last: bool) -> None:
        work.at("backward")
        parallel.gradients.before_backward(stage=stage, last=last)

    pipeline.train(len(work.micros), call, before_backward, work.signature)
    return sums


def counted(parallel: Parallel, pipeline: Pipeline, work: Work, key: str, count: int) -> LocalSums:
    """Forward alone over the first `count` micro-batches: the sums of the losses, on the last stage's ranks.

    Buffers (running statistics) are as before afterwards. Collective.
    """
    sums = LocalSums(key)
    buffers = [(b, b.clone()) for b in work.module.buffers()] if work.module.training else []

    def call(stage: Stage, index: int, received: torch.Tensor | None) -> torch.Tensor | None:
        outputs, batch = _through(parallel, work, stage, index, received)
        if not stage.last:
            return outputs
        sums.add(named(work.loss(outputs, batch)), work.micros[index].weight)
        return None

    with torch.no_grad():
        pipeline.forward_only(count, call, work.signature)
        for buffer, before in buffers:
            buffer.copy_(before)
    parallel.gradients.reshard()
    return sums


def _through(
    parallel: Parallel, work: Work, stage: Stage, index: int, received: torch.Tensor | None
) -> tuple[torch.Tensor, Any]:
    """One stage's forward of one micro-batch, and the batch."""
    work.at("forward", index)
    batch = to_device(work.micros[index].batch, parallel.device)
    _seed(parallel, work, index, stage.index)
    args, kwargs = work.inputs(batch)
    outputs: torch.Tensor = stage(received, args, kwargs)
    return outputs, batch


def _seed(parallel: Parallel, work: Work, index: int, stage: int = 0) -> None:
    """Dropout is a function of the position alone, so that a resumed run draws what an unbroken one would have.

    Ranks of one tensor-parallel group share the stream, unless each has a part of the sequence.
    """
    own = parallel.mesh.index("tp") if parallel.draws_apart else 0
    place = (parallel.data_coord, index, *((stage, own) if stage or own else ()))
    torch.manual_seed(seed_of(parallel.plan.recipe.seed, "micro-batch", work.step, *place))


def _forward(parallel: Parallel, work: Work, index: int) -> dict[str, Loss]:
    work.at("forward", index)
    batch = to_device(work.micros[index].batch, parallel.device)
    _seed(parallel, work, index)
    args, kwargs = work.inputs(batch)
    return named(work.loss(work.module(*args, **kwargs), batch))


def _objective(losses: Mapping[str, Loss], weight: float, divisors: Mapping[str, float]) -> torch.Tensor:
    """What a micro-batch's backward starts from. Raises: LossError where nothing that is trained made it."""
    total: torch.Tensor = sum(
        loss.total * (loss.weight * weight / divisors.get(name, 1.0)) for name, loss in losses.items()
    )  # type: ignore[assignment]
    if not total.requires_grad:
        raise LossError(
            "The loss does not depend on any trainable parameter.",
            fix="compute it from the model's outputs",
        )
    return total


class Layout(NamedTuple):
    """The names of a loss function's losses and metrics, in the order in which their sums cross the ranks."""

    losses: list[str]
    metrics: list[str]
    weights: list[float]


def layout(parallel: Parallel, sums: LocalSums) -> Layout:
    """What the loss function gives, the same on every rank, on those that never call it too.

    Sums cross the ranks by position, so another set of names would be added up wrongly, or hang.
    Collective the first time that a loss function is seen. Raises: LossError.
    """
    here = Layout(list(sums.losses), list(sums.metrics), list(sums.weights.values()))
    if sums.key not in parallel.layouts:
        everywhere = [Layout(*one) for one in ranks.gather_json(here) if one[0]]
        if not everywhere:
            raise DataError("No rank had anything to compute a loss on.", fix="give at least one sample")
        differs = next((one for one in everywhere if one != everywhere[0]), None)
        if differs is not None:
            raise _names_differ({*everywhere[0].losses, *everywhere[0].metrics}, {*differs.losses, *differs.metrics})
        parallel.layouts[sums.key] = everywhere[0]
    expected: Layout = parallel.layouts[sums.key]
    if here.losses and here != expected:
        raise _names_differ({*here.losses, *here.metrics}, {*expected.losses, *expected.metrics})
    return expected


def _names_differ(one: set[str], other: set[str]) -> LossError:
    return LossError(
        f"The loss function does not give the same names everywhere: {', '.join(sorted(one ^ other)) or 'weights'}.",
        why="losses and metrics are summed over all micro-batches and ranks, so each must give all of them",
        fix="return every loss and metric each time, with (0, 0) for a metric that has nothing to count",
    )


def _global_counts(parallel: Parallel, work: Work, first: LocalSums) -> dict[str, float]:
    """Each named loss's count over the global batch, needed before the first backward. Collective.

    With accumulation the other micro-batches run forward once more for it, without a graph; what that does to buffers
    (running statistics) is undone.
    """
    counts = {name: float(count) for name, (_, count) in first.losses.items()}
    buffers = [(b, b.clone()) for b in work.module.buffers()] if len(work.micros) > 1 else []
    with torch.no_grad():
        for index in range(1, len(work.micros)):
            for name, loss in _forward(parallel, work, index).items():
                counts[name] += float(loss.count) * work.micros[index].weight
    for buffer, before in buffers:
        # Past autograd: the first micro-batch's backward may still hold this buffer.
        buffer.data.copy_(before)
    return _summed_counts(parallel, counts, first.key)


def _summed_counts(parallel: Parallel, counts: Mapping[str, float], key: str) -> dict[str, float]:
    names = parallel.layouts[key].losses
    here = [counts.get(name, 0.0) if parallel.speaks else 0.0 for name in names]
    total = ranks.all_reduce_sum(torch.tensor(here, dtype=torch.float64))
    return {name: _positive(value, name) for name, value in zip(names, total.tolist(), strict=True)}


def _positive(count: float, name: str) -> float:
    if not count > 0:
        raise LossError(
            f"The global batch counts {count:g} items for {name!r}.",
            why="an average over nothing has no value",
            fix="return the number of items that the total sums over; a batch may not be masked out whole",
        )
    return count


def _every_parameter_has_a_gradient(parallel: Parallel) -> None:
    """Collective on the first step."""
    missing = [name for name, p in parallel.named_parameters if p.grad is None]
    if not parallel.checked_gradients:
        parallel.checked_gradients = True
        got = [name for name, p in parallel.named_parameters if p.grad is not None]
        everywhere = ranks.gather_json([missing, got])
        # Under pipeline a rank holds some parameters only: one is unused where none of its holders got a gradient.
        unused = {name for none, _ in everywhere for name in none} - {name for _, some in everywhere for name in some}
        undeclared = sorted(unused - set(parallel.plan.recipe.model.unused_parameters))
        if undeclared:
            raise ModelError(
                f"{undeclared[0]} has no gradient after a step"
                + (f", nor have {len(undeclared) - 1} more." if len(undeclared) > 1 else "."),
                why="it takes no part in the loss, or a path to it is cut",
                fix="requires_grad_(False) for what is not trained, or declare it in unused_parameters",
            )
    if missing:
        # The same update under every plan: a parameter that got nothing has gradient zero.
        names = set(missing)
        for name, parameter in parallel.named_parameters:
            if name in names and not hasattr(parallel.gradients, "buckets"):
                parameter.grad = torch.zeros_like(parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parallel: Parallel) -> list[torch.Tensor]:
    return [local(p.grad) for _, p in parallel.named_parameters if p.grad is not None]


def squares(parallel: Parallel) -> torch.Tensor:
    """This rank's share of the squared gradient norm, fp64: shards add up; what is replicated has one owner."""
    gradients = [local(p.grad) for p in parallel.owned if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=parallel.device)
    return torch.stack(norms(gradients)).to(torch.float64).square().sum()


def agree(parallel: Parallel, sums: LocalSums, extra: list[Any]) -> tuple[StepLoss, list[float]]:
    """The sums of all ranks as one StepLoss, and the summed extras: one all-reduce, one wait for the device.

    Collective. Raises: LossError where the global batch counts nothing.
    """
    names, weights = layout(parallel, sums)[:2], layout(parallel, sums).weights
    flat: list[Any] = []
    for group, found in zip(names, (sums.losses, sums.metrics), strict=True):
        for name in group:
            flat += found[name] if parallel.speaks else (0.0, 0.0)
    wide = [torch.as_tensor(v, dtype=torch.float64, device=parallel.device).reshape(()) for v in [*flat, *extra]]
    values = ranks.all_reduce_sum(torch.stack(wide)).tolist()
    pairs = list(zip(values[: len(flat) : 2], values[1 : len(flat) : 2], strict=True))
    losses = {name: total / _positive(count, name) for name, (total, count) in zip(names[0], pairs, strict=False)}
    metrics = {
        name: total / count if count else math.nan
        for name, (total, count) in zip(names[1], pairs[len(names[0]) :], strict=True)
    }
    loss = sum(weight * value for weight, value in zip(weights, losses.values(), strict=True))
    count = pairs[len(names[0]) - 1][1]
    return StepLoss(loss, count, losses, metrics), values[len(flat) :]


def divisor(outcome: StepLoss) -> float:
    """What summed gradients are divided by: named losses were divided before their backward."""
    return outcome.count if len(outcome.losses) == 1 else 1.0


def scale_gradients(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients and factor != 1.0:
        scale_(gradients, factor)


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """At most 1; torch's clip_grad_norm_ adds 1e-6 to the norm, and so do we, to give its bits."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def forward_backward(
    module: nn.Module,
    micros: Iterable[MicroBatch] | Any,
    loss: LossFunction,
    *,
    inputs: Inputs | str = "auto",
    step: int = 0,
) -> StepLoss:
    """One step's forward and backward in an own loop: afterwards every `.grad` is the global batch's average.

    `micros` is what `sw.batches` yields, or one batch. `step` keys dropout: `sw.batches` numbers it by itself; for
    plain batches the calls are counted, so give it there where dropout shall resume to the bit.
    Collective. Raises: LossError, ModelError.
    """
    parallel = parallel_of(module)
    parallel.calls += 1
    if isinstance(micros, Micros):
        step = step or micros.first
        pieces = list(micros)
    else:
        step = step or parallel.calls
        pieces = [MicroBatch(micros, 1.0, 1)]
    work = Work(module, pieces, loss, call_inputs(module, inputs), step)
    sums = accumulate(parallel, work)
    outcome, _ = agree(parallel, sums, [])
    scale_gradients(local_gradients(parallel), 1.0 / divisor(outcome))
    divided = dict(work.divisors) or dict.fromkeys(outcome.losses, divisor(outcome))
    parallel.last_step = LastStep(sums.counts, divided, {"loss": outcome.loss})
    return outcome


def clip_grad_norm(module: nn.Module, max_norm: float) -> float:
    """Scale gradients so that their norm over the mesh is at most `max_norm`; the norm before it. Collective."""
    parallel = parallel_of(module)
    gradients = local_gradients(parallel)
    norm = math.sqrt(ranks.all_reduce_sum(squares(parallel).reshape(1)).item())
    scale_gradients(gradients, clip_factor(norm, max_norm))
    if parallel.last_step is not None:
        parallel.last_step.alike["gradient norm"] = norm
    return norm
