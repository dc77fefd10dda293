"""What every rank has to say when one hangs: Python stacks, last collectives, what the kernel knows.

Stacks come from a handler in C (faulthandler), which runs while another thread holds the GIL or native code does. What
torch's own recorder knows of collectives comes from a thread of the rank, which needs the GIL: no answer is evidence.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.launch import heartbeat, processes
from shardwise.launch.processes import Facts

# A real-time signal that nobody else uses: USR1 and USR2 have meanings to schedulers and to torchrun.
STACKS_SIGNAL = signal.SIGRTMIN + 6
STILL_SECONDS, LIMIT_SECONDS = 0.1, 2.0
MOST_STACKS_BYTES = 2**20
# Where Python stands in a call that waits for other ranks.
_WAITING = ("/torch/distributed/", "/shardwise/ranks.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "<string>", "/shardwise/")


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def ask_path(folder: Path, rank: int) -> Path:
    """The pipe by which a rank is asked for what torch's recorder holds."""
    return folder / f"rank-{rank:05d}.ask"


def recorded_path(folder: Path, rank: int) -> Path:
    """The answer: JSON, a list of Recorded; at once an empty one, and what the recorder holds when it is read."""
    return folder / f"rank-{rank:05d}.recorded"


class Recorded(msgspec.Struct, frozen=True):
    """A collective of torch's recorder: `number` in its group, from 1 on; `state` as torch says it."""

    group: str
    number: int
    name: str
    state: str


class Said(NamedTuple):
    """What one rank said. stacks: its own, then those of processes below it; recorded: None where no answer came."""

    stacks: str
    below: str
    recorded: list[Recorded] | None
    facts: Facts
    past: list[heartbeat.Past]


class At(NamedTuple):
    """Where a main thread stands: innermost frame and the user's own, and whether that is a wait for other ranks."""

    place: str
    waits: bool


def ask(
    folder: Path,
    pids: Mapping[int, int],
    below: Mapping[int, Sequence[int]],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[int, Said]:
    """Every rank's answer, by rank; `pids`: their processes, `below`: of each rank what its own processes started.

    Takes up to LIMIT_SECONDS for all ranks, and as long again for the processes below them.
    """
    asked: set[int] = set()
    for rank, pid in pids.items():
        for path in (recorded_path(folder, rank), recorded_path(folder, rank).with_suffix(".done")):
            path.unlink(missing_ok=True)
        if _signal(pid):
            asked.add(rank)
        _knock(ask_path(folder, rank))
    deadline = clock() + LIMIT_SECONDS
    own = {
        rank: _settled(stacks_path(folder, rank), 0, deadline, clock, pause) if rank in asked else "" for rank in pids
    }
    recorded = {
        rank: _recorded(recorded_path(folder, rank), deadline, clock, pause) if rank in asked else None for rank in pids
    }
    deadline = clock() + LIMIT_SECONDS
    said = {}
    for rank, pid in pids.items():
        lower, at = "", len(own[rank])
        for child in below.get(rank, ()):
            if _signal(child):  # forked from the rank, it writes into the rank's file
                stacks = _settled(stacks_path(folder, rank), at, deadline, clock, pause)
                lower += f"process {child}, below rank {rank}:\n{stacks}\n"
                at += len(stacks)
        past = heartbeat.last_collectives(heartbeat.record_path(folder, rank))
        said[rank] = Said(own[rank], lower, recorded[rank], processes.facts(pid), past)
    return said


def _signal(pid: int) -> bool:
    """Ask for stacks; False where the signal would end the process, or it is stopped and cannot answer."""
    seen = processes.stat(pid)
    if seen is None or seen.state == "stopped" or not processes.catches(pid, STACKS_SIGNAL):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
        return True
    return False


def _knock(path: Path) -> None:
    with contextlib.suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"?")
        finally:
            os.close(pipe)


def _settled(
    path: Path, start: int, deadline: float, clock: Callable[[], float], pause: Callable[[float], None]
) -> str:
    """A file from a place on, once it has not grown for a moment; what there is at the deadline."""
    size, since = start, clock()
    while clock() < deadline:
        now = _size(path)
        if now != size:
            size, since = now, clock()
        elif now > start and clock() - since > STILL_SECONDS:
            break
        pause(0.01)
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read(MOST_STACKS_BYTES).decode(errors="replace")
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _recorded(
    path: Path, deadline: float, clock: Callable[[], float], pause: Callable[[float], None]
) -> list[Recorded] | None:
    while True:
        done, found = _size(path.with_suffix(".done")), None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode(path.read_bytes(), type=list[Recorded])
        if done or clock() >= deadline:
            return found
        pause(0.01)


def where(stacks: str) -> At:
    """Of the stacks that faulthandler wrote: the main thread's, which it writes last."""
    frames: list[str] = []
    for line in stacks.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = []
        elif line.startswith("  File "):
            frames.append(line.strip())
    if not frames:
        return At("", False)
    own = next((frame for frame in frames if not any(part in frame for part in _LIBRARIES)), frames[0])
    places = [_place(frames[0])] + ([_place(own)] if own != frames[0] else [])
    return At(", called by ".join(places), any(part in frames[0] for part in _WAITING))


def _place(frame: str) -> str:
    """`File "/a/b.py", line 3 in f` as `b.py:3 in f`."""
    path, _, rest = frame.removeprefix('File "').partition('", line ')
    return f"{Path(path).name}:{rest}"


def report(rank: int, said: Said, now_ns: int) -> str:
    """One rank's file, for a person."""
    lines = [f"rank {rank}: {said.facts.state}"]
    lines += [f"  waits in the kernel: {said.facts.wait_channel}"] if said.facts.wait_channel else []
    lines += [f"  system call: {said.facts.system_call}"] if said.facts.system_call else []
    lines += ["", "last collectives that it told (newest first)"]
    lines += [f"  {_past(one, now_ns)}" for one in said.past] or ["  none"]
    lines += ["", "last collectives by torch's recorder (newest first)"]
    if said.recorded is None:
        lines.append("  no answer: none of its Python threads could run, or its group has not begun")
    else:
        lines += [f"  {one.group} {one.number} {one.name} ({one.state})" for one in said.recorded[::-1]] or ["  none"]
    lines += ["", "Python stacks (innermost first)", said.stacks or "  none: it is stopped, gone or in the kernel"]
    lines += ["", said.below] if said.below else []
    lines += ["", "threads: name, state, wait channel"]
    lines += [f"  {name:16} {state:14} {channel}" for name, state, channel in said.facts.threads]
    return "\n".join(lines) + "\n"


def _past(one: heartbeat.Past, now_ns: int) -> str:
    ago = (now_ns - one.entered_ns) / 1e9
    took = f"took {(one.left_ns - one.entered_ns) / 1e6:.1f} ms" if one.left_ns else "still in it"
    return f"{one.number} {one.name}: entered {ago:.1f} s ago, {took}"
