"""One engine that reads any ordered data: positions to samples to micro-batches, with workers or without."""

import contextlib
import random
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import Dataset

from shardwise.data.micros import MicroBatch, Micros
from shardwise.data.order import (
    Cell,
    Ints,
    Last,
    Span,
    cells,
    check_length,
    sample_order,
    samples_per_epoch,
    seed_of,
    spans,
    steps_per_epoch,
)
from shardwise.data.workers import Failure, fetched_ahead
from shardwise.errors import DataError, TrainingFailed


class Ordered:
    """Data with one global order: which sample is the k-th is a function of (seed, epoch, k) alone.

    Neither the number of ranks nor that of micro-batches changes it, and every sample of an epoch is read
    exactly once (except what `last = "drop"` leaves out). Made real by Batches, TokenData and Mixture.
    """

    last: Last = "short"
    shuffle: bool = True
    workers: int = 0
    worker_options: dict[str, Any] = {}  # noqa: RUF012 - replaced as a whole, never changed
    deterministic: bool = False  # True: fetch draws nothing at random, so the generators need no seed

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch(self, samples: Ints, seeds: Sequence[int], extra: int) -> Any:
        """The collated batch of these samples, each read under its seed (none where `deterministic`).

        The last `extra` of them are there for the shape only.
        """
        raise NotImplementedError

    def order(self, positions: Ints, seed: int, shuffle: bool) -> Ints:
        """The sample at each absolute position. Shapes: [m] -> [m]."""
        return sample_order(positions, len(self), seed, shuffle)

    def samples_per_epoch(self, global_batch: int) -> int:
        return samples_per_epoch(len(self), global_batch, self.last)

    def steps_per_epoch(self, global_batch: int) -> int:
        return steps_per_epoch(len(self), global_batch, self.last)

    def loader(
        self,
        *,
        seed: int,
        global_batch: int,
        micro_batches: int,
        rank: int = 0,
        ranks: int = 1,
        start: int = 0,
        epochs: int | None = None,
        shuffle: bool | None = None,
        last: Last | None = None,
    ) -> "Loader":
        """This rank's micro-batches of every step from sample `start` on, to the end of epoch `epochs` (None:
        no end).

        `rank` and `ranks` count data-parallel ranks. `shuffle` and `last` replace the data's own, for
        evaluation.

        Raises: DataError where not one step can be made.
        """
        return Loader(
            self,
            Reading(
                seed=seed,
                global_batch=global_batch,
                micro_batches=micro_batches,
                rank=rank,
                ranks=ranks,
                epochs=epochs,
                shuffle=self.shuffle if shuffle is None else shuffle,
                last=last or self.last,
            ),
            start,
        )


class Reading(NamedTuple):
    """How a loader reads."""

    seed: int
    global_batch: int
    micro_batches: int
    rank: int
    ranks: int
    epochs: int | None
    shuffle: bool
    last: Last


class Loader(Iterator[Micros]):
    """Yields `Micros`, one for each step. `position` is where the step after the last one yielded starts.

    Close it (or leave its `with` block) to end its workers; dropping it does the same.
    """

    resumes: Literal["exact"] = "exact"

    def __init__(self, data: Ordered, reading: Reading, start: int) -> None:
        _check(data, reading, start)
        self.data = data
        self.reading = reading
        self.position = start
        self._steps: Generator[Micros, None, None] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Micros:
        if self._steps is None:
            self._steps = _read(self.data, self.reading, self.position)
        micros = next(self._steps)
        self.position = micros.next_position
        return micros

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was yielded: what workers fetched ahead is not in it."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Only before the first step."""
        if self._steps is not None:
            raise DataError(
                "A loader that has begun cannot be moved.", fix="call load_state_dict before the first step"
            )
        self.position = int(state["position"])

    def close(self) -> None:
        """End the workers. Idempotent."""
        if self._steps is not None:
            self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(data: Ordered, reading: Reading, start: int) -> None:
    check_length(len(data), reading.global_batch, reading.last, reading.epochs, type(data).__name__)
    if min(reading.global_batch, reading.micro_batches) < 1 or start < 0:
        raise ValueError(f"global_batch and micro_batches start at 1, start at 0: {reading}, {start}")
    if not 0 <= reading.rank < reading.ranks:
        raise ValueError(f"rank {reading.rank} is outside a world of {reading.ranks}")


def _read(data: Ordered, reading: Reading, start: int) -> Generator[Micros, None, None]:
    def planned() -> Iterator[tuple[Span, tuple[Cell, ...]]]:
        for step in spans(start, len(data), reading.global_batch, reading.last, reading.epochs):
            yield step, _own_cells(step, reading)

    # Planned twice: workers run ahead with the one, the other names what arrives.
    ahead = (cell for _, own in planned() for cell in own)
    with contextlib.closing(_fetched(_Reader(data, reading.seed, reading.shuffle), ahead)) as batches:
        for step, own in planned():
            micro = tuple(MicroBatch(next(batches), cell.weight, cell.samples, cell.first) for cell in own)
            yield Micros(micro, step.first, step.samples, step.epoch, step.last_of_epoch, step.next_position)


def _own_cells(step: Span, reading: Reading) -> tuple[Cell, ...]:
    total = reading.ranks * reading.micro_batches
    slots = -(-reading.global_batch // total) if reading.last == "pad" else 1
    return cells(step.first, step.samples, reading.rank, reading.ranks, reading.micro_batches, slots)


class _Reader(Dataset[Any]):
    """From a cell to its batch: the same in this process and in a worker."""

    def __init__(self, data: Ordered, seed: int, shuffle: bool) -> None:
        self.data = data
        self.seed = seed
        self.shuffle = shuffle

    def read(self, cell: Cell) -> Any:
        stop = cell.first + cell.samples
        positions = np.r_[cell.first : stop, np.repeat(max(stop - 1, cell.first), cell.extra)].astype(np.int64)
        samples = self.data.order(positions, self.seed, self.shuffle)
        if self.data.deterministic:
            return self.data.fetch(samples, (), cell.extra)
        n = len(self.data)
        seeds = [seed_of("sample", self.seed, int(at) // n, int(at) % n) for at in positions]
        return self.data.fetch(samples, seeds, cell.extra)

    def __getitem__(self, cell: Cell) -> Any:
        try:
            return self.read(cell)
        except TrainingFailed as error:
            return Failure(error.what, error.why, error.fix)


def _fetched(reader: _Reader, planned: Iterator[Cell]) -> Generator[Any, None, None]:
    """The batch of each cell in order, fetched here or ahead of time by workers."""
    if reader.data.workers:
        yield from fetched_ahead(reader, planned, reader.data.workers, reader.data.worker_options)
    for cell in planned:
        with contextlib.nullcontext() if reader.data.deterministic else generators_kept():
            batch = reader.read(cell)
        yield batch


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's global CPU generators (not CUDA's: a dataset works on the CPU)."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])  # without the 1 it would repeat Python's own numbers
    torch.default_generator.manual_seed(seed & (2**63 - 1))


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Inside, the global generators may be seeded and used; after it they are as they were."""
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])
