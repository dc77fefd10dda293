"""Loss: what a step sums over the global batch, and what it divides by."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.errors import LossError
from shardwise.torch_private import tree_leaves

Number = torch.Tensor | float | int


@dataclasses.dataclass(frozen=True)
class Loss:
    """`total`: scalar tensor, the sum over this micro-batch of what counts; `count`: how many that is.

    `metrics` maps a name to (sum, count) and is averaged over the same global batch. `weight` matters where a loss
    function returns several named losses: the step minimises the weighted sum of their averages.
    """

    total: torch.Tensor
    count: Number
    metrics: Mapping[str, tuple[Number, Number]] = dataclasses.field(default_factory=dict)
    weight: float = 1.0


LossFunction = Callable[[Any, Any], Loss | Mapping[str, Loss]]


def named(value: object) -> dict[str, Loss]:
    """A loss function's return as named losses; a single Loss is named "loss".

    Raises: LossError for anything that cannot be summed over the global batch.
    """
    if isinstance(value, Loss):
        value = {"loss": value}
    if isinstance(value, Mapping) and value and all(isinstance(item, Loss) for item in value.values()):
        for name, loss in value.items():
            if not isinstance(loss.total, torch.Tensor) or loss.total.numel() != 1:
                raise LossError(
                    f"The total of {name!r} is not a scalar tensor.",
                    fix="return sw.Loss(per_item.sum(), per_item.numel())",
                )
        # In one order on every rank: sums cross the ranks by position.
        return dict(sorted(value.items()))
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        raise LossError(
            "The loss function returned a bare scalar.",
            why="an average cannot be joined with other averages unless it says over how many items it was taken",
            fix="return sw.Loss(total, count); for a mean over samples, loss=sw.mean_per_sample(fn)",
        )
    raise LossError(
        f"The loss function returned {type(value).__name__}.",
        fix="return sw.Loss(total, count), or {name: sw.Loss}",
    )


def mean_per_sample(fn: Callable[[Any, Any], torch.Tensor]) -> LossFunction:
    """Wrap a loss function that returns the mean over the samples of its batch: total = mean x samples."""

    def summed(outputs: Any, batch: Any) -> Loss:
        mean = fn(outputs, batch)
        samples = batch_size(batch)
        return Loss(mean * samples, samples)

    return summed


def batch_size(batch: Any) -> int:
    """The leading dim of the first tensor in a batch. Raises: LossError where there is none."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    raise LossError("The batch holds no tensor with a leading dim.", fix="return sw.Loss(total, count) from the loss")
