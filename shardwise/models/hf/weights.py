"""From safetensors files onto ranks: each reads the slices that it holds, so no host ever holds the whole."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.models.counter_rng import held_region_of
from shardwise.models.hf.folder import Stored, Together
from shardwise.models.hf.lora import base_name, is_adapter
from shardwise.names import canonical


@torch.no_grad()
def fill(module: nn.Module, found: Mapping[str, Stored | Together]) -> None:
    """Buffers as the model's own code makes them, then every parameter and stored buffer from its file's slice.

    `module`: whole or a rank's part, with storage; DTensors get their shard. Raises: ModelError.
    """
    _computed_buffers(module)
    with ExitStack() as files:
        opened: dict[Path, Any] = {}
        for name, tensor in _stored(module):
            if is_adapter(name):
                continue
            one = found[base_name(canonical(name))]

            def at(stored: Stored) -> Any:
                if stored.file not in opened:
                    opened[stored.file] = files.enter_context(safe_open(stored.file, framework="pt"))
                return opened[stored.file].get_slice(stored.name)

            if isinstance(one, Together):
                _copy_together(name, tensor, one, at)
            else:
                _copy(name, tensor, at(one))


def _stored(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = set(module.state_dict()) - {name for name, _ in module.named_parameters()}
    return [*module.named_parameters(), *((name, b) for name, b in module.named_buffers() if name in buffers)]


def _copy(name: str, tensor: torch.Tensor, stored: Any) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    held = held_region_of(name, tensor)
    if local.numel() == 0:
        return
    spans = tuple(slice(begin, begin + size) for begin, size in zip(held.offsets, held.shape, strict=True))
    part = stored[spans] if spans else stored[...]
    local.copy_(part.view(local.shape))


def _copy_together(name: str, tensor: torch.Tensor, one: Together, at: Callable[[Stored], Any]) -> None:
    """Of each expert that this rank holds a part of, the rows that it holds, part by part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return
    held = held_region_of(name, tensor)
    (first, top, left), (experts, rows, columns) = held.offsets, held.shape
    local = local.view(held.shape)
    for expert in range(experts):
        begin = 0
        for part in one.parts:
            stored = part[first + expert]
            low, high = max(top, begin), min(top + rows, begin + stored.shape[0])
            if low < high:
                values = at(stored)[low - begin : high - begin, left : left + columns]
                local[expert, low - top : high - top].copy_(values)
            begin += stored.shape[0]


def _computed_buffers(module: nn.Module) -> None:
    """What no file holds (rotary frequencies) by the model's own initialisation, which is told to leave weights be.

    Raises: ModelError where it leaves one as it was.
    """
    computed = [(name, b) for name, b in module.named_buffers() if name not in module.state_dict()]
    for _, buffer in computed:
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    module.initialize_weights()  # type: ignore[operator]
    left = [name for name, buffer in computed if buffer.is_floating_point() and bool(torch.isnan(buffer).any())]
    if left:
        raise ModelError(
            f"Nothing computes {left[0]} of {type(module).__name__}.",
            why="it is in no file, and the model's own initialisation leaves it as it is",
            fix="build the model by a function of your own that sets it",
        )
