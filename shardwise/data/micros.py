"""What a loader yields: the micro-batches of one rank for one step."""

from collections.abc import Iterator
from typing import Any

import msgspec


class MicroBatch(msgspec.Struct, frozen=True):
    """One forward on one rank. `weight` is 1, or 0 for a dummy whose loss and count must not count.

    `samples` are those that count: what a padded batch repeats is not among them. `first`: the first one's position in
    the global order; None in a Stream, whose order is its own.
    """

    batch: Any
    weight: float
    samples: int
    first: int | None = None


class Micros(msgspec.Struct, frozen=True):
    """This rank's micro-batches of one step: the same number on every rank, in every step.

    `first` is the step's first sample in the global order, counted over epochs, `samples` the number of
    samples over all ranks, `next_position` where the next step starts: what a checkpoint keeps.
    """

    batches: tuple[MicroBatch, ...]
    first: int
    samples: int
    epoch: int
    last_of_epoch: bool
    next_position: int

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
