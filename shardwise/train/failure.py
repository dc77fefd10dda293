"""When a rank raises: one record of it in the run folder, one traceback on the screen, and the process ends at once."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch

from shardwise import ranks
from shardwise.environment import process_identity
from shardwise.errors import EXIT_FAILED, OutOfMemory, ShardwiseError
from shardwise.events.values import Failed, from_line, to_line
from shardwise.launch.heartbeat import HEART
from shardwise.plan.plan import Decision
from shardwise.resilience import watchdog

# What a failure may wait for a store that is told of it: a request and one more, and little of a hang's bound.
COUNT_SECONDS = 10.0


class Where:
    """Where this rank stands, for the message of an error: updated by the loop, read when something is raised.

    Every change is a heartbeat. `count`: tells others than this run folder of a failure, where there are some.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.count: Callable[[], None] | None = None
        self._attempt, self._step, self._phase = 0, 0, "setup"

    @property
    def attempt(self) -> int:
        return self._attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        self._attempt = number
        HEART.attempt(number)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        HEART.step(number)
        watchdog.tell_compiling()

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name
        HEART.phase(name)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase that may come up in any other, which it gives back."""
        before, told, self._phase = self._phase, HEART.phase(name), name
        yield
        self._phase = before  # not after an error, whose message names the phase that it came from
        HEART.phase(told)


WHERE = Where()


def record(error: BaseException, where: Where = WHERE) -> Failed:
    """Write this rank's failure into the run folder (if it is known) and return it."""
    failed = Failed(
        time=time.time(),
        rank=_rank(),
        step=where.step,
        phase=where.phase,
        error=str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, ShardwiseError) else EXIT_FAILED,
    )
    if where.folder is not None and where.folder.is_dir():
        events = where.folder / "events"
        events.mkdir(exist_ok=True)
        path = events / f"failed-attempt-{where.attempt:03d}-rank-{failed.rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(to_line(failed))
        temporary.replace(path)
    return failed


def _rank() -> int:
    """Of this process, which may not have joined the others yet."""
    return ranks.rank() if ranks.world() > 1 else process_identity().rank


def first_failure(where: Where) -> Failed | None:
    """The earliest failure of this attempt that any rank recorded in the run folder."""
    if where.folder is None:
        return None
    found = (
        from_line(path.read_bytes())
        for path in (where.folder / "events").glob(f"failed-attempt-{where.attempt:03d}-rank-*.json")
    )
    return min((one for one in found if isinstance(one, Failed)), key=lambda failed: failed.time, default=None)


def install() -> None:
    """End this process at once when an exception reaches the top: peers that wait in a collective are freed by that."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        end_with(error)

    sys.excepthook = hook


def end_with(error: BaseException) -> None:
    """Record, print (unless another rank failed first), and leave without destructors that would wait for peers.

    torch puts a buffer in place of sys.stderr while an exception hook runs, and `os._exit` would lose it.
    """
    HEART.close()  # an end is no hang, however long the others take to follow
    screen = sys.__stderr__
    earlier = first_failure(WHERE)
    failed = record(error)
    if earlier is not None and earlier.rank != failed.rank:
        text = f"rank {failed.rank}: ended at step {failed.step} after rank {earlier.rank} failed"
    elif isinstance(error, ShardwiseError):
        text = f"rank {failed.rank}, step {failed.step}: {error}"
    else:
        text = f"{failed.traceback}rank {failed.rank} failed at step {failed.step} ({failed.phase})"
    sys.stdout.flush()
    print(text, file=screen, flush=True)
    if WHERE.count is not None:
        _within(COUNT_SECONDS, WHERE.count)
    os._exit(failed.exit_code)


def _within(seconds: float, act: Callable[[], None]) -> None:
    """Waits for `act` no longer than that, and for nothing that it raises: peers wait for this rank's end."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            act()

    thread = threading.Thread(target=quietly, name="shardwise-failure", daemon=True)
    thread.start()
    thread.join(seconds)


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises its own type on GPUs, a RuntimeError from the CPU allocator, and MemoryError from Python."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def out_of_memory(error: BaseException, decision: Decision, where: Where = WHERE) -> OutOfMemory:
    """Names rank, step and phase, and the cheapest change that the engine can run."""
    return OutOfMemory(
        f"Rank {ranks.rank()} ran out of memory at step {where.step}, in {where.phase}.",
        why=str(error).splitlines()[0] if str(error) else type(error).__name__,
        fix=cheapest_fix(decision),
    )


def cheapest_fix(decision: Decision) -> str:
    """Smaller micro-batches cost nothing but launches; sharding costs communication; then it takes more devices."""
    if decision.micro_batch > 1:
        half = decision.micro_batch // 2
        return f"batch.micro_batch = {half} (half the activations; accumulation keeps the global batch and the result)"
    if decision.zero == 0 and decision.mesh.world > 1:
        return "train.plan = { zero = 3 } (parameters, gradients and optimizer states split over the ranks)"
    return "more devices with train.plan = { zero = 3 }, or a smaller model or sequence_length"
