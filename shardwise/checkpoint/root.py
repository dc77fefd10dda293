"""The root: one digest of a state, the same under every split of it. No torch.

Of each logical tensor there is a sum: over its words, the bits as a signed integer times a weight of the word's place,
in two lanes modulo 2^64. A rank sums the regions that it holds, and the ranks' sums add up to the tensor's, however it
was cut. The root is a digest over names, dtypes, shapes and sums, and over the JSON that is the same on all ranks.

Words are of four bytes at most: an element of eight is two, beside each other in the last dim. A row is what the last
dims hold together, as many as have at most 1,024 words; it is cut in tiles of 1,024. A word's weight is an odd number
below 2^12 of its place in the tile, times an odd number of 64 bits of the tile. So inside a tile a sum is exact in a
float64 (31 bits of a word, 12 of a weight, 10 of the number of words), where a matrix product is as fast as memory, and

- a flipped bit changes both lanes: it adds a power of two below 2^64 times an odd number;
- two words that change places inside a tile change both lanes: weights differ there, and words by less than 2^32;
- elsewhere a lane stays the same by chance, once in 2^33 or more, and the other would have to stay too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.manifest import Json, TensorEntry, digest_of
from shardwise.regions import Region

TILE = 1024
LANES = 2
# Of the weights inside a tile: 31 + 12 + 10 bits are the 53 of a float64.
_WEIGHT_BITS = 12
# Words that are turned into floats at a time: a MiB, which stays in a core's cache.
_BLOCK_WORDS = 128 * TILE
# Words whose tiles are taken together after that: what NumPy takes for a call is then little beside what it does.
_GROUP_WORDS = 4096 * TILE
_WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int32}
# The odd constant nearest to 2^64 divided by the golden ratio, and the finaliser of splitmix64. Source: Steele, Lea,
# Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with Stafford's constants (variant 13).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LANE_SEEDS = np.array([0x243F6A8885A308D3, 0x13198A2E03707344], dtype=np.uint64)  # the first digits of pi, in hex
# What no root holds: random generators and whatever else is a rank's own, and the history of who trained which step.
OWN = frozenset({"own", "rng"})
HISTORY = frozenset({"state/trainer.ledger"})

_Floats = npt.NDArray[np.float64]
_Unsigned = npt.NDArray[np.uint64]


class Piece(NamedTuple):
    """Columns of a region's rows that lie in `tiles` tiles of the row, from tile `first` on: all of each tile, or in
    one tile those that `weights` are for. Shape of `weights`: [width, LANES].
    """

    start: int
    first: int
    tiles: int
    weights: _Floats


def region_sum(data: Any, item_bytes: int, shape: Sequence[int], region: Region) -> str:
    """The sum of a region, given its bytes row by row, as 32 hex digits; with a MiB of memory of its own.

    Sums of regions that are disjoint and cover a tensor add up to the tensor's. NumPy lets other threads run.
    """
    words = np.frombuffer(data, dtype=_WORDS[item_bytes])
    logical, box = _in_words(item_bytes, shape, region)
    inner = _inner(logical)
    columns = math.prod(logical[inner:])
    width = math.prod(box.shape[inner:])
    total = np.zeros(LANES, dtype=np.uint64)
    if not words.size:
        return spelled(total)
    grid = words.reshape(-1, width)
    floats: _Floats = np.empty(min(words.size, _BLOCK_WORDS), dtype=np.float64)
    per_row = -(-columns // TILE)
    for piece in _pieces(logical[inner:], Region(box.offsets[inner:], box.shape[inner:])):
        outer = Region(box.offsets[:inner], box.shape[:inner])
        for rows, first, tiles in _groups(len(grid), piece):
            begin = piece.start + (first - piece.first) * len(piece.weights)
            part = grid[rows, begin : begin + tiles * len(piece.weights)]
            starts = _rows(logical[:inner], outer, rows) * np.uint64(per_row)
            keys = np.add.outer(starts, np.arange(first, first + tiles, dtype=np.uint64))
            np.add(total, _scattered(_weighed(part, piece.weights, floats), keys.reshape(-1)), out=total)
    return spelled(total)


def spelled(lanes: Sequence[int] | _Unsigned) -> str:
    return "".join(f"{int(lane):016x}" for lane in lanes)


def lanes_of(value: str) -> tuple[int, ...]:
    """The inverse of `spelled`."""
    return tuple(int(value[16 * lane : 16 * lane + 16], 16) for lane in range(LANES))


def added(values: Iterable[str]) -> str:
    """The sum of what the values are sums of, which must be disjoint."""
    lanes = [0] * LANES
    for value in values:
        lanes = [(total + lane) % 2**64 for total, lane in zip(lanes, lanes_of(value), strict=True)]
    return spelled(lanes)


def scaled(value: str, times: int) -> str:
    """What a sum is where every word is held so many times."""
    return spelled([lane * times % 2**64 for lane in lanes_of(value)])


def in_root(name: str) -> bool:
    """Whether a tensor of this name, or a part of the state, is in the root."""
    first, *rest = name.split("/")
    return first not in OWN and "/".join([first, *rest[:1]]) not in HISTORY


def root_of(step: int, tensors: Iterable[TensorEntry], state: Mapping[str, Json]) -> str:
    """The root of a checkpoint: weights, optimizer, `state=` and the data's position, as far as all ranks have them
    alike; "" where a tensor has no sum.

    Not in it: what differs between ranks, random generators, other names of tied weights, and `HISTORY`.
    """
    kept = [entry for entry in tensors if in_root(entry.name)]
    if not all(entry.sum for entry in kept):
        return ""
    held = [[entry.name, entry.dtype, entry.shape, entry.sum] for entry in sorted(kept, key=lambda one: one.name)]
    parts = {part: _plain(part, value) for part, value in state.items() if in_root(part)}
    return digest_of(msgspec.json.encode([step, held, parts], order="sorted"))


def _plain(part: str, value: Json) -> Json:
    """Without what a split changes: the device of a tensor, and in which order parameters stand in a group."""
    if part.split("/")[0] == "optimizer":
        groups = [{**group, "params": sorted(group["params"])} for group in value["groups"]]
        value = {**value, "groups": groups}
    return _without_devices(value)


def _without_devices(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _without_devices(item) for key, item in value.items() if "$tensor" not in value or key != "device"}
    return [_without_devices(item) for item in value] if isinstance(value, list) else value


def _in_words(item_bytes: int, shape: Sequence[int], region: Region) -> tuple[tuple[int, ...], Region]:
    """A tensor and a region of it, counted in words; a scalar is a row of one."""
    logical, offsets, sizes = tuple(shape) or (1,), region.offsets or (0,), region.shape or (1,)
    each = 2 if item_bytes == 8 else 1
    return (*logical[:-1], logical[-1] * each), Region(
        (*offsets[:-1], offsets[-1] * each), (*sizes[:-1], sizes[-1] * each)
    )


def _inner(shape: Sequence[int]) -> int:
    """The first of the dims that make up a row: a matter of the logical shape alone, so the same under every split."""
    inner = len(shape) - 1
    while inner > 0 and math.prod(shape[inner - 1 :]) <= TILE:
        inner -= 1
    return inner


def _pieces(shape: Sequence[int], region: Region) -> Iterator[Piece]:
    """A region of a row, by the tiles that it touches."""
    weights = _tile_weights()
    if math.prod(shape) <= TILE:
        columns = np.arange(math.prod(shape)).reshape(shape)
        chosen = tuple(slice(begin, begin + size) for begin, size in zip(*region, strict=True))
        yield Piece(0, 0, 1, np.ascontiguousarray(weights[columns[chosen].reshape(-1)]))
        return
    (begin,), (size,) = region
    end = begin + size
    first_whole, after_whole = -(-begin // TILE), end // TILE
    if first_whole > after_whole:  # inside one tile, and neither of its ends
        yield Piece(0, begin // TILE, 1, weights[begin % TILE : end % TILE])
        return
    if begin % TILE:
        yield Piece(0, begin // TILE, 1, weights[begin % TILE :])
    if first_whole < after_whole:
        yield Piece(first_whole * TILE - begin, first_whole, after_whole - first_whole, weights)
    if end % TILE:
        yield Piece(after_whole * TILE - begin, after_whole, 1, weights[: end % TILE])


def _groups(rows: int, piece: Piece) -> Iterator[tuple[slice, int, int]]:
    """Some rows, and of each some tiles, at a time."""
    at_once = max(1, _GROUP_WORDS // len(piece.weights))
    tiles = min(piece.tiles, at_once)
    step = max(1, at_once // tiles)
    for begin in range(0, rows, step):
        for first in range(piece.first, piece.first + piece.tiles, tiles):
            yield slice(begin, min(begin + step, rows)), first, min(tiles, piece.first + piece.tiles - first)


def _rows(shape: Sequence[int], region: Region, rows: slice) -> _Unsigned:
    """Which rows of the logical tensor these rows of the region are."""
    rest = np.arange(rows.start, rows.stop, dtype=np.uint64)
    found, stride = np.zeros_like(rest), 1
    for dim in reversed(range(len(shape))):
        here = rest if dim == 0 else rest % np.uint64(region.shape[dim])
        found += (here + np.uint64(region.offsets[dim])) * np.uint64(stride)
        if dim:
            rest = rest // np.uint64(region.shape[dim])
        stride *= shape[dim]
    return found


def _weighed(part: npt.NDArray[np.signedinteger[Any]], weights: _Floats, floats: _Floats) -> _Unsigned:
    """The sum of each tile of each row, `floats` at a time.

    Shapes: [rows, tiles * width], [width, LANES] -> [rows * tiles, LANES].
    """
    width = len(weights)
    tiles = part.reshape(len(part), -1, width)
    if part.flags.c_contiguous:
        tiles = tiles.reshape(1, -1, width)
    sums = np.empty((*tiles.shape[:2], LANES), dtype=np.int64)
    at_once = max(1, _BLOCK_WORDS // width)
    step = max(1, at_once // tiles.shape[1])
    for row in range(0, len(tiles), step):
        for first in range(0, tiles.shape[1], at_once):
            some = tiles[row : row + step, first : first + at_once]
            block = floats[: some.size].reshape(some.shape)
            np.copyto(block, some)
            sums[row : row + step, first : first + at_once] = block @ weights
    return sums.reshape(-1, LANES).view(np.uint64)


def _scattered(sums: _Unsigned, keys: _Unsigned) -> _Unsigned:
    """Each tile's sum times an odd number of the tile. Shapes: [tiles, LANES], [tiles] -> [LANES]."""
    of_tiles = _mixed(keys[:, None] * np.uint64(_GOLDEN) + _LANE_SEEDS) | np.uint64(1)
    return np.asarray((sums * of_tiles).sum(axis=0, dtype=np.uint64))


def _mixed(numbers: _Unsigned) -> _Unsigned:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_FIRST)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(_SECOND)
    return numbers ^ (numbers >> np.uint64(31))


@cache
def _tile_weights() -> _Floats:
    """Odd numbers below 2^12, no two alike in a lane. Shape: [TILE, LANES]."""
    lanes = []
    for seed in _LANE_SEEDS:
        order = np.argsort(_mixed(np.arange(2 ** (_WEIGHT_BITS - 1), dtype=np.uint64) * np.uint64(_GOLDEN) + seed))
        lanes.append(2.0 * order[:TILE] + 1.0)
    return np.stack(lanes, axis=1)
