"""Append events to a file, one line a write; a disk that is full or ill delays them, and never ends a training."""

import os
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from shardwise.events.values import Event, to_line

# What is kept while nothing can be written: hours of steps. After that the oldest lines are given up, and counted.
MOST_LINES = 100_000


class EventWriter:
    """A sink that appends each event to `path` at once, as one line in one write.

    With O_APPEND lines of several processes never mix, and a process killed between two events leaves whole
    lines. What the disk refuses is kept and written with a later event; it is said once on stderr. Safe to call from
    several threads.
    """

    def __init__(self, path: str | Path, most_lines: int = MOST_LINES) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()
        self._most_lines = most_lines
        self._dropped = 0
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def delayed(self) -> int:
        """Lines that are kept because the disk refused them."""
        return len(self._kept)

    def emit(self, event: Event) -> None:
        """Raises: OSError when the writer is closed."""
        with self._lock:
            if self._file is None:
                raise OSError(f"{self.path} is closed")
            self._kept.append(to_line(event))
            healthy = len(self._kept) == 1
            try:
                self._write(self._file)
            except OSError as error:
                self._refused(error, first=healthy)

    def _write(self, file: int) -> None:
        while self._kept:
            # A nearly full disk can take half a line: the rest follows, now or later.
            written = os.write(file, self._kept[0])
            if written < len(self._kept[0]):
                self._kept[0] = self._kept[0][written:]
            else:
                self._kept.popleft()

    def _refused(self, error: OSError, *, first: bool) -> None:
        if first:
            print(f"shardwise: {self.path}: {error.strerror}: events are kept in memory until it can be written again",
                  file=sys.stderr)  # fmt: skip
        while len(self._kept) > self._most_lines:
            del self._kept[1]  # never the first: half of it may be in the file
            self._dropped += 1

    def close(self) -> None:
        """Idempotent. What could not be written is tried once more, and else said."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._write(self._file)
            except OSError as error:
                lost = len(self._kept) + self._dropped
                print(f"shardwise: {self.path}: {error.strerror}: {lost} events are lost", file=sys.stderr)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
