"""Stream: an iterable on each rank that resumes exactly and ends together."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardwise.data.stream import Stream
from shardwise.errors import DataError


class Counting:
    """Numbers of one shard, with a state."""

    def __init__(self, shard: int, shards: int, n: int) -> None:
        self.numbers = range(shard, n, shards)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.numbers):
            self.at += 1
            yield self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class CountingIterator(Counting):
    """The same, with the state in the iterator."""

    def __iter__(self) -> "CountingIterator":
        return self

    def __next__(self) -> int:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]


class Hidden:
    """An iterable without a state whose iterator has one."""

    def __init__(self, shard: int, shards: int, n: int) -> None:
        self.parts = (shard, shards, n)

    def __iter__(self) -> CountingIterator:
        return CountingIterator(*self.parts)


def sums(ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A sum over threads: what the process group does for ranks."""
    barrier = threading.Barrier(ranks, timeout=20)
    lock = threading.Lock()
    total: list[torch.Tensor] = []

    def agree(tensor: torch.Tensor) -> torch.Tensor:
        with lock:
            total.append(tensor.clone())
        barrier.wait()
        tensor.copy_(torch.stack(total).sum(0))
        if barrier.wait() == 0:
            total.clear()
        barrier.wait()
        return tensor

    return agree


def gathers(ranks: int) -> Callable[[Any], list[Any]]:
    """Each thread's JSON value on every thread."""
    barrier = threading.Barrier(ranks, timeout=20)
    values: list[Any] = []

    def gather(value: Any) -> list[Any]:
        values.append(json.dumps(value))
        barrier.wait()
        everyones = [json.loads(text) for text in values]
        if barrier.wait() == 0:
            values.clear()
        barrier.wait()
        return everyones

    return gather


def together(ranks: int, run: Callable[[int, dict[str, Any]], Any]) -> list[Any]:
    """`run(rank, what a loader needs)` on threads, their results or errors by rank."""
    group = {"agree": sums(ranks), "gather": gathers(ranks), "ranks": ranks}
    results: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        try:
            results[rank] = run(rank, {**group, "rank": rank})
        except DataError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def numbers(micros: Any) -> list[int]:
    return [number for micro in micros if micro.weight for number in micro.batch.tolist()]


@pytest.mark.parametrize("kind", [Counting, CountingIterator, Hidden])
def test_a_stream_resumes_exactly_at_every_step_although_it_reads_ahead(kind: Any) -> None:
    stream = Stream(lambda shard, shards: kind(shard, shards, 10))
    options = {"global_batch": 3, "micro_batches": 2, "epochs": 2}
    loader = stream.loader(**options)
    assert loader.resumes == "exact"
    states, steps = [loader.state_dict()], []
    for micros in loader:
        steps.append((micros.first, micros.samples, micros.epoch, micros.last_of_epoch, numbers(micros)))
        states.append(loader.state_dict())
    assert [step[-1] for step in steps] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]] * 2
    assert [step[3] for step in steps] == [False, False, False, True] * 2
    for at, state in enumerate(states):
        again = stream.loader(**options)
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = [(m.first, m.samples, m.epoch, m.last_of_epoch, numbers(m)) for m in again]
        assert rest == steps[at:]


def test_an_iterable_without_a_state_is_refused_on_resume_or_begun_again() -> None:
    options = {"global_batch": 2, "micro_batches": 1, "epochs": 1}
    for on_resume, promise in (("exact", "refused"), ("restart_epoch", "restart_epoch")):
        stream = Stream(lambda shard, shards: iter(range(6)), on_resume=on_resume)
        loader = stream.loader(**options)
        assert loader.resumes == promise
        next(loader)
        again = stream.loader(**options)
        if on_resume == "exact":
            with pytest.raises(DataError) as caught:
                again.load_state_dict(loader.state_dict())
            assert 'on_resume = "restart_epoch"' in caught.value.fix
        else:
            again.load_state_dict(loader.state_dict())
            first = next(again)
            assert (first.first, numbers(first)) == (2, [0, 1])


