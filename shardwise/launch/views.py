"""What the watchers of several nodes tell each other: a small file each in the run's folder, which all nodes see.

A file is written in place and synced, never renamed: on a network file system a reader that opens it anew then sees
what was written last. Who reads it counts its silence on a clock of his own, so that no two clocks are compared. All of
it happens in a thread: a file system that is gone stops that thread and not the watcher.
"""

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardwise.launch.hang import Seen
from shardwise.launch.heartbeat import ENDED

MOST_SECONDS = 5.0
# A view from so long before this watcher began is of an earlier attempt. Clocks of nodes agree to less.
EARLIER_SECONDS = 60.0


class View(msgspec.Struct, frozen=True):
    """One node's ranks."""

    count: int
    first: int
    host: str
    began: float
    alarm: bool
    seen: tuple[Seen, ...]


class Told(msgspec.Struct, frozen=True):
    """A view as it lies in its file. The checksum is of its text: a reader may see half of one view and half of the
    next, and numbers at both ends may agree then.
    """

    check: int
    view: msgspec.Raw


class Views:
    """This node's view, told, and those of the others, read. `exchange` does both once; `start` has a thread do it."""

    def __init__(self, folder: Path, first: int, host: str, hang_seconds: float, began: float | None = None) -> None:
        self.folder, self.first, self.host, self.hang_seconds = folder, first, host, hang_seconds
        self.began = time.time() if began is None else began
        self.seconds = min(MOST_SECONDS, hang_seconds / 12)
        self.raised = False
        self._mine: tuple[Seen, ...] = ()
        self._count = 0
        self._known: dict[int, View] = {}  # as they were when they were last read, by first rank
        self._fresh: dict[int, bool] = {}
        self._silent: dict[int, float] = {}
        self._met: set[int] = set()

    def start(self) -> None:
        threading.Thread(target=self._keep_on, daemon=True).start()

    def _keep_on(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.exchange()
            time.sleep(self.seconds)

    def exchange(self) -> None:
        """Tell and read once. Raises: OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._count += 1
        mine = msgspec.json.encode(View(self._count, self.first, self.host, self.began, self.raised, self._mine))
        file = os.open(self.folder / f"node-{self.first:05d}.json", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            written = os.pwrite(file, msgspec.json.encode(Told(zlib.crc32(mine), msgspec.Raw(mine))), 0)
            os.ftruncate(file, written)
            os.fsync(file)
        finally:
            os.close(file)
        for path in self.folder.glob("node-*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                told = msgspec.json.decode(path.read_bytes(), type=Told)
                if zlib.crc32(told.view) == told.check:
                    self._take(msgspec.json.decode(told.view, type=View))

    def _take(self, view: View) -> None:
        if view.first == self.first or view.began < self.began - EARLIER_SECONDS:
            return
        before = self._known.get(view.first)
        if before is None or (before.count, before.began) != (view.count, view.began):
            self._known[view.first], self._fresh[view.first] = view, True

    def others(self, mine: Sequence[Seen], elapsed: float) -> list[Seen]:
        """The ranks of the other nodes, `elapsed` seconds after the last call; those of a silent node are lost.

        A node counts once its view was seen to change: what never does is a file that an earlier attempt left.
        """
        self._mine = tuple(mine)
        found: list[Seen] = []
        for first, view in list(self._known.items()):
            if self._fresh.pop(first, False):
                if first in self._silent:
                    self._met.add(first)
                self._silent[first] = 0.0
            else:
                self._silent[first] += elapsed
            if first in self._met:
                found += [self._aged(seen, self._silent[first]) for seen in view.seen]
        return found

    def _aged(self, seen: Seen, silent: float) -> Seen:
        lost = silent >= self.hang_seconds / 2 and seen.phase != ENDED
        quiet = silent if lost else seen.quiet_seconds + silent
        return msgspec.structs.replace(seen, quiet_seconds=quiet, state="lost" if lost else seen.state)

    def alarm(self) -> bool:
        """Whether another node has found a hang."""
        return any(view.alarm for first, view in list(self._known.items()) if first in self._met)
