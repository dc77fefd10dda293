"""Which sample is the k-th, and how a global batch is cut into ranks and micro-batches.

Pure; memory O(1) in n.
"""

import operator
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.errors import DataError

Ints = NDArray[np.int64]
Last = Literal["short", "drop", "wrap", "pad"]
_ROUNDS = 24  # with 8, some of the orders of 5 or 6 samples come twice as often as others


def seed_of(*parts: int | str) -> int:
    """A 64-bit seed that depends on the parts, their kinds and their order, and on nothing else, for ever.

    Each part is encoded as kind, length, text, so that ("ab", "c") and ("a", "bc"), or 1 and "1", differ.
    """
    encoded = bytearray()
    for part in parts:
        kind = b"s" if isinstance(part, str) else b"i"
        text = (part if isinstance(part, str) else str(operator.index(part))).encode("utf-8", "surrogatepass")
        encoded += kind + str(len(text)).encode() + b":" + text
    return xxhash.xxh3_64_intdigest(bytes(encoded))


class Permutation:
    """A pseudo-random bijection of 0..n-1, keyed by (seed, epoch), that is computed and never stored.

    A Feistel network over a grid of a x b >= n points: each round adds, modulo the side, a hash of the other
    coordinate, which can always be subtracted again. A point outside 0..n-1 walks on along its cycle until it
    is inside (a*b - n < a, so few do). Source: Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} items does not exist")
        self.n = n
        self._side = _ceil_sqrt(n)
        self._other = -(-n // self._side)
        key = np.uint64(seed_of("order", seed, epoch, n))
        self._keys = list(_mixed(np.arange(_ROUNDS, dtype=np.uint64), key))

    def __call__(self, ks: Ints) -> Ints:
        """The images of `ks`. Shapes: any -> the same. Raises: IndexError outside 0..n-1."""
        ks = np.asarray(ks, dtype=np.int64)
        if ks.size and (ks.min() < 0 or ks.max() >= self.n):
            raise IndexError(f"positions {ks.min()}..{ks.max()} are outside 0..{self.n - 1}")
        points = self._walk(ks.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(points >= self.n)
        while outside.size:
            points[outside] = self._walk(points[outside])
            outside = outside[points[outside] >= self.n]
        return points.astype(np.int64).reshape(ks.shape)

    def _walk(self, points: NDArray[np.uint64]) -> NDArray[np.uint64]:
        side, other = np.uint64(self._side), np.uint64(self._other)
        row, column = points % side, points // side
        for turn, key in enumerate(self._keys):
            if turn % 2 == 0:
                row = (row + _mixed(column, key) % side) % side
            else:
                column = (column + _mixed(row, key) % other) % other
        return column * side + row


def _ceil_sqrt(n: int) -> int:
    side = int(np.sqrt(n))
    while side * side < n:
        side += 1
    return max(side, 1)


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 over value and key; uint64 arrays wrap around by definition."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sample_order(positions: Ints, n: int, seed: int, shuffle: bool) -> Ints:
    """The sample at each absolute position: position p is item p % n of epoch p // n. Shapes: [m] -> [m]."""
    positions = np.asarray(positions, dtype=np.int64)
    epochs, ks = positions // n, positions % n
    if not shuffle:
        return ks
    samples = np.empty_like(ks)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = Permutation(n, seed, int(epoch))(ks[here])
    return samples


class Cell(NamedTuple):
    """One micro-batch of one rank: `samples` positions from `first`, then `extra` repeats of the last of
    them.

    Where `samples` is 0 it is a dummy: the extras repeat `first`, and its weight is 0.
    """

    first: int
    samples: int
    extra: int

    @property
    def weight(self) -> float:
        return 1.0 if self.samples else 0.0


def cells(first: int, count: int, rank: int, ranks: int, micro_batches: int, slots: int = 1) -> tuple[Cell, ...]:
    """The micro-batches of one rank, of a global batch of `count` >= 1 samples from `first`.

    Over all ranks they are contiguous (rank r, micro-batch m is cell r*M + m), as even as can be, and always
    the same number. `slots` is the least number of samples in each: what a cell lacks is filled up with
    repeats.
    """
    total = ranks * micro_batches
    own = []
    for cell in range(rank * micro_batches, (rank + 1) * micro_batches):
        start, stop = cell * count // total, (cell + 1) * count // total
        own.append(Cell(first + start, stop - start, max(0, slots - (stop - start))))
    return tuple(own)


class Span(NamedTuple):
    """The samples of one step: `samples` positions from `first`; the next step starts at `next_position`."""

    first: int
    samples: int
    epoch: int
    last_of_epoch: bool
    next_position: int


def span(position: int, n: int, global_batch: int, last: Last, epochs: int | None = None) -> Span | None:
    """The step that starts at an absolute position over epochs of n samples; None after the last epoch.

    "short" and "pad" end a batch where the epoch ends, "drop" leaves out what is no full batch, "wrap" runs
    on into the next epoch (and is short only at the very end).
    """
    if last == "drop" and n - position % n < global_batch:
        position += n - position % n
    if epochs is not None and position >= epochs * n:
        return None
    left = n - position % n
    if last == "wrap":
        left = global_batch if epochs is None else epochs * n - position
    samples = min(global_batch, left)
    after = position + samples
    if last == "drop" and n - after % n < global_batch:
        after += n - after % n
    epoch = position // n
    return Span(position, samples, epoch, after // n > epoch, after)


def spans(position: int, n: int, global_batch: int, last: Last, epochs: int | None = None) -> Iterator[Span]:
    """Every step from a position on."""
    step = span(position, n, global_batch, last, epochs)
    while step is not None:
        yield step
        step = span(step.next_position, n, global_batch, last, epochs)


def samples_per_epoch(n: int, global_batch: int, last: Last) -> int:
    """The samples that an epoch gives: all of them, except under "drop"."""
    return n - n % global_batch if last == "drop" else n


def steps_per_epoch(n: int, global_batch: int, last: Last) -> int:
    """Steps of an epoch from its first sample on (under "wrap" the last one reads on into the next)."""
    return n // global_batch if last == "drop" else -(-n // global_batch)


def check_length(n: int, global_batch: int, last: Last, epochs: int | None, what: str = "The data") -> None:
    """Raises: DataError where not one step can be made."""
    if n < 1:
        raise DataError(f"{what} is empty.", why="it has 0 samples", fix="give data with at least one sample")
    if n >= global_batch or last in ("short", "pad") or (last == "wrap" and epochs is not None):
        return
    raise DataError(
        f"{what} has {n} samples, fewer than one global batch of {global_batch}.",
        why=f'last = "{last}" makes full batches only',
        fix=f"global_batch = {n} or less (tokens_per_step for text), more data, or a shorter sequence_length",
    )
