"""Append events to a file, one line a write."""

import os
import threading
from pathlib import Path
from types import TracebackType

from shardwise.events.values import Event, to_line


class EventWriter:
    """A sink that appends each event to `path` at once, as one line in one write.

    With O_APPEND lines of several processes never mix, and a process killed between two events leaves whole
    lines. Safe to call from several threads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def emit(self, event: Event) -> None:
        """Raises: OSError when the disk is full or the writer is closed."""
        line = to_line(event)
        with self._lock:
            if self._file is None:
                raise OSError(f"{self.path} is closed")
            written = os.write(self._file, line)
            # A nearly full disk can take half a line: the rest follows, or the error is raised.
            while written < len(line):
                written += os.write(self._file, line[written:])

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> "EventWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
