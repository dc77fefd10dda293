"""Random values by (seed, name, index): any slice can be drawn alone, so a rank makes only its own shard.

Counter-based: Philox turns (key, counter) into bits without a state that must be advanced in order. The key
is a hash of seed and name; the counter is the flat index. One 64-bit draw a value: its halves are the two
uniforms of a Box-Muller pair, of which the cosine is kept. About 30 million normal values a second and core.
"""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from shardwise import regions
from shardwise.errors import ModelError
from shardwise.torch_private import held_region

Floats = npt.NDArray[np.float32]
Draws = npt.NDArray[np.uint64]

# Values are always computed in whole aligned chunks: vectorised logarithms and cosines may round the tail of
# an array in another way than its middle, and a value must not depend on where a slice begins.
CHUNK = 16_384
_PER_COUNTER = 4  # Philox 4x64 gives four draws a counter


def normal_values(seed: int, name: str, first: int, count: int, std: float = 1.0) -> Floats:
    """Normal values with mean 0 at flat indices first .. first + count - 1; none beyond 6.7 std."""

    def transform(draws: Draws) -> npt.NDArray[np.float64]:
        radius = np.sqrt(-2.0 * np.log(((draws >> np.uint64(32)) + np.uint64(1)) * 2.0**-32))
        return std * radius * np.cos((draws & np.uint64(0xFFFFFFFF)) * (2.0 * np.pi * 2.0**-32))

    return _values(seed, name, first, count, transform)


def uniform_values(seed: int, name: str, first: int, count: int, low: float = 0.0, high: float = 1.0) -> Floats:
    """Uniform values in [low, high) (rounding to fp32 may reach `high`) at flat indices from `first`."""
    return _values(seed, name, first, count, lambda draws: low + (high - low) * ((draws >> np.uint64(11)) * 2.0**-53))


def _values(
    seed: int, name: str, first: int, count: int, transform: Callable[[Draws], npt.NDArray[np.float64]]
) -> Floats:
    values = np.empty(count, np.float32)
    for chunk, draws in _chunks(seed, name, first, count):
        begin, end = max(first, chunk), min(first + count, chunk + CHUNK)
        values[begin - first : end - first] = transform(draws)[begin - chunk : end - chunk]
    return values


def _chunks(seed: int, name: str, first: int, count: int) -> Iterator[tuple[int, Draws]]:
    """The aligned chunks that cover the slice: (its first index, its draws)."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    start = first // CHUNK * CHUNK
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=start // _PER_COUNTER)
    for chunk in range(start, first + count, CHUNK):
        yield chunk, generator.random_raw(CHUNK)


@torch.no_grad()
def fill_normal_(tensor: torch.Tensor, *, seed: int, name: str, std: float, mean: float = 0.0) -> None:
    """Fill a tensor, or of a DTensor the shard that this rank holds, with the normal values of its indices.

    Raises: ModelError for a layout other than replicas and shards cut by torch.chunk's rule.
    """

    def draw(first: int, count: int) -> Floats:
        values = normal_values(seed, name, first, count, std)
        return values + np.float32(mean) if mean else values

    _fill(tensor, name, draw)


@torch.no_grad()
def fill_uniform_(tensor: torch.Tensor, *, seed: int, name: str, bound: float) -> None:
    """As fill_normal_, with uniform values of [-bound, bound)."""
    _fill(tensor, name, lambda first, count: uniform_values(seed, name, first, count, -bound, bound))


def _fill(tensor: torch.Tensor, name: str, draw: Callable[[int, int], Floats]) -> None:
    whole = tuple(tensor.shape)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    held = held_region_of(name, tensor)
    if local.numel() == 0:
        return
    row = int(np.prod(whole[1:], dtype=np.int64))
    first, rows_held = (held.offsets[0], held.shape[0]) if whole else (0, 1)
    rows = draw(first * row, rows_held * row)
    # [rows * row] -> [rows, ...]; shards of later dims are cut from whole rows.
    kept = regions.inside(held, regions.whole(whole))[1:]
    block = rows.reshape(rows_held, *whole[1:])[(slice(None), *kept)]
    local.copy_(torch.from_numpy(np.ascontiguousarray(block)).view(local.shape))


def held_region_of(name: str, tensor: torch.Tensor) -> regions.Region:
    """The part of the logical tensor that this rank holds: of a plain one all. Raises: ModelError as fill_normal_."""
    if not isinstance(tensor, DTensor):
        return regions.whole(tuple(tensor.shape))
    try:
        return held_region(tensor)
    except ValueError as error:
        raise ModelError(
            f"{name!r} cannot be initialised shard by shard.", why=str(error), fix="initialise before this split"
        ) from None
