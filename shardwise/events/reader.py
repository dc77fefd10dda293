"""Read events back: a whole file, or what was added since the last look."""

from pathlib import Path

import msgspec

from shardwise.errors import TrainingFailed
from shardwise.events.values import AnyEvent, from_line


def read(path: str | Path) -> list[AnyEvent]:
    """All events of a file. A last line without its newline was torn by a crash and is left out.

    Raises: TrainingFailed where any other line is not an event; FileNotFoundError.
    """
    path = Path(path)
    whole, _ = _whole_lines(path.read_bytes())
    return [_event(path, number, line) for number, line in enumerate(whole, start=1)]


class Tail:
    """Reads a growing file piece by piece. It never sleeps: the caller decides when to look again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0
        self._lines = 0

    def new(self) -> list[AnyEvent]:
        """The events whose lines were completed since the last call; none while the file does not exist.

        Raises: TrainingFailed where a completed line is not an event.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, consumed = _whole_lines(file.read())
        except FileNotFoundError:
            return []
        first = self._lines + 1
        events = [_event(self.path, number, line) for number, line in enumerate(whole, start=first)]
        self._offset += consumed
        self._lines += len(whole)
        return events


def _whole_lines(raw: bytes) -> tuple[list[bytes], int]:
    """The lines that have their newline, and how many bytes they take."""
    consumed = raw.rfind(b"\n") + 1
    return raw[:consumed].split(b"\n")[:-1], consumed


def _event(path: Path, number: int, line: bytes) -> AnyEvent:
    try:
        return from_line(line)
    except msgspec.DecodeError as error:
        raise TrainingFailed(
            f"{path}, line {number}, is not an event: {error}.",
            why="the file was edited, damaged, or written by another version",
            fix="read it with the version that wrote it, or remove the line",
        ) from error
