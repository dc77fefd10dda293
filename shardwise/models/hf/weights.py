"""From safetensors files onto ranks: each reads the slices that it holds, so no host ever holds the whole."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.models.counter_rng import held_region_of
from shardwise.models.hf.folder import Stored
from shardwise.models.hf.lora import base_name, is_adapter
from shardwise.names import canonical


@torch.no_grad()
def fill(module: nn.Module, found: Mapping[str, Stored]) -> None:
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
            if one.file not in opened:
                opened[one.file] = files.enter_context(safe_open(one.file, framework="pt"))
            _copy(name, tensor, opened[one.file].get_slice(one.name))


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
