"""Worker processes that fetch batches ahead: torch's DataLoader machinery, but ended by us, and in time."""

import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from shardwise.environment import process_identity, usable_cpus
from shardwise.errors import TrainingFailed
from shardwise.torch_private import forget_workers, shutdown_workers

GRACE_SECONDS = 2.0  # for a worker that is inside a dataset's own code when the loader is closed


class Failure(NamedTuple):
    """An error of a worker, as a value: torch would rebuild the exception from its text alone."""

    what: str
    why: str
    fix: str


def fetched_ahead(
    reader: Dataset[Any], keys: Iterator[Any], workers: int, options: dict[str, Any]
) -> Generator[Any, None, None]:
    """`reader[key]` of each key, in order. Closing it ends the workers.

    Raises: TrainingFailed for a Failure, or where a worker is lost.
    """
    others = set(multiprocessing.active_children())
    batches = iter(_torch_loader(reader, keys, workers, dict(options)))
    started = [child for child in multiprocessing.active_children() if child not in others]
    _unwatched(batches)
    try:
        for batch in _received(batches):
            if isinstance(batch, Failure):
                raise TrainingFailed(batch.what, why=batch.why, fix=batch.fix)
            yield batch
    finally:
        _end(batches, started)


def _torch_loader(
    reader: Dataset[Any], keys: Iterator[Any], workers: int, options: dict[str, Any]
) -> "DataLoader[Any]":
    with warnings.catch_warnings():  # that workers exceed the cores is the user's explicit choice
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        return DataLoader(
            reader,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=_Begin(options.pop("worker_init_fn", None)),
            generator=torch.Generator().manual_seed(0),  # or iter() would draw from the global generator
            **options,
        )


def _unwatched(batches: Any) -> None:
    """Let a dead worker be found by whoever waits for its next batch, within 5 seconds.

    Torch raises for it out of a signal handler: at any line of the program, even while we end the others.
    """
    forget_workers(batches)


def _end(batches: Any, started: list[Any]) -> None:
    """End the workers: asked first, and killed after the grace (they ignore SIGTERM)."""
    overdue = threading.Timer(GRACE_SECONDS, lambda: [worker.kill() for worker in started if worker.is_alive()])
    overdue.start()
    try:
        shutdown_workers(batches)
    finally:
        overdue.cancel()
        overdue.join()
        for worker in started:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _received(batches: Iterator[Any]) -> Iterator[Any]:
    """What workers hand over. A dataset's own errors come as values: what raises here is the way to them."""
    try:
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        if isinstance(error, RuntimeError) and "worker" not in str(error):
            raise
        raise TrainingFailed(
            "A data worker was lost.",
            why=str(error) or type(error).__name__,
            fix="workers = 0 shows an error of the dataset itself; a killed worker is often short of memory",
        ) from error


def _as_it_is(batch: Any) -> Any:
    return batch


class _Begin:
    """What a worker does first: signals are the main process's to handle, which closes its workers."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler may send it to every process of the job
        if self.user is not None:
            self.user(worker)


def auto_workers(in_memory: bool) -> int:
    """None for data in memory; else up to 4, with one core of this rank's share left for the training."""
    if in_memory:
        return 0
    return max(0, min(4, usable_cpus() // process_identity().local_world - 1))
