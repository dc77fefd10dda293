"""A region is tried before it is split: its parts, one after another, must come to what the whole computes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.torch_private import parameter_slots


class Region(NamedTuple):
    """A module between whose column layers and row layer the work is split; paths are canonical.

    `parts`: of a fused column layer, the sizes of the pieces (q, k, v) along its outputs, each split by itself.
    `head_dim`: in an attention, what a split may not cut.
    """

    path: str
    columns: tuple[str, ...]
    row: str
    head_dim: int = 1
    parts: tuple[int, ...] = ()


class _Reached(Exception):
    """The row layer was called."""


# What a module is called with.
Called = tuple[tuple[Any, ...], Mapping[str, Any]]


def splits(module: nn.Module, region: Region, called: Called | None = None) -> bool | None:
    """Whether the row layer's sum over the parts, put in its place, gives the whole region's output.

    None where it cannot be tried: weights on meta, or a forward that takes more than a hidden tensor. It is tried on 8
    random positions in eval mode, or with what it was `called` with, where the first output is looked at; modes and the
    caller's generators are as before.
    """
    inner, row = module.get_submodule(region.path), module.get_submodule(region.row)
    columns = [module.get_submodule(path) for path in region.columns]
    weight = columns[0].weight
    if weight.is_meta or isinstance(weight, DTensor):
        return None
    x = torch.randn(2, 4, columns[0].in_features, generator=torch.Generator().manual_seed(0)).to(weight)
    args, kwargs = called or ((x,), {})
    count = _smallest_split(region, columns)

    def run() -> Any:
        output = inner(*args, **kwargs)
        return output[0] if called is not None and isinstance(output, tuple) and output else output

    with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluating(inner):
        try:
            whole = run()
        except Exception:
            return None
        if not isinstance(whole, torch.Tensor):
            return None
        try:
            parts = [_part(run, columns, row, region, part, count) for part in range(count)]
            total = sum(parts) if row.bias is None else sum(parts) + row.bias
            with _cut(columns, row, region, 0, count), _instead(row, lambda _: total):
                split = run()
        except Exception:
            return False
    if not isinstance(split, torch.Tensor) or split.shape != whole.shape:
        return False
    # Wrong splits are wrong by the size of the values; rounding is below 1e-3 of it in every dtype of a master.
    return bool((split - whole).norm() <= 1e-3 * whole.norm())


def _smallest_split(region: Region, columns: Sequence[nn.Module]) -> int:
    """Into how many parts: the smallest number above one that cuts between heads."""
    sizes = region.parts or tuple(layer.out_features for layer in columns)
    units = [size // region.head_dim for size in sizes] if region.head_dim > 1 else [2]
    common = math.gcd(*units)
    return next((n for n in range(2, common + 1) if common % n == 0), 1)


def _part(
    run: Callable[[], Any],
    columns: Sequence[nn.Module],
    row: nn.Module,
    region: Region,
    part: int,
    count: int,
) -> torch.Tensor:
    """What the row layer gives of one part. Raises: ValueError where it is not called."""
    found: list[torch.Tensor] = []
    forward = row.forward

    def reached(mixed: torch.Tensor) -> None:
        found.append(forward(mixed))
        raise _Reached

    with _cut(columns, row, region, part, count), _instead(row, reached):
        try:
            run()
        except _Reached:
            return found[0]
    raise ValueError("the row layer was not called")


@contextmanager
def _cut(columns: Sequence[nn.Module], row: nn.Module, region: Region, part: int, count: int) -> Iterator[None]:
    """One part's pieces of the weights in their places."""
    held = [(layer, dict(parameter_slots(layer))) for layer in [*columns, row]]
    try:
        for layer in columns:
            slots = parameter_slots(layer)
            for name, whole in list(slots.items()):
                if whole is not None:
                    pieces = whole.split(region.parts or len(whole))
                    slots[name] = torch.cat([piece.tensor_split(count)[part] for piece in pieces])
        slots = parameter_slots(row)
        slots["weight"] = slots["weight"].tensor_split(count, dim=1)[part]
        slots["bias"] = None
        yield
    finally:
        for layer, whole_slots in held:
            parameter_slots(layer).update(whole_slots)


@contextmanager
def _instead(layer: nn.Module, forward: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training
