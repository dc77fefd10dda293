"""Where a torch tensor's local part lies in the logical tensor, and its bytes."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import CheckpointError
from shardwise.regions import Region, whole
from shardwise.torch_private import alike_ranks, held_region

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def region_of(name: str, tensor: torch.Tensor) -> Region:
    """This rank's region of a tensor; a plain tensor counts as a whole.

    Raises: CheckpointError for a partial sum, and for a split that is not torch.chunk's.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    try:
        return held_region(tensor)
    except ValueError as error:
        raise CheckpointError(
            f"{name!r} cannot be saved or loaded.",
            why=str(error),
            fix="shard it with fully_shard or replicate, each dim of the mesh as Shard or Replicate",
        ) from None


def holders_of(tensor: torch.Tensor, holders: tuple[int, ...], known: dict[Any, tuple[int, ...]]) -> tuple[int, ...]:
    """Of `holders`, the ranks of the tensor's module, those that hold the region that this rank does.

    `known` spares looking twice at one mesh: give the same dict for all tensors of a training.
    """
    if not isinstance(tensor, DTensor):
        return holders
    mesh = tensor.device_mesh
    sharded = tuple(axis for axis, placed in enumerate(tensor.placements) if not isinstance(placed, Replicate))
    key = (mesh, sharded, holders)
    if key not in known:
        same = set(holders)
        known[key] = tuple(rank for rank in alike_ranks(mesh, sharded) if rank in same)
    return known[key]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, sharing its memory, outside autograd."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # The shard as it is: a DTensor's detach takes longer than a small shard's copy.
            tensor = tensor.to_local()
    return tensor.detach()


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Raises: CheckpointError for what has no bytes to save, or a dtype that the file format lacks."""
    if tensor.is_meta:
        raise CheckpointError(
            f"{name!r} is on the meta device.",
            why="it has a shape and no values yet",
            fix="initialise the module before it is saved or resumed",
        )
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES:
        raise CheckpointError(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be saved.",
            why=f"a checkpoint holds dense tensors of {', '.join(_NAMES.values())}",
            fix="give it as dense tensors of such a dtype",
        )
    return _NAMES[tensor.dtype]


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The values row by row, in host memory; no copy where they already lie so."""
    flat = local(tensor).to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `to_bytes`, on the CPU."""
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(shape)
