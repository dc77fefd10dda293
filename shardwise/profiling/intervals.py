"""Unions of intervals and how much of a window they cover: what every share of a breakdown is made of.

Stamps are int64 nanoseconds, half open. An interval that ends where it begins covers nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Stamps = npt.NDArray[np.int64]


class Union(NamedTuple):
    """Disjoint intervals in order of time: starts [n] and ends [n], ns, with starts[i] < ends[i] < starts[i + 1]."""

    starts: Stamps
    ends: Stamps

    @property
    def total(self) -> int:
        """Nanoseconds."""
        return int((self.ends - self.starts).sum())


def union(starts: Stamps, ends: Stamps) -> Union:
    """Of intervals in any order, that may touch, overlap and repeat: starts [n], ends [n], ns."""
    real = ends > starts
    starts, ends = starts[real], ends[real]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.ones(len(starts), dtype=bool)
    first[1:] = starts[1:] > reach[:-1]
    last = np.ones(len(starts), dtype=bool)
    last[:-1] = first[1:]
    return Union(starts[first], reach[last])


def of_all(parts: Sequence[Union]) -> Union:
    """What any of the parts covers."""
    if not parts:
        return union(np.empty(0, np.int64), np.empty(0, np.int64))
    return union(np.concatenate([part.starts for part in parts]), np.concatenate([part.ends for part in parts]))


def covered(part: Union, begins: Stamps, ends: Stamps) -> Stamps:
    """Nanoseconds [m] of each window, begins [m] to ends [m], that the part covers."""
    return _until(part, np.maximum(ends, begins)) - _until(part, begins)


def exclusive(layers: Sequence[Union], begins: Stamps, ends: Stamps) -> Stamps:
    """How each window is spent, [m, layers + 1] ns: a moment is the first layer's that covers it, and the last column's
    where none does. Each row sums to its window: a column is the difference of two nested unions.
    """
    covers, whole = [np.zeros(len(begins), np.int64)], np.maximum(ends - begins, 0)
    sum_of = of_all([])
    for layer in layers:
        sum_of = of_all([sum_of, layer])
        covers.append(covered(sum_of, begins, ends))
    return np.diff(np.stack([*covers, whole]), axis=0).T


def _until(part: Union, times: Stamps) -> Stamps:
    """Nanoseconds that the part covers before each of the times."""
    if not len(part.starts):
        return np.zeros(len(times), np.int64)
    before = np.concatenate([[0], np.cumsum(part.ends - part.starts)])
    at = np.searchsorted(part.starts, times, side="right")
    inside = np.where(at > 0, times - part.starts[at - 1], 0)
    length = np.where(at > 0, (part.ends - part.starts)[at - 1], 0)
    return np.where(at > 0, before[at - 1] + np.minimum(inside, length), 0)
