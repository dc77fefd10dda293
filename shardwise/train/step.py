"""One step: forward and backward over this rank's micro-batches, one agreement over the ranks, one scaling.

Gradients are of the summed loss. They are divided once, at the end, by what the whole global batch counts; clipping
rides in the same multiplication, and the gradient norm, the stop flag and the counts ride in the same all-reduce.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ranks
from shardwise.data.micros import MicroBatch, Micros
from shardwise.data.order import seed_of
from shardwise.errors import LossError, ModelError
from shardwise.parallel.parallelize import Parallel, parallel_of
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
    """What this rank adds to the agreement: (sum, count) by name, and each loss's weight."""

    losses: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    metrics: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    weights: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, losses: Mapping[str, Loss], weight: float) -> None:
        for name, loss in losses.items():
            self.weights[name] = loss.weight
            _add(self.losses, name, (loss.total.detach() * weight, _times(loss.count, weight)))
            for metric, (hits, items) in sorted(loss.metrics.items()):
                _add(self.metrics, metric, (_times(hits, weight), _times(items, weight)))


def _times(value: Any, weight: float) -> Any:
    return (value.detach() if isinstance(value, torch.Tensor) else value) * weight


def _add(sums: dict[str, list[Any]], name: str, pair: tuple[Any, Any]) -> None:
    if name in sums:
        sums[name][0] = sums[name][0] + pair[0]
        sums[name][1] = sums[name][1] + pair[1]
    else:
        sums[name] = [pair[0], pair[1]]


def call_inputs(module: nn.Module, inputs: Inputs | str) -> Inputs:
    """`inputs="auto"` as a function: a dict gives the keys that forward takes, a tuple all but the last item."""
    if not isinstance(inputs, str):
        return inputs
    parameters = inspect.signature(module.forward).parameters
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
    """One step's inputs to `accumulate`, and where it stands (for an error's message)."""

    module: nn.Module
    micros: list[MicroBatch]
    loss: LossFunction
    inputs: Inputs
    step: int
    scale: float = 1.0
    phase: str = "forward"


def accumulate(parallel: Parallel, work: Work) -> LocalSums:
    """Forward and backward over this rank's micro-batches; gradients end as sums over all ranks. Collective.

    What forward draws comes from a seed of the micro-batch; the caller's CPU generator is as it was afterwards.
    """
    callers = torch.get_rng_state()
    try:
        sums = _accumulate(parallel, work)
    finally:
        torch.set_rng_state(callers)
    work.phase = "gradient reduction"
    _every_parameter_has_a_gradient(parallel)
    parallel.gradients.finish()
    return sums


def _accumulate(parallel: Parallel, work: Work) -> LocalSums:
    sums = LocalSums()
    divisors: dict[str, float] = {}
    for index, micro in enumerate(work.micros):
        losses = _forward(parallel, work, index)
        sums.add(losses, micro.weight)
        if len(losses) > 1 and not divisors:
            divisors = _global_counts(parallel, work, sums)
        objective: torch.Tensor = sum(
            loss.total * (loss.weight * micro.weight / divisors.get(name, 1.0)) for name, loss in losses.items()
        )  # type: ignore[assignment]
        parallel.gradients.last_micro_batch = index == len(work.micros) - 1
        work.phase = "backward"
        if not objective.requires_grad:
            raise LossError(
                "The loss does not depend on any trainable parameter.",
                fix="compute it from the model's outputs",
            )
        (objective * work.scale if work.scale != 1.0 else objective).backward()
    return sums


def _forward(parallel: Parallel, work: Work, index: int) -> dict[str, Loss]:
    work.phase = "forward"
    batch = to_device(work.micros[index].batch, parallel.device)
    # Dropout is a function of the position alone, so that a resumed run draws what an unbroken one would have.
    torch.manual_seed(seed_of(parallel.plan.recipe.seed, "micro-batch", work.step, parallel.data_coord, index))
    args, kwargs = work.inputs(batch)
    losses = named(work.loss(work.module(*args, **kwargs), batch))
    require_same_names(parallel, work.loss, work.module.training, losses)
    return losses


