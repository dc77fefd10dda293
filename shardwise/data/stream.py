"""Stream: an iterable on each data-parallel rank. Its order is its own; uneven streams end together."""

import copy
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.utils.data import default_collate

from shardwise import ranks as ranks_of_this_run
from shardwise.data.batches import Collate
from shardwise.data.micros import MicroBatch, Micros
from shardwise.data.order import cells
from shardwise.errors import DataError

Factory = Callable[[int, int], Iterable[Any]]
Agree = Callable[[torch.Tensor], torch.Tensor]
Gather = Callable[[Any], list[Any]]


class Stream:
    """An iterable of samples for each data-parallel rank: `factory(shard, shards)`, called anew for every
    epoch.

    on_resume: "exact": a stopped run goes on at the very next sample, through the `state_dict` and
        `load_state_dict` of the iterable (or its iterator), on the same number of ranks; else resuming is
        refused. "restart_epoch": where that is not possible, the epoch is begun again.
    collate: a list of samples -> a batch; default: torch's default_collate.

    An iterable with `set_epoch` is told the epoch. Samples are read in this process: for workers, let the
    factory return a DataLoader with batch_size=None (torchdata's StatefulDataLoader resumes exactly).
    """

    def __init__(
        self,
        factory: Factory,
        *,
        on_resume: Literal["exact", "restart_epoch"] = "exact",
        collate: Collate | None = None,
    ) -> None:
        if not callable(factory):
            raise DataError(
                f"Stream got a {type(factory).__name__}, not a function.",
                why="each rank needs an iterable of its own, and each epoch a fresh one",
                fix="sw.Stream(lambda shard, shards: ...), which gives the iterable of one of so many ranks",
            )
        if on_resume not in ("exact", "restart_epoch"):
            raise DataError(f"on_resume = {on_resume!r} is unknown.", fix='on_resume = "exact" or "restart_epoch"')
        self.factory = factory
        self.on_resume = on_resume
        self.collate: Collate = collate or default_collate

    def loader(
        self,
        *,
        seed: int = 0,
        global_batch: int,
        micro_batches: int,
        rank: int = 0,
        ranks: int = 1,
        start: int = 0,
        epochs: int | None = None,
        shuffle: bool | None = None,
        last: str | None = None,
        agree: Agree = ranks_of_this_run.all_reduce_sum,
        gather: Gather = ranks_of_this_run.gather_json,
    ) -> "StreamLoader":
        """This rank's micro-batches of every step. `start` only counts: the place in the data comes by
        load_state_dict.

        seed, shuffle and last are Ordered's and change nothing here. `agree` sums a tensor over the
        data-parallel ranks.
        """
        if global_batch < ranks:
            raise DataError(
                f"global_batch = {global_batch} is less than {ranks} ranks.",
                why="each rank reads its own stream",
                fix=f"global_batch = {ranks} or more",
            )
        return StreamLoader(self, global_batch, micro_batches, (rank, ranks), start, epochs, agree, gather)


class _Shard:
    """One rank's iterable in one epoch."""

    def __init__(self, stream: Stream, shard: int, shards: int, epoch: int) -> None:
        self.ended = False
        self.newest: Any = None  # the last sample read, in a list
        self._fresh = functools.partial(_opened, stream.factory, shard, shards, epoch)
        self._iterable = self._fresh()
        self._iterator: Iterator[Any] | None = None

    @property
    def resumable(self) -> bool:
        return self._stateful() is not None

    def _stateful(self) -> Any:
        """The iterable or its iterator, whichever has a state."""
        if hasattr(self._iterable, "state_dict"):
            return self._iterable
        if self._iterator is None:
            self._iterator = iter(self._iterable)
        return self._iterator if hasattr(self._iterator, "state_dict") else None

    def load(self, state: Any) -> None:
        self._stateful().load_state_dict(copy.deepcopy(state))

    def state(self) -> Any:
        stateful = self._stateful()
        return None if stateful is None else copy.deepcopy(stateful.state_dict())

    def take(self, count: int) -> list[Any]:
        """So many samples, or what is left."""
        if self._iterator is None:
            self._iterator = iter(self._iterable)
        taken: list[Any] = []
        while not self.ended and len(taken) < count:
            try:
                taken.append(next(self._iterator))
            except StopIteration:
                self.ended = True
        if taken:
            self.newest = taken[-1:]
        return taken

    def any_sample(self) -> list[Any]:
        """One sample for a dummy: the newest; for a rank that was resumed after its end, its first."""
        if self.newest is None:
            self.newest = [next(iter(self._fresh()))]
        return list(self.newest)


def _opened(factory: Factory, shard: int, shards: int, epoch: int) -> Iterable[Any]:
    iterable = factory(shard, shards)
    if not hasattr(iterable, "__iter__"):
        raise DataError(
            f"The factory of the Stream gave a {type(iterable).__name__}, not an iterable.",
            fix="factory(shard, shards) returns an iterable of samples",
        )
    if hasattr(iterable, "set_epoch"):
        iterable.set_epoch(epoch)
    return iterable


class _Pulled(NamedTuple):
    """What this rank read for a step, its state after it, and how many samples each rank has."""

    samples: list[Any]
    state: dict[str, Any]
    counts: list[int]