def test_another_number_of_ranks_is_refused_or_begun_again() -> None:
    exact, restart = (
        Stream(lambda shard, shards: Counting(shard, shards, 8), on_resume=on_resume)
        for on_resume in ("exact", "restart_epoch")
    )
    loader = exact.loader(global_batch=2, micro_batches=1)
    next(loader)
    state = loader.state_dict()
    with pytest.raises(DataError, match="cannot go on") as caught:
        exact.loader(global_batch=2, micro_batches=1, rank=0, ranks=2).load_state_dict(state)
    assert "stopped on 1 ranks" in caught.value.why
    again = restart.loader(global_batch=2, micro_batches=1, rank=0, ranks=2)
    again.load_state_dict(state)
    assert again.position == 2
    with pytest.raises(DataError, match="cannot go on"):
        restart_refused = Stream(lambda shard, shards: Counting(shard, shards, 8))
        restart_refused.loader(global_batch=2, micro_batches=1, rank=1, ranks=2).load_state_dict(state)


@pytest.mark.parametrize("resume_after", [0, 1, 2, 3])
def test_uneven_streams_end_together_and_read_every_sample(resume_after: int) -> None:
    lengths = [1, 7, 4]

    def run(rank: int, group: Any) -> list[Any]:
        stream = Stream(lambda shard, shards: Counting(0, 1, lengths[shard]))
        options = {"global_batch": 6, "micro_batches": 2, "epochs": 1, **group}
        loader = stream.loader(**options)
        steps = [next(loader) for _ in range(resume_after)]
        state = loader.state_dict()
        if resume_after == 0:
            return [*steps, *loader]
        for _ in loader:
            pass
        again = stream.loader(**options)
        again.load_state_dict(state)
        return [*steps, *again]

    by_rank = together(3, run)
    assert [len(steps) for steps in by_rank] == [4, 4, 4]
    for rank, steps in enumerate(by_rank):
        assert [number for micros in steps for number in numbers(micros)] == list(range(lengths[rank]))
        assert all(len(micros) == 2 for micros in steps)
        assert [micros.last_of_epoch for micros in steps] == [False, False, False, True]
        assert [micros.samples for micros in steps] == [5, 4, 2, 1]
    assert [micro.weight for micros in by_rank[0] for micro in micros] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_a_rank_without_a_sample_is_an_error_on_every_rank() -> None:
    def run(rank: int, group: Any) -> Any:
        stream = Stream(lambda shard, shards: range(5 if shard else 0))
        return list(stream.loader(global_batch=4, micro_batches=1, epochs=1, **group))

    for error in together(2, run):
        assert isinstance(error, DataError)
        assert "ranks 0 of 2" in error.what


def test_a_fresh_epoch_calls_the_factory_again_and_tells_it_the_epoch() -> None:
    class Epochs(list[int]):
        def set_epoch(self, epoch: int) -> None:
            self[:] = [epoch * 10, epoch * 10 + 1]

    loader = Stream(lambda shard, shards: Epochs([0])).loader(global_batch=2, micro_batches=1, epochs=3)
    assert [numbers(micros) for micros in loader] == [[0, 1], [10, 11], [20, 21]]


def test_what_is_no_stream_is_an_error() -> None:
    with pytest.raises(DataError, match="not a function"):
        Stream(range(3))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="not an iterable"):
        next(Stream(lambda shard, shards: 3).loader(global_batch=1, micro_batches=1))  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match="less than 2 ranks"):
        Stream(lambda shard, shards: [1]).loader(global_batch=1, micro_batches=1, rank=0, ranks=2)


def test_a_state_that_is_not_json_is_an_error() -> None:
    class Odd(Counting):
        def state_dict(self) -> Any:
            return {"at": object()}

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    loader = Stream(lambda shard, shards: Odd(0, 1, 5)).loader(global_batch=2, micro_batches=1)
    next(loader)
    with pytest.raises(DataError, match="cannot be kept"):
        loader.state_dict()
