"""The two-split probe: is a batch's loss the sum of its parts' losses? If not, something mixes samples."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from shardwise.torch_private import Dropout, tree_leaves, tree_map

# In fp64 rounding is far below both, but a module may compute inside in fp32 (a norm that upcasts, say),
# whose unit roundoff is 6e-8: a hundred roundings of it. In fp32 cancellation in gradients costs two digits
# more. What mixes samples moves a gradient by about 1 / samples.
BOUND_FP64, BOUND_FP32 = 1e-5, 1e-3

Split = Callable[[Any], tuple[Any, Any]]


class SplitProbe(NamedTuple):
    """The verdict and its reason; `difference` is the largest relative one, `bound` what rounding makes."""

    verdict: Literal["additive", "mixes", "unknown"]
    reason: str
    difference: float = 0.0
    bound: float = 0.0


class _Sums(NamedTuple):
    totals: dict[str, float]
    gradients: dict[str, torch.Tensor]


def two_split_probe(
    module: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    inputs_fn: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]],
    batch: Any,
    split: Split | None = None,
) -> SplitProbe:
    """Run `batch` whole and in two parts through a copy of `module` in training mode, and compare sums.

    Totals, counts and gradients of `loss_fn(outputs, batch)` (objects with `total` and `count`, or a dict of
    them) must add up. Dropout is off. The module, its buffers and gradients, and the random state are not
    touched.
    """
    try:
        halves = (split or halve)(batch)
    except ValueError as error:
        return SplitProbe("unknown", str(error))
    with torch.random.fork_rng(devices=[]):
        for dtype, bound in ((torch.float64, BOUND_FP64), (torch.float32, BOUND_FP32)):
            try:
                probe = _prepared(module, dtype)
                runs = [_run(probe, loss_fn, inputs_fn, part, dtype) for part in (batch, batch, *halves)]
            except Exception as error:  # a stranger's code, in a dtype it may not know: any of it may fail
                reason = f"the probe could not run it: {type(error).__name__}: {error}"
                continue
            return _compare(*runs, bound=bound)
    return SplitProbe("unknown", reason)


def halve(batch: Any) -> tuple[Any, Any]:
    """Each tensor of a nested batch cut in two along its first dim; what is not a tensor goes to both halves.

    Raises: ValueError where the tensors do not share a first dim of two or more.
    """
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(f"a batch with first dims {sorted(sizes)} cannot be cut in two by samples")
    samples = sizes.pop()

    def part(first: int, last: int) -> Any:
        return tree_map(lambda leaf: leaf[first:last] if isinstance(leaf, torch.Tensor) else leaf, batch)

    # Not in the middle: of three samples one, so that means over halves do not happen to weigh the same.
    first = max(1, samples // 3)
    return part(0, first), part(first, samples)


def _prepared(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    probe = copy.deepcopy(module).to(dtype).train()
    for child in probe.modules():
        if isinstance(child, Dropout):
            child.p = 0.0
    return probe


def _run(probe: nn.Module, loss_fn: Any, inputs_fn: Any, batch: Any, dtype: torch.dtype) -> _Sums:
    """Totals and gradients of one batch, from the same buffers each time: running statistics go back."""
    batch = tree_map(lambda leaf: _as(leaf, dtype), batch)
    buffers = {name: buffer.clone() for name, buffer in probe.named_buffers()}
    probe.zero_grad(set_to_none=True)
    args, kwargs = inputs_fn(batch)
    value = loss_fn(probe(*args, **kwargs), batch)
    losses = value if isinstance(value, Mapping) else {"loss": value}
    sum(getattr(loss, "total", loss) for loss in losses.values()).backward()
    totals = {f"the total of {name}": _number(getattr(loss, "total", loss)) for name, loss in losses.items()}
    totals |= {f"the count of {name}": _number(getattr(loss, "count", 0)) for name, loss in losses.items()}
    for name, buffer in probe.named_buffers():
        buffer.copy_(buffers[name])
    gradients = {name: p.grad.double() for name, p in probe.named_parameters() if p.grad is not None}
    return _Sums(totals, gradients)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _compare(whole: _Sums, again: _Sums, first: _Sums, second: _Sums, bound: float) -> SplitProbe:
    nothing = _Sums({}, {})
    if not all(math.isfinite(total) for sums in (whole, first, second) for total in sums.totals.values()):
        return SplitProbe("unknown", "the loss is not finite")
    if _worst(whole, again, nothing)[0] > bound:
        return SplitProbe("unknown", "two runs of one batch differ: the module draws random numbers as it trains")
    difference, where = _worst(whole, first, second)
    if difference <= bound:
        return SplitProbe("additive", "a batch is the sum of its parts", difference, bound)
    return SplitProbe("mixes", f"{where} of a batch is not the sum over its parts", difference, bound)


def _worst(whole: _Sums, first: _Sums, second: _Sums) -> tuple[float, str]:
    """The largest relative difference between `whole` and `first + second`, and where it is.

    Gradients are measured against the largest gradient norm: one that is zero in truth is rounding only.
    """
    worst = (0.0, "nothing")
    for name, total in whole.totals.items():
        parts = (first.totals[name], second.totals.get(name, 0.0))
        scale = abs(total) + abs(parts[0]) + abs(parts[1])
        worst = max(worst, (abs(total - sum(parts)) / scale if scale else 0.0, name))
    norms = [float(gradient.norm()) for sums in (whole, first, second) for gradient in sums.gradients.values()]
    scale = max(norms, default=0.0)
    for name in whole.gradients.keys() | first.gradients.keys() | second.gradients.keys():
        parts_of = [sums.gradients.get(name, torch.zeros(())) for sums in (whole, first, second)]
        difference = float((parts_of[0] - parts_of[1] - parts_of[2]).norm())
        worst = max(worst, (difference / scale if scale else 0.0, f"the gradient of {name}"))
    return worst
