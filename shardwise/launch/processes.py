"""Processes of this machine as /proc shows them: trees, sessions, states; and ending all of a set within a bound."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

POLL_SECONDS = 0.02
# The letters of /proc/PID/stat. Source: proc(5).
STATES = {
    "R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "stopped", "I": "sleeping",
    "Z": "gone", "X": "gone", "": "gone",
}  # fmt: skip


class Process(NamedTuple):
    """One process, told apart from a later one of the same number by when it began (clock ticks since boot)."""

    pid: int
    began: int


class Stat(NamedTuple):
    """`state` as one of STATES' words."""

    state: str
    parent: int
    session: int
    began: int


class Facts(msgspec.Struct, frozen=True):
    """What the kernel says of a process that cannot speak for itself. `threads`: name, state and wait channel of each.

    `system_call`: number and arguments of the call that it is in, "running", or empty where it may not be read.
    """

    state: str
    wait_channel: str = ""
    system_call: str = ""
    threads: tuple[tuple[str, str, str], ...] = ()


def stat(pid: int) -> Stat | None:
    """None where there is no such process, or nobody has taken its exit code yet."""
    # After the name, which may hold spaces: state, parent, group, session, ...; field 22 is the start time.
    fields = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20 or STATES.get(fields[0]) == "gone":
        return None
    return Stat(STATES.get(fields[0], "sleeping"), int(fields[1]), int(fields[3]), int(fields[19]))


def process(pid: int) -> Process | None:
    seen = stat(pid)
    return None if seen is None else Process(pid, seen.began)


def alive(one: Process) -> bool:
    seen = stat(one.pid)
    return seen is not None and seen.began == one.began


def facts(pid: int) -> Facts:
    seen = stat(pid)
    if seen is None:
        return Facts("gone")
    threads = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))[:64]:
            letters = text(f"{task}/stat").rpartition(")")[2].split()
            state = STATES.get(letters[0] if letters else "", "gone")
            threads.append((text(f"{task}/comm").strip(), state, _channel(f"{task}/wchan")))
    return Facts(seen.state, _channel(f"/proc/{pid}/wchan"), text(f"/proc/{pid}/syscall").strip(), tuple(threads))


def _channel(path: str) -> str:
    found = text(path).strip()
    return "" if found == "0" else found


def text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which else would end it."""
    for line in text(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def tree(roots: Iterable[int]) -> list[int]:
    """These processes and all below them, parents first."""
    found = [pid for pid in roots if stat(pid) is not None]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found.extend(int(child) for child in text(f"{task}/children").split())
    return found


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def in_sessions(sessions: Iterable[int]) -> list[int]:
    """What runs in one of these sessions: a child stays in its parent's also when the parent is gone."""
    wanted = set(sessions)
    return [pid for pid in all_pids() if (seen := stat(pid)) is not None and seen.session in wanted]


def with_variable(name: str, value: str) -> list[int]:
    """What was started with this in its environment, or by something that was; wherever it lies in the tree now."""
    wanted = f"{name}={value}".encode()
    return [pid for pid in all_pids() if wanted in environment(pid).split(b"\0") and stat(pid) is not None]


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def end_all(
    find: Callable[[], Iterable[int]],
    *,
    grace_seconds: float,
    limit_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> list[int]:
    """Ask all that `find` gives to end (TERM), and kill what is left after the grace, until nothing is found.

    What is stopped takes no TERM and is killed with the rest. What was found once is waited for until it is gone: one
    that is ending has no environment any more, and maybe no parent, long before that. Gives what was still there after
    the limit: in the kernel for good, a file system that is gone most often.
    """
    began = clock()
    asked: set[int] = set()
    known: set[Process] = set()
    while known := _still(known, find()):
        left = sorted(one.pid for one in known)
        waited = clock() - began
        if waited >= limit_seconds:
            return left
        for pid in left:
            if waited >= grace_seconds:
                _send(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                _send(pid, signal.SIGTERM)
        pause(POLL_SECONDS)
    return []


def _still(known: Iterable[Process], found: Iterable[int]) -> set[Process]:
    """Of what was known and what is found now, all that is not gone."""
    now = (process(pid) for pid in found)
    return {one for one in known if alive(one)} | {one for one in now if one is not None}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
