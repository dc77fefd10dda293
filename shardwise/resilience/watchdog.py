"""The watchdog inside a rank: it beats, can say where it is while it is stuck, and ends with whoever started it.

The node's first rank starts the watcher (launch/watcher.py) as a process of its own. In the Trainer all of this is
there by itself; a loop of your own enters a Watchdog.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from shardwise.environment import (
    ProcessIdentity,
    child_environment,
    in_pod,
    job_logs,
    notice_seconds,
    process_identity,
    record_collectives,
    started_by_torchrun,
)
from shardwise.errors import RecipeError
from shardwise.launch import dump, processes
from shardwise.launch.heartbeat import AFTER, HEART, read, record_path
from shardwise.launch.watcher import Watched
from shardwise.resilience.budget import budget_of

_PR_SET_PDEATHSIG = 1  # Source: prctl(2)
# In memory, where there is such a place: a beat must not wait for a disk.
_MEMORY = Path("/dev/shm")

# One of each a process, whatever is entered how often.
_begun: "_Begun | None" = None
_compiling_told = False


class Watchdog:
    """While entered, this rank is watched: one that hangs is named within `hang_seconds`, and all end 30 s later.

    For a loop of your own, started by torchrun, srun or alone; all ranks enter it, before the loop. Between two calls
    of `step` or `beat` no more than `hang_seconds` may pass, but for the first two steps, which compile, and within
    `phase`: "loop body" may say nothing for 10 times as long, "setup", "load", "save" and "compile" for 30
    times. What is longer says `beat` now and then. A rank that hangs is ended by KILL; whoever started it sees that.
    `run`: a folder that all nodes see; stacks and last collectives of all ranks then lie in its hangs/.

    Example:
        with sw.Watchdog("runs/mine") as watchdog:
            for step in range(1, 1001):
                watchdog.step(step)
                train(step)
                if step % 100 == 0:
                    with watchdog.phase("evaluate"):
                        for batch in valid:
                            evaluate(batch)
                            watchdog.beat()
    """

    def __init__(self, run: str | Path, *, hang_seconds: float = 60.0) -> None:
        self.run, self.hang_seconds = Path(run), hang_seconds

    def __enter__(self) -> "Watchdog":
        """Raises: RecipeError where the ranks' nodes are not known, or the watcher cannot be started."""
        begin(self.run, self.hang_seconds)
        HEART.phase("step")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        HEART.phase(AFTER)

    def step(self, number: int) -> None:
        """A step begins."""
        HEART.step(number)
        tell_compiling()

    def beat(self) -> None:
        """There is progress. From the main thread alone: another one's would hide that it is stuck."""
        HEART.beat()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around what is not a step; `name` stands in what is said of a hang."""
        before = HEART.phase(name)
        try:
            yield
        finally:
            HEART.phase(before)


class _Begun:
    """What lives as long as the process: the file that stacks go to, and the thread that answers."""

    def __init__(self, stacks: IO[bytes], answer: threading.Thread) -> None:
        self.stacks, self.answer = stacks, answer


def why_not(hang_seconds: float) -> str:
    """Why a Trainer is not watched here; empty where it is.

    In an interactive session the time between two lines is the user's; ranks that were joined by hand do not tell on
    which nodes they are.
    """
    if hang_seconds == 0:
        return "train.hang_seconds = 0"
    if hasattr(sys, "ps1") or sys.flags.interactive or "ipykernel" in sys.modules:
        return "this is an interactive session"
    if not process_identity().launched and _joined_by_hand():
        return "the ranks were joined by hand, and their nodes are not known"
    return ""


def _joined_by_hand() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1


def begin(run: Path, hang_seconds: float, notice: float | None = None) -> None:
    """Beat, be ready to answer, and on the node's first rank start the watcher; the second time nothing.

    notice: seconds that a rank has to save once its launcher is gone; None: as its surroundings suggest.

    Raises: RecipeError.
    """
    global _begun
    if _begun is not None:
        return
    if not hang_seconds > 0 or (not process_identity().launched and _joined_by_hand()):
        raise RecipeError(
            f"This rank cannot be watched with hang_seconds = {hang_seconds:g}.",
            why=why_not(0.0 if not hang_seconds > 0 else hang_seconds),
            fix="hang_seconds = 60, and start the ranks with torchrun, srun or shardwise run",
        )
    identity = process_identity()
    folder = _own_folder(identity)
    stacks = dump.stacks_path(folder, identity.rank).open("wb", buffering=0)
    faulthandler.register(dump.STACKS_SIGNAL, file=stacks, all_threads=True)
    answer = _answering(folder, identity.rank)
    HEART.open(record_path(folder, identity.rank), rank=identity.rank, world=identity.world)
    HEART.attempt(identity.attempt)
    record_collectives()
    if started_by_torchrun():
        _end_with_launcher()
    if identity.local_rank == 0:
        _sweep(folder.parent)
        notice = budget_of(notice, notice_seconds(), in_pod()).seconds
        _start_watcher(folder, run, hang_seconds, identity, notice)
    tell_compiling()
    _begun = _Begun(stacks, answer)


def _own_folder(identity: ProcessIdentity) -> Path:
    """The node's folder of this job: one that all its ranks work out alike, and that belongs to this user."""
    first = identity.rank - identity.local_rank
    key = f"{identity.master_addr}:{identity.master_port}:{identity.attempt}:{first}"
    if not identity.launched:
        key = f"process {os.getpid()}"
    name = f"shardwise-{os.getuid()}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())) / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        theirs = folder.lstat().st_uid != os.getuid() or folder.is_symlink()
    except OSError as error:
        raise _no_folder(folder, error.strerror or str(error)) from None
    if theirs:
        raise _no_folder(folder, "it belongs to somebody else")
    return folder


