"""A rank's heartbeat: one small record in memory that a watcher shares, written at everything that the rank does.

    fixed   magic, pid, rank, world, attempt                                   written once
    beat    sequence, time, step, micro-batch, phase, collectives, checksum    written again at every beat
    ring    the last collectives that the rank waited in: number, name, entered, left

A beat is written in one call under the GIL, so threads of one process do not tear it. A reader knows by the checksum
when it read half of one: numbers at both ends would not do, as nothing says in which order a copy's bytes arrive, and
two halves of different beats may agree at the ends. Writing takes about a microsecond (benchmarks/heartbeat.py).
Nothing here imports torch: the watcher reads it, and so may anything else on the node.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MAGIC = b"SHWBEAT1"
_FIXED = struct.Struct("<8sIIII")
_ATTEMPT = struct.Struct("<I")
_BEAT = struct.Struct("<QqqiIQQ24s48s")
_CHECK = struct.Struct("<I")
_PAST = struct.Struct("<Qqq48s")
_BEAT_AT, _RING_AT, RING = 32, 192, 32
_ATTEMPT_AT, _CHECK_AT = _FIXED.size - _ATTEMPT.size, _BEAT_AT + _BEAT.size
SIZE = _RING_AT + RING * _PAST.size

# Phases that nobody watches: the user's own time before and after a run, and a process that has said its last.
BEFORE, AFTER, ENDED = "before the run", "after the run", "ended"
UNWATCHED = (BEFORE, AFTER, ENDED)


class Past(NamedTuple):
    """A collective, or a message, that a rank waited for. Times in ns of the monotonic clock; `left_ns` 0: still in."""

    number: int
    name: str
    entered_ns: int
    left_ns: int


class Beat(NamedTuple):
    """What a rank said last. `steps`: begun in this attempt; `entered`, `left`: collectives that it waited in."""

    pid: int
    rank: int
    world: int
    attempt: int
    sequence: int
    at_ns: int
    step: int
    micro: int
    steps: int
    entered: int
    left: int
    phase: str
    collective: str

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.entered != self.left


class Heart:
    """Writes this process's record. Until `open`, and in a forked child, every call does nothing.

    Only what the main thread waits for may beat: a beat from elsewhere would hide that it is stuck.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._sequence, self._step, self._micro, self._steps = 0, 0, 0, 0
        self._entered, self._left = 0, 0
        self._phase, self._name, self._over = b"setup", b"", b""

    @property
    def is_open(self) -> bool:
        return self._map is not None

    def open(self, path: Path, *, rank: int, world: int) -> None:
        """A new record in place of any that is there. Raises: OSError."""
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(bytes(SIZE))
        with temporary.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        _FIXED.pack_into(self._map, 0, MAGIC, os.getpid(), rank, world, 0)
        self.beat()
        temporary.replace(path)

    def close(self) -> None:
        """Say the last word: this rank is not watched any more."""
        self._over = b""
        self.phase(ENDED)
        self._map = None

    def forget(self) -> None:
        """In a forked child: the record is its parent's."""
        self._map = None

    def attempt(self, number: int) -> None:
        if self._map is not None:
            _ATTEMPT.pack_into(self._map, _ATTEMPT_AT, number)

    def step(self, number: int) -> None:
        self._steps += number != self._step
        self._step, self._micro = number, 0
        self.beat()

    def phase(self, name: str) -> str:
        """Gives the phase that was."""
        before, self._phase = self._phase.decode(), name.encode()[:24]
        self.beat()
        return before

    def at(self, phase: str, micro: int = 0) -> None:
        """A phase of a micro-batch."""
        self._phase, self._micro = phase.encode()[:24], micro
        self.beat()

    def beat(self) -> None:
        """There is progress, in the phase as it is."""
        if self._map is None:
            return
        self._sequence += 1
        beat = _BEAT.pack(
            self._sequence, time.monotonic_ns(), self._step, self._micro, self._steps,
            self._entered, self._left, self._over or self._phase, self._name,
        )  # fmt: skip
        self._map[_BEAT_AT : _CHECK_AT + _CHECK.size] = beat + _CHECK.pack(zlib.crc32(beat))

    def enter(self, name: str) -> None:
        """This rank waits for others from here on, to `leave`."""
        if self._map is None:
            return
        self._entered += 1
        self._name = name.encode()[:48]
        place = _RING_AT + self._entered % RING * _PAST.size
        _PAST.pack_into(self._map, place, self._entered, time.monotonic_ns(), 0, self._name)
        self.beat()

    def leave(self) -> None:
        if self._map is None or self._left == self._entered:
            return  # opened while it waited
        self._left = self._entered
        struct.pack_into("<q", self._map, _RING_AT + self._entered % RING * _PAST.size + 16, time.monotonic_ns())
        self.beat()

    def within(self, name: str) -> None:
        """Another phase lies over this one, as a compilation does over a forward; "" takes it away."""
        self._over = name.encode()[:24]
        self.beat()


HEART = Heart()
os.register_at_fork(after_in_child=HEART.forget)


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Around a call that returns when other ranks have made theirs."""
    HEART.enter(name)
    try:
        yield
    finally:
        HEART.leave()


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.beat"


def read(path: Path) -> Beat | None:
    """What the record says now; None where there is none, or it is being written at every look."""
    raw = _bytes(path, _RING_AT)
    for _ in range(20):
        if len(raw) < _RING_AT or raw[:8] != MAGIC:
            return None
        _, pid, rank, world, attempt = _FIXED.unpack_from(raw)
        if (zlib.crc32(raw[_BEAT_AT:_CHECK_AT]),) == _CHECK.unpack_from(raw, _CHECK_AT):
            *numbers, phase, name = _BEAT.unpack_from(raw, _BEAT_AT)
            return Beat._make((pid, rank, world, attempt, *numbers, _text(phase), _text(name)))
        raw = _bytes(path, _RING_AT)
    return None


def last_collectives(path: Path) -> list[Past]:
    """The newest first; what was torn while it was read is left out."""
    raw = _bytes(path, SIZE)
    if len(raw) < SIZE or raw[:8] != MAGIC:
        return []
    found = [_PAST.unpack_from(raw, _RING_AT + index * _PAST.size) for index in range(RING)]
    past = [Past(number, _text(name), entered, left) for number, entered, left, name in found if number and entered]
    return sorted(past, key=lambda one: -one.number)


def _bytes(path: Path, size: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(size) or b""
    except OSError:
        return b""


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
