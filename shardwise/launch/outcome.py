"""How it ended: which rank failed first, of what, its cause, and the exit code of the whole. Pure."""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from shardwise.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
)
from shardwise.events.values import AnyEvent, Failed, Stopped

# Deaths that nothing in Python can record; an abort is what a runtime does after an error that was recorded.
NATIVE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
TAIL_LINES = 20

# Why an attempt ended. `lost`: a rank or node is gone, by KILL or without a word; `diverged`: its numbers are no good.
Cause = Literal[
    "done", "preempted", "interrupted", "crash", "hang", "out_of_memory", "bad_input", "diverged", "lost"
]  # fmt: skip
CAUSES_BY_ERROR: dict[str, Cause] = {
    "OutOfMemory": "out_of_memory",
    "OutOfMemoryError": "out_of_memory",
    "MemoryError": "out_of_memory",
    "NonFinite": "diverged",
    "RanksDiverged": "diverged",
    "RankStuck": "hang",
}
_CAUSES_BY_CODE: dict[int, Cause] = {
    EXIT_DONE: "done",
    EXIT_BAD_INPUT: "bad_input",
    EXIT_REQUEUE: "preempted",
    EXIT_INTERRUPTED: "interrupted",
}


class RankExit(msgspec.Struct, frozen=True):
    """How one rank's process ended. A negative code is a signal; `ended_by_launcher`: torchrun sent it."""

    rank: int
    code: int
    pid: int
    ended_by_launcher: bool = False


class RankLog(NamedTuple):
    """What a rank wrote to its standard error, and when it last did."""

    text: str
    modified: float


class FirstFailure(msgspec.Struct, frozen=True):
    """The failure that the others followed from. `expected`: one of Shardwise's own errors, said in full.

    `error`: its kind and first line, as the same error says it again; `signal`: what ended the process from outside.
    """

    rank: int
    text: str
    exit_code: int
    step: int | None = None
    phase: str = ""
    expected: bool = False
    error: str = ""
    signal: int = 0


_ENTRY = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\n\s+exitcode\s+: (-?\d+) \(pid: (\d+)\)")
_CLOSED = re.compile(r"process (\d+) (?:closing signal|via)")


def rank_exits(launcher_log: str) -> tuple[RankExit, ...]:
    """The ranks that torchrun lists as failed, its root cause first."""
    closed = {int(pid) for pid in _CLOSED.findall(launcher_log)}
    before, _, root = launcher_log.rpartition("Root Cause")
    found = _ENTRY.findall(root) + _ENTRY.findall(before)
    return tuple(RankExit(int(rank), int(code), int(pid), int(pid) in closed) for rank, code, pid in found)


def first_failure(
    records: Sequence[Failed],
    exits: Sequence[RankExit],
    logs: Mapping[int, RankLog],
    interrupted: bool = False,
) -> FirstFailure | None:
    """A native death, before what its peers then raised; else the earliest record; else torchrun's cause."""
    own = [one for one in exits if not one.ended_by_launcher]
    native = next((one for one in own if -one.code in NATIVE), None)
    if native is not None:
        return _native(native, records, logs)
    if records:
        return _recorded(min(records, key=lambda failed: failed.time))
    failed = [one for one in own if one.code not in (EXIT_DONE, EXIT_REQUEUE, EXIT_INTERRUPTED)]
    if not failed or interrupted:
        return None
    with_log = [one for one in failed if logs.get(one.rank, RankLog("", 0.0)).text.strip()]
    first = min(with_log, key=lambda one: logs[one.rank].modified) if len(with_log) > 1 else failed[0]
    text = logs.get(first.rank, RankLog("", 0.0)).text
    trace = last_traceback(text)
    return FirstFailure(
        rank=first.rank,
        text=trace or _ended(first.code) + _tail(text),
        exit_code=first.code if first.code == EXIT_BAD_INPUT else EXIT_FAILED,
        error=error_line(trace) if trace else _ended(first.code).partition(";")[0],
        signal=max(0, -first.code),
    )


def came_after_stop(failure: FirstFailure, events: Sequence[AnyEvent]) -> bool:
    """Whether a rank was ended from outside, or by an abort, once the run had stopped as it was told to: by then what
    was trained is committed, and the stop's own code is the answer.
    """
    said = next((event for event in reversed(events) if isinstance(event, Stopped)), None)
    return failure.signal > 0 and said is not None and said.reason == "signal"


