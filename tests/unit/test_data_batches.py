"""Batches: any Dataset or DataLoader in the global order."""

import multiprocessing
import os
import random
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from shardwise.data import workers
from shardwise.data.batches import Batches, as_data
from shardwise.errors import DataError, TrainingFailed


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: int) -> int:
        return at


class Augmented(Numbers):
    """Each sample with a number from each of the three global generators."""

    def __getitem__(self, at: int) -> tuple[int, float, float, float]:
        return at, random.random(), float(np.random.rand()), float(torch.rand(()))


class Broken(Numbers):
    def __getitem__(self, at: int) -> int:
        if at == 5:
            raise ValueError("not an image")
        return at


class Pids(Numbers):
    def __getitem__(self, at: int) -> int:
        return os.getpid()


class Lines(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def read(data: Any, ranks: int = 1, micro_batches: int = 1, **options: Any) -> list[list[Any]]:
    """The samples of each step over all ranks, in order; dummies left out."""
    options = {"seed": 0, "global_batch": 6, "epochs": 1, **options}
    loaders = [data.loader(rank=rank, ranks=ranks, micro_batches=micro_batches, **options) for rank in range(ranks)]
    steps = []
    for together in zip(*loaders, strict=True):
        assert {len(micros) for micros in together} == {micro_batches}
        assert len({(m.first, m.samples, m.epoch, m.last_of_epoch, m.next_position) for m in together}) == 1
        samples = [rows(micro.batch)[: micro.samples] for micros in together for micro in micros if micro.weight]
        steps.append([sample for own in samples for sample in own])
        assert len(steps[-1]) == together[0].samples
    return steps


def rows(batch: Any) -> list[Any]:
    """The samples of a collated batch."""
    return list(zip(*(rows(part) for part in batch), strict=True)) if isinstance(batch, list) else batch.tolist()


exact = settings(derandomize=True, deadline=None, max_examples=40)


@exact
@given(
    n=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    last=st.sampled_from(["short", "drop", "wrap"]),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_any_ranks_and_micro_batches_read_the_same_samples_in_the_same_steps(
    n: int, global_batch: int, last: str, ranks: int, micro_batches: int, seed: int
) -> None:
    if last == "drop" and n < global_batch:
        return
    data = Batches(Numbers(n), last=last, workers=0)
    options = {"seed": seed, "global_batch": global_batch, "epochs": 2}
    assert read(data, ranks, micro_batches, **options) == read(data, **options)


@exact
@given(
    n=st.integers(4, 40),
    last=st.sampled_from(["short", "drop", "wrap"]),
    stop=st.integers(0, 30),
    ranks=st.integers(1, 3),
)
def test_a_loader_resumed_at_any_step_goes_on_with_the_same_samples(n: int, last: str, stop: int, ranks: int) -> None:
    data = Batches(Augmented(n), last=last, workers=0)
    options = {"global_batch": 4, "epochs": 3}
    whole = read(data, **options)
    stop = min(stop, len(whole))
    loader = data.loader(seed=0, micro_batches=1, **options)
    for _ in range(stop):
        next(loader)
    assert read(data, ranks, 2, start=loader.position, **options) == whole[stop:]
    again = data.loader(seed=0, micro_batches=1, **options)
    again.load_state_dict(loader.state_dict())
    assert [micros.first for micros in again] == [micros.first for micros in loader]


def test_without_shuffle_the_order_is_the_datasets() -> None:
    assert read(Batches(Numbers(10), shuffle=False)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert read(Batches(Numbers(10)), shuffle=False) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_short_batch_gives_every_rank_its_micro_batches_and_dummies_of_weight_0() -> None:
    data = Batches(Numbers(7), shuffle=False)
    per_rank = [
        list(data.loader(seed=0, global_batch=6, micro_batches=2, rank=rank, ranks=3, epochs=1)) for rank in range(3)
    ]
    last = [micro for steps in per_rank for micro in steps[-1]]
    assert [micro.weight for micro in last] == [0, 0, 0, 0, 0, 1]
    assert all(micro.batch.tolist() == [6] for micro in last)


def test_a_padded_batch_keeps_its_shape_and_its_repeats_count_for_nothing() -> None:
    data = Batches(Numbers(7), shuffle=False, last="pad", pad=lambda sample: -100)
    steps = [
        list(data.loader(seed=0, global_batch=6, micro_batches=1, rank=rank, ranks=3, epochs=1)) for rank in range(3)
    ]
    assert [own[-1].batches[0].batch.tolist() for own in steps] == [[-100, -100], [-100, -100], [6, -100]]
    assert [own[-1].batches[0].weight for own in steps] == [0, 0, 1]
    assert [own[-1].samples for own in steps] == [1, 1, 1]


def test_padding_needs_to_know_what_counts_for_nothing() -> None:
    with pytest.raises(DataError, match='last = "pad" needs pad'):
        Batches(Numbers(7), last="pad")
    with pytest.raises(DataError, match="unknown"):
        Batches(Numbers(7), last="cut")


def test_random_transforms_are_the_samples_own_and_leave_the_callers_generators_alone() -> None:
    data = Batches(Augmented(12), workers=0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    one = read(data)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert read(data, ranks=3, micro_batches=2) == one
    assert len({value for step in one for sample in step for value in sample[1:]}) == 36
    assert read(data, epochs=2)[2:] != one, "another epoch, other transforms"


def test_workers_give_what_one_process_gives_and_end_with_the_loader() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert read(Batches(Augmented(20), workers=2), micro_batches=2) == read(Batches(Augmented(20), workers=0))
    assert torch.equal(torch.get_rng_state(), before)
    assert multiprocessing.active_children() == []


def test_workers_outlive_signals_and_end_when_the_loader_is_closed_early() -> None:
    data = Batches(Pids(10**6), workers=2)
    with data.loader(seed=0, global_batch=1, micro_batches=1) as loader:
        pids = {int(next(loader).batches[0].batch) for _ in range(4)}
        assert os.getpid() not in pids and len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert {int(next(loader).batches[0].batch) for _ in range(8)} == pids
    assert multiprocessing.active_children() == []
    loader.close()
    assert list(loader) == []


def test_dropping_a_loader_ends_its_workers() -> None:
    loader = Batches(Numbers(100), workers=1).loader(seed=0, global_batch=1, micro_batches=1)
    next(loader)
    assert len(multiprocessing.active_children()) == 1
    del loader
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_an_error_and_leaves_no_other() -> None:
    loader = Batches(Pids(10**6), workers=2).loader(seed=0, global_batch=1, micro_batches=1)
    os.kill(int(next(loader).batches[0].batch), signal.SIGKILL)
    with pytest.raises(TrainingFailed, match="data worker was lost"):
        for _ in loader:
            pass
    assert multiprocessing.active_children() == []


class Stuck(Numbers):
    def __getitem__(self, at: int) -> int:
        if at:
            threading.Event().wait()
        return at


def test_a_worker_that_is_stuck_in_a_dataset_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.1)
    loader = Batches(Stuck(9), workers=2, shuffle=False).loader(seed=0, global_batch=1, micro_batches=1)
    next(loader)
    loader.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_of_the_dataset_names_the_sample(processes: int) -> None:
    loader = Batches(Broken(8), workers=processes, shuffle=False).loader(seed=0, global_batch=2, micro_batches=1)
    with pytest.raises(TrainingFailed, match="Sample 5 of Broken raised ValueError: not an image") as caught:
        for _ in loader:
            pass
    assert "__getitem__" in caught.value.why
    assert multiprocessing.active_children() == []


def test_an_error_of_collate_names_the_samples() -> None:
    data = Batches([torch.zeros(at) for at in range(1, 5)], shuffle=False)
    with pytest.raises(TrainingFailed, match=r"default_collate on samples \[0, 1\]"):
        next(data.loader(seed=0, global_batch=2, micro_batches=1))


def test_a_data_loader_is_taken_apart() -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.tensor(samples) * 10

    numbers = Numbers(7)
    shuffled = Batches(DataLoader(numbers, batch_size=2, shuffle=True, drop_last=True, collate_fn=collate))
    assert (shuffled.dataset, shuffled.shuffle, shuffled.last, shuffled.workers) == (numbers, True, "drop", 0)
    assert sorted(read(shuffled)[0])[0] % 10 == 0 and len(read(shuffled)) == 1
    plain = Batches(DataLoader(numbers))
    assert (plain.shuffle, plain.last) == (False, "short")
    spread = DistributedSampler(numbers, num_replicas=2, rank=0, shuffle=False, drop_last=True)
    assert (lambda data: (data.shuffle, data.last))(Batches(DataLoader(numbers, sampler=spread))) == (
        False,
        "drop",
    )
    assert Batches(DataLoader(numbers, num_workers=1)).workers == 1
    assert (lambda data: (data.shuffle, data.last))(Batches(DataLoader(numbers), shuffle=True, last="wrap")) == (
        True,
        "wrap",
    )


def test_a_data_loaders_own_worker_setup_runs() -> None:
    loader = DataLoader(Environment(4), num_workers=1, worker_init_fn=set_environment, prefetch_factor=3)
    assert read(Batches(loader), global_batch=4) == [[7, 7, 7, 7]]


def set_environment(worker: int) -> None:
    os.environ["SHARDWISE_TEST_WORKER"] = "7"


class Environment(Numbers):
    def __getitem__(self, at: int) -> int:
        return int(os.environ["SHARDWISE_TEST_WORKER"])


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 8, 8)},
        {"sampler": RandomSampler(range(8), replacement=True)},
        {"sampler": RandomSampler(range(8), num_samples=4)},
        {"batch_sampler": type("Grouped", (BatchSampler,), {})(range(8), 2, False)},
        {"batch_size": None},
    ],
)
def test_an_order_of_the_users_own_is_an_error_whose_fix_works(options: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        Batches(DataLoader(Numbers(8), **options))
    assert "Subset" in caught.value.fix
    assert read(Batches(Subset(Numbers(8), [3, 1]), shuffle=False)) == [[3, 1]]


@pytest.mark.parametrize("data", [Lines(), DataLoader(Lines()), (x for x in range(3)), iter([1])])
def test_an_iterable_is_an_error_that_offers_stream(data: Any) -> None:
    with pytest.raises(DataError) as caught:
        as_data(data)
    assert "sw.Stream(factory)" in caught.value.fix


def test_empty_data_and_a_dict_of_datasets_are_errors() -> None:
    with pytest.raises(DataError, match="empty"):
        Batches(Numbers(0))
    with pytest.raises(DataError, match="no dataset") as caught:
        Batches({"train": Numbers(3)})
    assert "train" in caught.value.fix


def test_as_data_keeps_a_data_object_and_wraps_a_dataset() -> None:
    data = Batches(Numbers(3))
    assert as_data(data) is data
    assert isinstance(as_data(Numbers(3)), Batches)


def test_data_in_memory_needs_no_workers() -> None:
    assert Batches(TensorDataset(torch.arange(4))).workers == 0
    assert workers.auto_workers(in_memory=True) == 0
    assert 0 <= workers.auto_workers(in_memory=False) <= 4
