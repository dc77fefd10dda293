"""A torch.profiler (Kineto) trace as columns: what ran, where and when, of one rank; and what cannot be trusted in it.

Traces of 2021 and of today, of CUDA, ROCm and CPU: categories are of either spelling, thread ids numbers or text. The
file's own stamps are microseconds; here they are nanoseconds. Never imports torch.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.errors import BadInput
from shardwise.profiling.intervals import Stamps

# A trace of more is no trace: what is unpacked is bounded, so that no small file fills the memory.
MOST_BYTES = 8 * 2**30
# Nobody profiles for longer: a duration above it, or a stamp this far from the others, is a fault of the profiler
# (durations of centuries and zero stamps are known of several releases).
LONGEST_NS = 24 * 3600 * 10**9


class Kind(IntEnum):
    """What an event is. Of the device: kernels, copies, fills. Of the host: the rest."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    RUNTIME = 3
    OPERATOR = 4
    ANNOTATION = 5
    PYTHON = 6


_BOUND = 2**61  # the difference of two is an int64
ON_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
# Rows of synchronisation (cuda_sync), of the profiler's overhead and of annotations drawn on the device are no work.
_KINDS = {
    "kernel": Kind.KERNEL, "gpu_memcpy": Kind.MEMCPY, "memcpy": Kind.MEMCPY, "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET, "cuda_runtime": Kind.RUNTIME, "cuda_driver": Kind.RUNTIME, "runtime": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME, "hip_driver": Kind.RUNTIME, "cpu_op": Kind.OPERATOR, "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION, "python_function": Kind.PYTHON,
}  # fmt: skip


class Events(NamedTuple):
    """n events as columns. Times in ns; `name` an index of Trace.names; `lane` of a thread or a stream, `device` -1 on
    the host; `correlation` ties a device's event to the call that launched it, 0 where nothing does.
    """

    start: Stamps
    end: Stamps
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    lane: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    correlation: npt.NDArray[np.int64]

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Events":
        return Events(*(column[chosen] for column in self))


class Doubts(NamedTuple):
    """What the file lacks. `malformed`: events without a time or a length; `absurd`: with one that cannot be."""

    truncated: bool
    malformed: int
    absurd: int


class Trace(NamedTuple):
    """One rank's trace. `rank` and `world` as the file says, else None."""

    path: str
    events: Events
    names: tuple[str, ...]
    rank: int | None
    world: int | None
    devices: tuple[str, ...]
    doubts: Doubts


class _Args(msgspec.Struct, gc=False):
    device: Any = None
    correlation: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: Any = None
    name: Any = None
    cat: Any = None
    ts: Any = None
    dur: Any = None
    pid: Any = None
    tid: Any = None
    args: _Args | list[Any] | str | int | float | bool | None = None


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    distributed: Any = msgspec.field(name="distributedInfo", default=None)
    devices: Any = msgspec.field(name="deviceProperties", default=None)


_DECODER = msgspec.json.Decoder(_File | list[_Event])


def read(path: Path) -> Trace:
    """A trace, gz or not; what is cut off at its end is read up to there. Raises: BadInput where it is no trace."""
    try:
        with path.open("rb") as file:
            return read_from(file, str(path))
    except OSError as error:
        raise BadInput(f"{path} cannot be read.", why=str(error), fix="give a trace of torch.profiler") from error


def read_from(packed: IO[bytes], path: str) -> Trace:
    """As `read`, from an open file; `path` names it in what is said. Raises: BadInput; OSError."""
    raw, cut = _unpacked(packed, path)
    file, truncated = _decoded(raw, path)
    del raw
    info = file.distributed if isinstance(file.distributed, dict) else {}
    events, names, malformed, absurd = _columns(file.events)
    devices = (
        [item.get("name") for item in file.devices if isinstance(item, dict)] if isinstance(file.devices, list) else []
    )
    return Trace(
        path=path,
        events=events,
        names=names,
        rank=_whole(info.get("rank")),
        world=_whole(info.get("world_size")),
        devices=tuple(str(name) for name in devices),
        doubts=Doubts(truncated or cut, malformed, absurd),
    )