def _sweep(parent: Path) -> None:
    """Take away what a watcher left that was killed itself, once it is a day old."""
    for old in parent.glob(f"shardwise-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 86_400 and not any(_lives(record) for record in old.glob("*.beat")):
                shutil.rmtree(old)


def _lives(record: Path) -> bool:
    beat = read(record)
    return beat is not None and processes.stat(beat.pid) is not None


def _no_folder(folder: Path, why: str) -> RecipeError:
    return RecipeError(
        f"The heartbeats' folder {folder} cannot be made.", why=why, fix="free /dev/shm, or train.hang_seconds = 0"
    )


def _answering(folder: Path, rank: int) -> threading.Thread:
    """A thread that writes what torch's recorder holds, whenever a byte comes through the pipe."""
    _recorded()  # what it needs is imported now: the time to answer is short
    ask, answer = dump.ask_path(folder, rank), dump.recorded_path(folder, rank)
    ask.unlink(missing_ok=True)
    os.mkfifo(ask, 0o600)
    pipe = os.open(ask, os.O_RDWR)  # also to write, or the first who asked would close it for all

    def listen() -> None:
        while os.read(pipe, 64):
            with contextlib.suppress(OSError):
                answer.write_bytes(b"[]")
                temporary = answer.with_suffix(".tmp")
                temporary.write_bytes(msgspec.json.encode(_recorded()))
                temporary.replace(answer)
                answer.with_suffix(".done").write_bytes(b"!")

    thread = threading.Thread(target=listen, daemon=True, name="answering")
    thread.start()
    return thread


def _recorded() -> list[dump.Recorded]:
    if "torch.distributed" not in sys.modules:
        return []
    from shardwise.torch_private import last_collectives

    return [dump.Recorded(*one) for one in last_collectives()]


def _end_with_launcher() -> None:
    """Ask the kernel for a TERM when torchrun dies, even by KILL: it cannot pass one on any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _start_watcher(folder: Path, run: Path, hang_seconds: float, identity: ProcessIdentity, notice: float) -> None:
    watched = Watched(
        folder=str(folder), run=str(run.absolute()), first=identity.rank - identity.local_rank,
        local=identity.local_world, world=identity.world, hang_seconds=hang_seconds,
        launcher=os.getppid() if started_by_torchrun() else 0, logs=job_logs() or "",
        notice_seconds=notice,
    )  # fmt: skip
    command = [sys.executable, "-m", "shardwise.launch.watcher", msgspec.json.encode(watched).decode()]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.posix_spawn(
            sys.executable, command, child_environment({}),
            file_actions=[(os.POSIX_SPAWN_DUP2, nothing, 0)], setsid=True,
        )  # fmt: skip
    except OSError as error:
        raise RecipeError("The watcher could not be started.", why=str(error), fix="train.hang_seconds = 0") from error
    finally:
        os.close(nothing)


def tell_compiling() -> None:
    """Have a compilation seen as a phase, wherever it happens: it may be silent for long.

    Asked at every step: torch's compiler takes a second to import, and is there once something is to be compiled.
    """
    global _compiling_told
    if _compiling_told or not HEART.is_open or "torch" not in sys.modules:
        return
    from shardwise.torch_private import around_compiling

    _compiling_told = around_compiling(lambda: HEART.within("compile"), lambda: HEART.within(""))
