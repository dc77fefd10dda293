"""Batches: any map-style Dataset, or a DataLoader taken apart, read in the global order."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from shardwise.data.loader import Ordered, seed_generators
from shardwise.data.order import Ints, Last
from shardwise.data.workers import auto_workers
from shardwise.errors import DataError, TrainingFailed

Collate = Callable[[list[Any]], Any]


class Batches(Ordered):
    """A map-style Dataset (`len` and `[]`), collated into micro-batches.

    dataset: the Dataset; or a torch DataLoader, of which dataset, collate_fn, num_workers, worker_init_fn and
        the way it shuffles and drops are taken (its batch_size and pinning are not: batches are the plan's,
        copying to the device is the engine's).
    collate: a list of samples -> a batch; default: torch's default_collate.
    workers: processes that fetch ahead; "auto": 0 for data in memory, else what this rank's cores allow, to
        4.
    shuffle: "auto": True, or as the DataLoader's sampler does.
    last: the last batch of an epoch: "short"; "drop": left out; "wrap": runs on into the next epoch; "pad":
        keeps its shape, filled with repeats that went through `pad`. "auto": "short", or "drop" as the
        DataLoader does.
    pad: a sample -> one of the same shape that counts for nothing in the loss (with labels -100, say).

    Random transforms draw from Python's, numpy's or torch's global generators, which are seeded by (seed,
    epoch, k) before each sample is read; the caller's states are put back. A dataset with `deterministic =
    True` goes without.

    Raises: DataError where the data is empty, an iterable, or has a sampler of its own.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate | None = None,
        workers: int | Literal["auto"] = "auto",
        shuffle: bool | Literal["auto"] = "auto",
        last: Last | Literal["auto"] = "auto",
        pad: Callable[[Any], Any] | None = None,
    ) -> None:
        taken: dict[str, Any] = {}
        if isinstance(dataset, DataLoader):
            taken = _taken_apart(dataset)
            dataset = dataset.dataset
        _check_map_style(dataset)
        self.dataset = dataset
        in_memory = type(dataset) in (TensorDataset, list, tuple)
        self.deterministic = bool(getattr(dataset, "deterministic", in_memory))
        self.collate: Collate = collate or taken.get("collate") or default_collate
        auto = taken["workers"] if taken else auto_workers(in_memory or self.deterministic)
        self.workers = auto if workers == "auto" else workers
        self.worker_options = taken.get("worker_options", {})
        self.shuffle = taken.get("shuffle", True) if shuffle == "auto" else shuffle
        self.last = taken.get("last", "short") if last == "auto" else last
        self.pad = pad
        _check_last(self.last, pad)

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, samples: Ints, seeds: Sequence[int], extra: int) -> Any:
        read: list[Any] = []
        real = len(samples) - extra
        for at, sample in enumerate(samples.tolist()):
            try:
                if seeds:
                    seed_generators(seeds[at])
                item = self.dataset[sample]
                read.append(self.pad(item) if at >= real and self.pad is not None else item)
            except Exception as error:
                raise _failed(f"Sample {sample} of {type(self.dataset).__name__}", error) from error
        try:
            return self.collate(read)
        except Exception as error:
            name = getattr(self.collate, "__name__", type(self.collate).__name__)
            raise _failed(f"{name} on samples {samples.tolist()[:8]}", error) from error


def as_data(data: Any, **options: Any) -> Any:
    """What `data=` and `valid=` take, as a data object: itself where it is one, else Batches of it.

    Raises: DataError as Batches does.
    """
    return data if callable(getattr(data, "loader", None)) else Batches(data, **options)


def _failed(what: str, error: Exception) -> TrainingFailed:
    return TrainingFailed(
        f"{what} raised {type(error).__name__}: {error}",
        why="".join(traceback.format_exception(error)).rstrip(),
        fix="mend or leave out that sample; samples of different shapes need a collate of your own",
    )


def _check_map_style(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, dict):
        raise DataError(
            f"A {name} of {len(dataset)} entries is no dataset.",
            why="samples are read by number, 0..n-1",
            fix=f"give one of its entries: {', '.join(str(key) for key in list(dataset)[:4])}",
        )
    iterable = isinstance(dataset, IterableDataset)
    try:
        length = -1 if iterable or not hasattr(dataset, "__getitem__") else len(dataset)
    except (TypeError, NotImplementedError):
        length = -1
    if length < 0:
        raise DataError(
            f"{name} is an iterable, not a map-style dataset.",
            why="the global order needs len(dataset) and dataset[i]",
            fix="data = sw.Stream(factory), where factory(shard, shards) gives the iterable of one rank",
        )
    if length == 0:
        raise DataError(f"{name} is empty.", why="it has 0 samples", fix="give a dataset with at least one sample")


def _check_last(last: Last, pad: Callable[[Any], Any] | None) -> None:
    if last not in ("short", "drop", "wrap", "pad"):
        raise DataError(f"last = {last!r} is unknown.", fix='last = "short", "drop", "wrap" or "pad"')
    if last == "pad" and pad is None:
        raise DataError(
            'last = "pad" needs pad.',
            why="the repeats that fill it up must count for nothing, and only you know how your loss counts",
            fix='pad = a function: a sample -> one that counts for nothing (labels -100), or last = "short"',
        )


def _taken_apart(loader: "DataLoader[Any]") -> dict[str, Any]:
    """What Batches takes from a DataLoader. Raises: DataError where its order is its own."""
    if isinstance(loader.dataset, IterableDataset):
        _check_map_style(loader.dataset)
    if type(loader.batch_sampler) is not BatchSampler:
        what = "batch_size = None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        raise _own_order(f"The DataLoader has {what}.")
    shuffle, drop = _sampling(loader.sampler, loader.dataset)
    options = {
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "timeout": loader.timeout,
    }
    return {
        "collate": loader.collate_fn,
        "workers": loader.num_workers,
        "worker_options": options if loader.num_workers else {},
        "shuffle": shuffle,
        "last": "drop" if loader.drop_last or drop else "short",
    }


def _sampling(sampler: Any, dataset: "Dataset[Any]") -> tuple[bool, bool]:
    """(shuffle, drop) of a sampler whose order the global order can stand for."""
    if type(sampler) is SequentialSampler:
        return False, False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == _length(dataset):
        return True, False
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle), bool(sampler.drop_last)
    raise _own_order(f"The DataLoader has a sampler of its own, {type(sampler).__name__}.")


def _length(dataset: Any) -> int:
    return len(dataset)


def _own_order(what: str) -> DataError:
    return DataError(
        what,
        why="the run orders the samples, by (seed, epoch, k) alone: no number of ranks may change it",
        fix="data = sw.Batches(dataset, collate=..., shuffle=...); weights: sw.Mixture; your own order: "
        "torch.utils.data.Subset(dataset, indices) with shuffle=False, or sw.Stream(factory)",
    )