def _unpacked(file: IO[bytes], path: str) -> tuple[bytes, bool]:
    """The file's text, and whether its packing is cut off or broken: what comes before a broken place is kept, which
    gzip's own reader throws away. Raises: BadInput.
    """
    head = file.read(2)
    if head != b"\x1f\x8b":
        raw = head + file.read(MOST_BYTES)
        _bound(len(raw), path)
        return raw, False
    inflater, pieces, size = zlib.decompressobj(wbits=31), [], 0
    while packed := head or inflater.unconsumed_tail or inflater.unused_data or file.read(2**20):
        head = b""
        if inflater.eof:  # another member follows
            inflater = zlib.decompressobj(wbits=31)
        try:
            pieces.append(inflater.decompress(packed, 2**24))
        except zlib.error:
            return b"".join(pieces), True
        size += len(pieces[-1])
        _bound(size, path)
    return b"".join(pieces), not inflater.eof


def _bound(size: int, path: str) -> None:
    if size > MOST_BYTES:
        raise BadInput(
            f"{path} holds more than {MOST_BYTES // 2**30} GiB.",
            why="no trace of one rank is that large",
            fix="profile fewer steps (schedule(active=3), say)",
        )


def _decoded(raw: bytes, path: str) -> tuple[_File, bool]:
    """What the text says, and whether it ends too early. Raises: BadInput."""
    for decode, text, truncated in _readings(raw):
        try:
            found = decode(text)
        except (ValueError, RecursionError):  # msgspec's errors and json's are ValueErrors
            continue
        return (found if isinstance(found, _File) else _File(found)), truncated
    raise BadInput(
        f"{path} is no trace.",
        why="it is not JSON with a list of traceEvents, nor the beginning of one",
        fix="give what torch.profiler's export_chrome_trace or tensorboard_trace_handler wrote",
    )


def _readings(raw: bytes) -> Iterator[tuple[Callable[[bytes], _File | list[_Event]], bytes, bool]]:
    """The text as it is, then with what JSON does not know (NaN, bytes that are no UTF-8); then cut off after one of
    its last whole events, and closed.
    """
    yield _DECODER.decode, raw, False
    yield _lenient, raw, False
    at, closing = len(raw), b"]" if raw.lstrip()[:1] == b"[" else b"]}"
    for _ in range(16):
        at = raw.rfind(b"}", 0, at)
        if at < 0:
            return
        yield _DECODER.decode, raw[: at + 1] + closing, True


def _lenient(raw: bytes) -> _File | list[_Event]:
    return msgspec.convert(json.loads(raw.decode(errors="replace")), _File | list[_Event])


def _columns(found: list[_Event]) -> tuple[Events, tuple[str, ...], int, int]:
    """The events that say when and what, the names, and how many were malformed and absurd."""
    names: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    kinds: dict[Any, Kind | None] = {}
    rows, stamps, lengths, malformed = [], [], [], 0
    for event in found:
        if event.ph != "X":
            continue
        category = event.cat
        if not isinstance(category, str):
            continue
        if category not in kinds:
            kinds[category] = _KINDS.get(category.lower())
        kind = kinds[category]
        if kind is None:
            continue
        start, length = _nanoseconds(event.ts), _nanoseconds(event.dur)
        if start is None or length is None:
            malformed += 1
            continue
        args = event.args if isinstance(event.args, _Args) else _Args()
        lane = lanes.setdefault((str(event.pid), str(event.tid)), len(lanes))
        device = _whole(args.device) if kind in ON_DEVICE else None
        name = names.setdefault(event.name if isinstance(event.name, str) else "", len(names))
        stamps.append(start)
        lengths.append(length)
        rows.append((kind, name, lane, -1 if device is None else device, _whole(args.correlation) or 0))
    start, length = np.array(stamps, np.int64), np.array(lengths, np.int64)
    table = np.array(rows, np.int64).reshape(-1, 5)
    sound = (length >= 0) & (length <= LONGEST_NS)
    if len(start):
        sound &= np.abs(start - np.int64(np.median(start[sound]) if sound.any() else 0)) <= LONGEST_NS
    events = Events(
        start, start + np.where(sound, length, 0), table[:, 0].astype(np.int8), table[:, 1].astype(np.int32),
        table[:, 2].astype(np.int32), table[:, 3].astype(np.int32), table[:, 4],
    ).where(sound)  # fmt: skip
    return events, tuple(names), malformed, int((~sound).sum())


def _nanoseconds(microseconds: Any) -> int | None:
    """None of what is no number of microseconds; what 62 bits do not hold is the largest that they do."""
    if isinstance(microseconds, str):
        try:
            microseconds = float(microseconds)
        except ValueError:
            return None
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
        return None
    if microseconds != microseconds:
        return None
    return round(max(-_BOUND, min(microseconds * 1000, _BOUND)))


def _whole(value: Any) -> int | None:
    """An int, also as text; None of anything else, or what 31 bits do not hold."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 2**31 else None