def _recorded(failed: Failed) -> FirstFailure:
    last = failed.traceback.rstrip().splitlines()
    expected = any(line.startswith("shardwise.errors.") for line in last[-8:])
    return FirstFailure(
        rank=failed.rank,
        text=failed.error if expected else failed.traceback.rstrip(),
        exit_code=failed.exit_code,
        step=failed.step,
        phase=failed.phase,
        expected=expected,
        error=error_line(failed.traceback),
    )


def _native(death: RankExit, records: Sequence[Failed], logs: Mapping[int, RankLog]) -> FirstFailure:
    step = max((failed.step for failed in records if failed.step is not None), default=None)
    text = _ended(death.code) + _tail(logs.get(death.rank, RankLog("", 0.0)).text)
    return FirstFailure(
        rank=death.rank,
        text=text,
        exit_code=EXIT_FAILED,
        step=step,
        error=_ended(death.code).partition(";")[0],
        signal=-death.code,
    )


def _ended(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    number = -code
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    why = {
        signal.SIGKILL: "; when the host runs out of memory, the kernel sends it",
        signal.SIGSEGV: ", a fault in native code",
    }
    return f"its process was ended by {name}{why.get(signal.Signals(number), '')}"


def _tail(text: str) -> str:
    lines = unprefixed(text).rstrip().splitlines()[-TAIL_LINES:]
    return "\n" + "\n".join(lines) if lines else ""


def unprefixed(text: str) -> str:
    """Without the "[rank3]: " that torch puts before each line of a traceback."""
    return re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)


def last_traceback(text: str) -> str:
    """The last traceback in a log, with those that it was raised from; empty where there is none."""
    lines = unprefixed(text).rstrip().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return ""
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = lines[earlier:start]
        if not any(
            "exception was the direct cause" in line or "another exception occurred" in line for line in between
        ):
            break
        start = earlier
    return "\n".join(lines[start:])


def exit_code(
    returned: int,
    events: Sequence[AnyEvent],
    failure: FirstFailure | None,
    exits: Sequence[RankExit],
    interrupted: int | None,
) -> int:
    """The code of the whole: what the run itself said last, else what the ranks' processes say."""
    if failure is not None:
        return failure.exit_code
    said = next((event for event in reversed(events) if isinstance(event, Stopped)), None)
    if said is not None:
        return said.exit_code
    if returned == EXIT_DONE:
        return EXIT_DONE
    codes = [returned, *(one.code for one in exits)]
    for code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
        if code in codes:
            return code
    if interrupted is not None:
        return EXIT_INTERRUPTED if interrupted == signal.SIGINT else EXIT_REQUEUE
    return EXIT_BAD_INPUT if EXIT_BAD_INPUT in codes else EXIT_FAILED


def error_line(trace: str) -> str:
    """`kind: first line of its message` of a traceback's error, without the kind's module; empty without one."""
    lines = trace.rstrip().splitlines()
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    said = next((line for line in after if line and not line[0].isspace() and line[:9] != "Traceback"), "")
    kind, colon, message = said.partition(":")
    return f"{kind.rpartition('.')[2]}{colon}{message}"


def same_error(error: str) -> str:
    """The error without what differs from one time to the next: numbers, addresses, quoted names of files."""
    return re.sub(r"0x[0-9a-f]+|(?:/[\w.\-]+)+|\d+(?:\.\d+)?", "#", error)[:300]


def cause_of(code: int, failure: FirstFailure | None, *, stuck: bool = False, kernel_kills: int = 0) -> Cause:
    """Why the attempt ended. `stuck`: the watcher ended it; `kernel_kills`: by the kernel for memory, meanwhile."""
    if stuck:
        return "hang"
    if failure is None:
        return _CAUSES_BY_CODE.get(code, "crash")
    if failure.signal == signal.SIGKILL:
        return "out_of_memory" if kernel_kills else "lost"
    by_error = CAUSES_BY_ERROR.get(failure.error.partition(":")[0])
    return by_error or _CAUSES_BY_CODE.get(failure.exit_code, "crash")