class StreamLoader(Iterator[Micros]):
    """Yields `Micros` with the same number of micro-batches on every rank until no rank has a sample left.

    One step is read ahead, so that the ranks agree on whether it is the last; `state_dict` is that of the
    last step yielded. A rank that ran out gives dummies of weight 0. Collective: every rank takes every step.
    """

    def __init__(
        self,
        stream: Stream,
        global_batch: int,
        micro_batches: int,
        shard: tuple[int, int],
        start: int,
        epochs: int | None,
        agree: Agree,
        gather: Gather,
    ) -> None:
        self.stream = stream
        self.position = start
        self.micro_batches = micro_batches
        self.shard, self.shards = shard
        self.epochs = epochs
        self._share = global_batch * (self.shard + 1) // self.shards - global_batch * self.shard // self.shards
        self._agree = agree
        self._gather = gather
        self._epoch = 0
        self._resumed = False  # inside an epoch: its first samples are behind us
        self._state: dict[str, Any] = {"ended": False, "iterable": None}
        self._open: _Shard | None = None
        self._steps: Generator[Micros, None, None] | None = None

    @property
    def resumes(self) -> Literal["exact", "restart_epoch", "refused"]:
        """Which promise holds for a run with this stream on the same number of ranks."""
        if self._shard().resumable:
            return "exact"
        return "restart_epoch" if self.stream.on_resume == "restart_epoch" else "refused"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Micros:
        if self._steps is None:
            self._steps = self._read()
        return next(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """The place of every rank after the last step yielded: JSON, the same on every rank. Collective.

        Raises: DataError where an iterable's state holds something else.
        """
        try:
            places = self._gather([self.shard, self._state])
        except TypeError as error:
            raise DataError(
                f"The state of the Stream's iterable cannot be kept: {error}.",
                why="a position in the data is kept as JSON",
                fix="state_dict returns numbers, text, lists and dicts only",
            ) from error
        by_shard = dict(places)
        states = [by_shard[shard] for shard in range(self.shards)]
        return {"position": self.position, "epoch": self._epoch, "inside": self._resumed, "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Only before the first step. Raises: DataError where that cannot be exact."""
        if self._steps is not None:
            raise DataError(
                "A loader that has begun cannot be moved.", fix="call load_state_dict before the first step"
            )
        self.position, self._epoch, self._open = int(state["position"]), int(state["epoch"]), None
        if not state["inside"]:
            return
        states = state["states"]
        whole = len(states) == self.shards and all(own["iterable"] is not None for own in states)
        if whole and self._shard().resumable:
            self._state, self._resumed = states[self.shard], True
            self._shard().load(self._state["iterable"])
            self._shard().ended = self._state["ended"]
        elif self.stream.on_resume == "exact":
            raise _not_exact(len(states), self.shards)

    def _shard(self) -> _Shard:
        if self._open is None:
            self._open = _Shard(self.stream, self.shard, self.shards, self._epoch)
        return self._open

    def _read(self) -> Generator[Micros, None, None]:
        while self.epochs is None or self._epoch < self.epochs:
            shard, begun = self._shard(), self._resumed
            now = self._pull(shard)
            if not begun:
                _check_nonempty(now.counts)
            while any(now.counts):
                after = self._pull(shard)
                is_last = not any(after.counts)
                yield self._step(now, shard, is_last)
                now = after
            if begun and self._resumed:  # a state at the very end of an epoch, of another version's making
                self._begin_next_epoch()

    def _pull(self, shard: _Shard) -> _Pulled:
        samples = shard.take(self._share)
        state = {"ended": shard.ended, "iterable": shard.state()}
        counts = torch.zeros(self.shards, dtype=torch.int64)
        counts[self.shard] = len(samples)
        if self.shards > 1:
            self._agree(counts)
        return _Pulled(samples, state, counts.tolist())

    def _step(self, pulled: _Pulled, shard: _Shard, is_last: bool) -> Micros:
        """The step's micro-batches; from here on this step counts as consumed."""
        first, epoch, total = self.position, self._epoch, sum(pulled.counts)
        batches = self._batches(pulled.samples, shard)
        self.position = first + total
        self._resumed, self._state = True, pulled.state
        if is_last:
            self._begin_next_epoch()
        return Micros(batches, first, total, epoch, is_last, self.position)

    def _begin_next_epoch(self) -> None:
        self._epoch += 1
        self._resumed, self._open = False, None
        self._state = {"ended": False, "iterable": None}

    def _batches(self, samples: list[Any], shard: _Shard) -> tuple[MicroBatch, ...]:
        collate = self.stream.collate
        if not samples:
            dummy = MicroBatch(collate(shard.any_sample()), 0.0, 0)
            return (dummy,) * self.micro_batches
        made = []
        for cell in cells(0, len(samples), 0, 1, self.micro_batches):
            own = samples[cell.first : cell.first + cell.samples] or samples[cell.first : cell.first + 1]
            made.append(MicroBatch(collate(own), cell.weight, cell.samples))
        return tuple(made)

    def close(self) -> None:
        """Let go of the iterable. Idempotent."""
        if self._steps is not None:
            self._steps.close()
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_nonempty(counts: list[int]) -> None:
    """Every rank sees the same counts, so every rank raises."""
    empty = [str(shard) for shard, count in enumerate(counts) if not count]
    if empty:
        raise DataError(
            f"The Stream gave no sample on ranks {', '.join(empty)} of {len(counts)}.",
            why="each data-parallel rank is a shard, and a rank without a sample has nothing to train on",
            fix="factory(shard, shards) gives every shard a sample (more files than ranks); or use fewer",
        )


def _not_exact(then: int, now: int) -> DataError:
    if then != now:
        why = f"stopped on {then} ranks, it is to go on with {now}; its shards are its own"
    else:
        why = "its iterable has no state_dict and load_state_dict"
    return DataError(
        "The Stream cannot go on at the sample where it was stopped.",
        why=why,
        fix='the same number of ranks and an iterable with state_dict, or on_resume = "restart_epoch"',
    )
