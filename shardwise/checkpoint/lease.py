"""Who holds a store: a second job on the same checkpoints is refused, and a holder that died is succeeded.

A lease is a key `.lease-<lineage>-<generation>`, created once, so that of several that want a generation one gets it.
Its holder writes it anew every quarter of its term. Nobody's clock is compared with another's: whoever finds a lease
watches it for one term by a clock of its own, and takes the next generation if it was not written meanwhile. A holder
that finds a later generation has lost it, and commits and deletes nothing more; one that has not written for half a
term writes first, and so finds out.
"""

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec

from shardwise.checkpoint.retention import tag
from shardwise.checkpoint.store import Piece, Store
from shardwise.environment import hostname
from shardwise.errors import CheckpointError, RunFolderError

TERM_SECONDS = 60.0
_BEATS_A_TERM = 4
_NAME = re.compile(r"^\.lease-(?P<tag>[0-9a-f]{6})-(?P<generation>\d{8})$")
Keys = list[str]


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a lease says. `nonce` is one holder's alone; `machine` is where its pid means something; `written`
    (unix seconds by the holder's clock) is for people.
    """

    nonce: str
    run: str
    pid: int
    host: str
    machine: str
    beat: Annotated[int, msgspec.Meta(ge=0)]
    written: float
    term_seconds: float = TERM_SECONDS
    released: bool = False
    schema_version: Literal[1] = 1

    @property
    def who(self) -> str:
        return f"process {self.pid} on {self.host}, run {self.run}"


class Lost(CheckpointError):
    """This process no longer holds the store: it must not commit or delete."""


class Lease:
    """Held from the start of the block to its end, and kept up by a thread. One process of a job takes it.

    Raises at the start: RunFolderError, naming the holder, where another job holds the store; OSError.
    """

    def __init__(
        self,
        store: Store,
        lineage: str,
        run: str,
        *,
        term_seconds: float = TERM_SECONDS,
        tell: Callable[[str, str], None] = lambda what, why: None,
        wait: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._tag = store, tag(lineage)
        self._wait, self._clock, self._tell = wait, clock, tell
        self._generation = 0
        self._held = Held(
            secrets.token_hex(8), run, os.getpid(), hostname(), machine_here(), 0, time.time(), term_seconds
        )
        self._written_at = clock()
        self._lost = ""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Lease":
        self._generation = self._take()
        self._written_at = self._clock()
        for older in range(self._generation):
            self._store.delete(self._key(older))
        self._thread = threading.Thread(target=self._keep_up, name="shardwise-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Released, it stays as the last generation, so that whoever held an earlier one sees that it is over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError, Lost):
            self.beat(released=True)

    def beat(self, *, released: bool = False) -> None:
        """Writes the lease anew. Raises: Lost where somebody holds a later generation; OSError."""
        with self._lock:
            self._require_not_lost()
            newest = self._newest()
            if newest is not None and newest > self._generation:
                self._lose(f"it was taken by {self._who(newest)} while this job did not write it")
            held = msgspec.structs.replace(self._held, beat=self._held.beat + 1, written=time.time(), released=released)
            begun = self._clock()
            self._store.write(self._key(self._generation), [msgspec.json.encode(held)])
            self._held, self._written_at = held, begun

    def require(self) -> None:
        """Raises: Lost where this process holds the store no more; OSError where that cannot be found out."""
        self._require_not_lost()
        if self._clock() - self._written_at > self._held.term_seconds / 2:
            self.beat()

    def _require_not_lost(self) -> None:
        if self._lost:
            raise Lost(
                f"{self._store} is no longer held by this job.",
                why=self._lost,
                fix="stop one of the two jobs; this one has committed nothing since",
            )

    def _lose(self, why: str) -> None:
        self._lost = why
        self._require_not_lost()

    def _keep_up(self) -> None:
        while not self._stop.wait(self._held.term_seconds / _BEATS_A_TERM):
            try:
                self.beat()
            except Lost as error:
                self._tell(error.what, error.why)
                return
            except Exception as error:
                self._tell(f"the lease of {self._store} was not written", f"{type(error).__name__}: {error}")

    def _take(self) -> int:
        """The generation that is now this process's."""
        while True:
            newest = self._newest()
            if newest is not None:
                self._require_over(newest)
            generation = 0 if newest is None else newest + 1
            with contextlib.suppress(FileExistsError):
                self._store.create(self._key(generation), msgspec.json.encode(self._held))
                return generation

    def _require_over(self, generation: int) -> None:
        """Waits a term at most. Raises: RunFolderError where the holder of this generation lives."""
        first = self._read(generation)
        if first is None or first.released:
            return
        if died_here(first):
            return
        self._tell(
            f"{self._store} is held by {first.who}; watched for up to {first.term_seconds:.0f} s",
            "a holder that lives writes its lease anew within that time",
        )
        end = self._clock() + first.term_seconds
        while self._clock() < end:
            self._wait(first.term_seconds / (2 * _BEATS_A_TERM))
            now = self._read(generation)
            if now is None or now.released:
                return
            if now != first:
                raise self._in_use(now, generation)

    def _in_use(self, held: Held, generation: int) -> RunFolderError:
        return RunFolderError(
            f"The checkpoints in {self._store} are in use by {held.who}.",
            why="it has just written its lease anew",
            fix="stop that job, or give this one a run and a checkpoint.store of its own; a job that died is succeeded "
            f"{held.term_seconds:.0f} s after, or at once when {self._store}/{self._key(generation)} is deleted",
        )

    def _newest(self) -> int | None:
        found = [match for key in self._store.list(f".lease-{self._tag}-") if (match := _NAME.match(key))]
        return max((int(match["generation"]) for match in found), default=None)

    def _read(self, generation: int) -> Held | None:
        try:
            return msgspec.json.decode(self._store.read(self._key(generation)), type=Held)
        except FileNotFoundError:
            return None

    def _who(self, generation: int) -> str:
        held = self._read(generation)
        return "another job" if held is None else held.who

    def _key(self, generation: int) -> str:
        return f".lease-{self._tag}-{generation:08d}"


class Leased:
    """A Store whose commits and deletions need a lease: a job that lost it changes nothing more."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self.store, self.lease = store, lease

    def __str__(self) -> str:
        return str(self.store)

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        self.store.write(key, pieces)

    def create(self, key: str, value: Piece) -> None:
        """Raises: Lost."""
        self.lease.require()
        self.store.create(key, value)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.store.read(key, start, length)

    def list(self, prefix: str = "") -> Keys:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        """Raises: Lost."""
        self.lease.require()
        self.store.delete(key)

    def exists(self, key: str) -> bool:
        return self.store.exists(key)

    def free_bytes(self) -> int | None:
        ask: Callable[[], int | None] | None = getattr(self.store, "free_bytes", None)
        return None if ask is None else ask()


def machine_here() -> str:
    """This boot and its name space of process ids: within it a pid means one process."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"


def died_here(held: Held) -> bool:
    """Whether its holder is known to be gone; False for a holder elsewhere, of whom nothing is known."""
    if held.machine != machine_here():
        return False
    try:
        os.kill(held.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