def require_same_names(parallel: Parallel, loss: LossFunction, training: bool, losses: Mapping[str, Loss]) -> None:
    """A loss function gives the same losses and metrics for every micro-batch, on every rank.

    Sums cross the ranks by position, so another set of names would be added up wrongly, or hang.
    Collective the first time that a function is seen. Raises: LossError.
    """
    code = getattr(loss, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else type(loss).__qualname__
    key = f"{place}, {'training' if training else 'evaluation'}"
    here = [*losses, *(f"{name}.{metric}" for name in losses for metric in sorted(losses[name].metrics))]
    if key not in parallel.loss_names:
        everywhere = ranks.gather_json(here)
        parallel.loss_names[key] = next((names for names in everywhere if names != here), here)
    expected = parallel.loss_names[key]
    if here != expected:
        differing = ", ".join(sorted(set(here) ^ set(expected)))
        raise LossError(
            f"The loss function does not give the same names everywhere: {differing}.",
            why="losses and metrics are summed over all micro-batches and ranks, so each must give all of them",
            fix="return every loss and metric each time, with (0, 0) for a metric that has nothing to count",
        )


def _global_counts(parallel: Parallel, work: Work, first: LocalSums) -> dict[str, float]:
    """Each named loss's count over the global batch, needed before the first backward. Collective.

    With accumulation the other micro-batches run forward once more for it, without a graph.
    """
    counts = {name: float(count) for name, (_, count) in first.losses.items()}
    with torch.no_grad():
        for index in range(1, len(work.micros)):
            for name, loss in _forward(parallel, work, index).items():
                counts[name] += float(loss.count) * work.micros[index].weight
    total = ranks.all_reduce_sum(torch.tensor(list(counts.values()), dtype=torch.float64))
    return {name: _positive(value, name) for name, value in zip(counts, total.tolist(), strict=True)}


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
        everywhere = set.intersection(*(set(names) for names in ranks.gather_json(missing)))
        undeclared = sorted(everywhere - set(parallel.plan.recipe.model.unused_parameters))
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


def squares(parallel: Parallel, gradients: list[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the squared gradient norm, fp64: shards add up; what is replicated has one owner."""
    if not parallel.sharded and not ranks.is_main():
        return torch.zeros((), dtype=torch.float64, device=parallel.device)
    stacked = torch.stack(norms(gradients)).to(torch.float64)
    return stacked.square().sum()


def agree(sums: LocalSums, extra: list[Any], device: torch.device) -> tuple[StepLoss, list[float]]:
    """The sums of all ranks as one StepLoss, and the summed extras: one all-reduce, one wait for the device.

    Collective. Raises: LossError where the global batch counts nothing.
    """
    pairs = [*sums.losses.values(), *sums.metrics.values()]
    flat = [value for pair in pairs for value in pair] + extra
    vector = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).reshape(()) for v in flat])
    values = ranks.all_reduce_sum(vector).tolist()
    averages = iter(range(0, 2 * len(pairs), 2))
    losses, count = {}, 0.0
    for name in sums.losses:
        at = next(averages)
        count = _positive(values[at + 1], name)
        losses[name] = values[at] / count
    metrics = {}
    for name in sums.metrics:
        at = next(averages)
        metrics[name] = values[at] / values[at + 1] if values[at + 1] else math.nan
    loss = sum(sums.weights[name] * value for name, value in losses.items())
    return StepLoss(loss, count, losses, metrics), values[2 * len(pairs) :]


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
    sums = accumulate(parallel, Work(module, pieces, loss, call_inputs(module, inputs), step))
    outcome, _ = agree(sums, [], parallel.device)
    scale_gradients(local_gradients(parallel), 1.0 / divisor(outcome))
    return outcome


def clip_grad_norm(module: nn.Module, max_norm: float) -> float:
    """Scale gradients so that their norm over the mesh is at most `max_norm`; the norm before it. Collective."""
    parallel = parallel_of(module)
    gradients = local_gradients(parallel)
    norm = math.sqrt(ranks.all_reduce_sum(squares(parallel, gradients).reshape(1)).item())
    scale_gradients(gradients, clip_factor(norm, max_norm))
    return norm
