"""Which part of a tensor is where: regions, their overlaps, and who writes what. Pure integers, no torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """A box inside a tensor: where it begins and how far it goes, by dim. A scalar has none of either."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Split(NamedTuple):
    """A dim cut in `parts` as torch.chunk cuts; this is part `which`."""

    dim: int
    parts: int
    which: int


def whole(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def part(shape: Sequence[int], splits: Sequence[Split]) -> Region:
    """The region left after the splits, applied in order: a dim that is cut twice is cut inside its own part.

    A part may be empty, where there are more parts than rows.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, parts, which in splits:
        step = -(-sizes[dim] // parts)
        begin = min(which * step, sizes[dim])
        end = min(begin + step, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = end - begin
    return Region(tuple(offsets), tuple(sizes))


def overlap(left: Region, right: Region) -> Region | None:
    """What two regions of one tensor share; None where that is nothing."""
    begins = tuple(map(max, left.offsets, right.offsets))
    ends = tuple(
        min(a + n, b + m) for a, n, b, m in zip(left.offsets, left.shape, right.offsets, right.shape, strict=True)
    )
    shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    if any(size <= 0 for size in shape):
        return None
    return Region(begins, shape)


def inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """Slices that pick `region` from a tensor that holds `outer`."""
    return tuple(
        slice(begin - origin, begin - origin + size)
        for begin, origin, size in zip(region.offsets, outer.offsets, region.shape, strict=True)
    )


def spread(sizes: Sequence[int], writers: int) -> list[int]:
    """A writer for each size, so that all write about the same: largest first, to the one with least.

    The same on every rank that passes the same sizes.
    """
    load = [0] * writers
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        owner = min(range(writers), key=lambda writer: (load[writer], writer))
        owners[item] = owner
        load[owner] += sizes[item]
    return owners
