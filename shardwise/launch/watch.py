"""Stand by while ranks run: pass their output on, forward signals, and see how they end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from shardwise.environment import JOB_LOGS
from shardwise.launch import local, processes
from shardwise.launch.outcome import RankExit, RankLog, rank_exits

POLL_SECONDS = 0.05
# USR1: what SLURM sends ahead of a job's end (--signal=USR1@120).
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Within this what was killed is gone, unless it waits in the kernel.
KILLED_SECONDS = 30.0
# A traceback is held back this long: if the job ends meanwhile, the first failing rank's is shown instead.
HOLD_SECONDS = 20.0


# What another node's news ask of this one's ranks: to save and stop, or to end at once.
Wish = Literal["save", "end"]


class Ended(NamedTuple):
    """How a job ended: the launcher's code, and the first signal that was forwarded."""

    returned: int
    interrupted: int | None
    killed: bool


def watch(
    process: "subprocess.Popen[bytes]",
    tick: Callable[[], None],
    *,
    came: list[int] | None = None,
    wish: Callable[[], Wish | None] = lambda: None,
    pause: Callable[[float], None] = time.sleep,
) -> Ended:
    """Call `tick` until the job has ended. The first signal goes to the ranks; a second Ctrl-C ends all.

    A hang-up after a TERM, as when a session is closed, is no second wish: the ranks are saving already. `came`: the
    list of a `received` that the caller is in, with what came before. `wish`: what else is wanted of the ranks.
    """
    with received(came) as signals:
        forwarded = False
        while process.poll() is None:
            if signals.count(signal.SIGINT) > 1:
                end_tree(process)
                break
            if signals and not forwarded:
                _forward(process.pid, signals[0])
                forwarded = True
            wanted = wish()
            if wanted == "end":
                end_tree(process)
                break
            if wanted == "save" and not forwarded:
                _forward(process.pid, signal.SIGTERM)
                forwarded = True
            tick()
            pause(POLL_SECONDS)
        process.wait()
        tick()
        killed = signals.count(signal.SIGINT) > 1
        return Ended(process.returncode, signals[0] if signals else None, killed)


@contextlib.contextmanager
def received(outer: list[int] | None = None) -> Iterator[list[int]]:
    """The signals that came, in order, instead of what they would do; `outer`, where somebody notes them already."""
    if outer is not None:
        yield outer
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in FORWARDED}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward(launcher: int, number: int) -> None:
    """To the ranks, not to torchrun, which would end them before they have saved. A hang-up, a USR1 are a TERM."""
    sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    for pid in local.worker_pids(launcher):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)


def end_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill the launcher and everything below it at once, and wait until they are gone; say what not even that ended."""
    left = processes.end_all(
        lambda: local.tree_pids(process.pid) if process.returncode is None else (),
        grace_seconds=0.0,
        limit_seconds=KILLED_SECONDS,
    )
    if left:
        told = ", ".join(f"{pid} ({processes.facts(pid).state})" for pid in left)
        what = f"shardwise: not even KILL ended these processes within {KILLED_SECONDS:g} s: {told}"
        why = "they wait in the kernel, most often for a file system that is gone"
        print(f"{what}\n  why: {why}\n  fix: bring it back, or start the machine anew", file=sys.stderr, flush=True)


def end_left(job: local.Job, *, grace_seconds: float = 5.0, limit_seconds: float = 30.0) -> list[int]:
    """After the end: end what the ranks left behind, whoever its parent is now; what not even a KILL ended.

    The watcher beside the ranks does the same and is given the time for it.
    """
    mark = (JOB_LOGS, local.mark_of(job))
    return processes.end_all(
        lambda: set(processes.with_variable(*mark)) - {os.getpid()},
        grace_seconds=grace_seconds, limit_seconds=limit_seconds,
    )  # fmt: skip


def rank_folders(logs: Path, first: int = 0) -> dict[int, Path]:
    """Where each rank's stdout.log and stderr.log lie below a job's logs, which torchrun names by local rank.

    first: the node's first rank.
    """
    return {first + int(path.name): path for path in logs.glob("*/attempt_0/*") if path.name.isdigit()}


def rank_logs(logs: Path, first: int = 0) -> dict[int, RankLog]:
    """What each rank of the node wrote to its standard error; the last 64 KiB."""
    found = {}
    for rank, folder in rank_folders(logs, first).items():
        path = folder / "stderr.log"
        if path.exists():
            text = path.read_bytes()[-65536:].decode(errors="replace")
            found[rank] = RankLog(text, path.stat().st_mtime)
    return found


def exits(logs: Path, world: int, ended: Ended, pid: int) -> tuple[RankExit, ...]:
    """How the ranks' processes ended, as far as torchrun says, which starts all but a lone one. Ranks are global."""
    if world == 1:
        return (RankExit(0, ended.returned, pid),) if ended.returned else ()
    path = logs / "launcher.log"
    return rank_exits(path.read_text(errors="replace")) if path.exists() else ()


class Output:
    """The first rank's output as it grows. It never sleeps: the caller decides when to look again."""

    def __init__(self, logs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._offsets = {"stdout.log": 0, "stderr.log": 0}
        self._folder: Path | None = None
        self._hold = Hold()

    def new(self) -> list[tuple[str, str]]:
        """("stdout" or "stderr", text) pieces since the last call."""
        if self._folder is None:
            self._folder = rank_folders(self._logs).get(0)
        if self._folder is None:
            return []
        pieces = []
        for name in self._offsets:
            text = self._read(self._folder / name)
            if name == "stderr.log":
                text = self._hold.feed(text, self._clock())
            if text:
                pieces.append((name.removesuffix(".log"), text))
        return pieces

    def held(self) -> str:
        """The tracebacks that are still held back."""
        return self._hold.take()

    def _read(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[path.name])
                raw = file.read()
        except FileNotFoundError:
            return ""
        # A character that is cut at the end comes whole with the next piece.
        whole = len(raw) - _cut_bytes(raw)
        self._offsets[path.name] += whole
        return raw[:whole].decode(errors="replace")


def _cut_bytes(raw: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that is not complete."""
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
        if byte < 0x80:
            return 0
    return 0


_TRACEBACK = re.compile(r"^(?:\[rank\d+\]: )?Traceback \(most recent call last\)")
_CHAINED = ("The above exception was", "During handling of the above")


class Hold:
    """Lets lines through, but keeps a traceback back until it is old: then it was not the end of the job."""

    def __init__(self) -> None:
        self._kept = ""
        self._since = 0.0
        self._inside = False
        self._partial = ""

    def feed(self, text: str, now: float) -> str:
        """The text that may be shown now."""
        released = ""
        if self._kept and now - self._since > HOLD_SECONDS:
            released, self._kept, self._inside = self._kept, "", False
        lines = (self._partial + text).splitlines(keepends=True)
        self._partial = ""
        if lines and not lines[-1].endswith(("\n", "\r")) and (self._inside or _may_begin(lines[-1])):
            self._partial = lines.pop()
        for line in lines:
            if _TRACEBACK.match(line):
                self._inside = True
                self._since = self._since if self._kept else now
            if self._inside:
                self._kept += line
            else:
                released += line
        return released

    def take(self) -> str:
        kept, self._kept, self._partial, self._inside = self._kept + self._partial, "", "", False
        return kept


def _may_begin(line: str) -> bool:
    """Whether the beginning of a line could become that of a traceback."""
    return "Traceback (most recent call last)".startswith(line[:33]) or "[rank".startswith(line[:5])
