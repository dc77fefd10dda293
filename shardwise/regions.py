"""Which part of a logical tensor is where: boxes, how a mesh cuts them, and whether they cover it once. No torch."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Region(NamedTuple):
    """A box inside a tensor: where it begins and how far it goes, by dim. A scalar has none of either."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        """As one indexes: [0:3, 4:8]."""
        spans = (f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.shape, strict=True))
        return f"[{', '.join(spans)}]"


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


def is_grid(shape: Sequence[int], regions: Iterable[Region]) -> bool:
    """Whether the regions are every cell of a grid over the tensor, as a mesh cuts it: then they cover it once.

    Takes time in proportion to their number. False alone says nothing: `doubled` and `missing` do.
    """
    full = [region for region in regions if region.numel]
    spans = [sorted({(box.offsets[dim], box.shape[dim]) for box in full}) for dim in range(len(shape))]
    if len(set(full)) != len(full) or math.prod(map(len, spans)) != len(full):
        return False
    for size, cuts in zip(shape, spans, strict=True):
        reached = 0
        for begin, length in cuts:
            if begin != reached:
                return False
            reached += length
        if reached != size:
            return False
    return True


def doubled(regions: Iterable[Region]) -> Region | None:
    """A part that two of the regions hold; None where they are disjoint.

    A sweep along the dim with the most borders: parts of one mesh meet only those that stand beside them.
    """
    boxes = [region for region in regions if region.numel]
    dims = range(len(boxes[0].offsets)) if boxes else range(0)
    along = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    if along is not None:
        boxes.sort(key=lambda box: box.offsets[along])
    reached: list[Region] = []
    for box in boxes:
        if along is not None:
            reached = [one for one in reached if one.offsets[along] + one.shape[along] > box.offsets[along]]
        for one in reached:
            shared = overlap(one, box)
            if shared is not None:
                return shared
        reached.append(box)
    return None


def missing(shape: Sequence[int], regions: Iterable[Region]) -> Region | None:
    """A part of the tensor that none of the regions holds; None where they hold all of it."""
    left = [whole(shape)] if math.prod(shape) else []
    for region in regions:
        left = [rest for box in left for rest in _without(box, region)]
    return left[0] if left else None


def _without(box: Region, hole: Region) -> list[Region]:
    """Disjoint boxes that make up `box` outside `hole`."""
    shared = overlap(box, hole)
    if shared is None:
        return [box]
    found, offsets, sizes = [], list(box.offsets), list(box.shape)
    for dim in range(len(sizes)):
        begin, end = shared.offsets[dim], shared.offsets[dim] + shared.shape[dim]
        for first, last in ((offsets[dim], begin), (end, offsets[dim] + sizes[dim])):
            if first < last:
                found.append(
                    Region(
                        (*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], last - first, *sizes[dim + 1 :])
                    )
                )
        offsets[dim], sizes[dim] = begin, end - begin
    return found
