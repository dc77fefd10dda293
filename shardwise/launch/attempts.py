"""Attempt after attempt until a run is done or is not to be tried again: launch/supervise.py decides, this acts."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from shardwise.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from shardwise.events.live import sentence
from shardwise.events.values import AnyEvent, AttemptEnded
from shardwise.events.writer import EventWriter
from shardwise.inputs.recipe import Restarts
from shardwise.launch import local, run_folder, watch
from shardwise.launch.outcome import Cause, FirstFailure
from shardwise.launch.progress import Progress
from shardwise.launch.supervise import Device, Exit, Restart, Stop, decide

POLL_SECONDS = 0.05
Say = Callable[[str], None]


class Followed(NamedTuple):
    """How a job ended, and what its run told: all events, but of the steps only the first and the last.

    shown: whether the first rank has said the failure on the screen already.
    """

    code: int
    events: tuple[AnyEvent, ...]
    cause: Cause
    failure: FirstFailure | None
    shown: bool
    logs: str


class Follow(Protocol):
    """Starts a job and stands by it to its end; what it shows is the caller's."""

    def __call__(
        self,
        job: local.Job,
        run: Path | None,
        attempt: int,
        *,
        came: list[int],
        progress: Progress | None = None,
        wish: Callable[[], watch.Wish | None] = lambda: None,
    ) -> Followed: ...


class Again(Exception):
    """Raised by what would begin an attempt, where that is not possible: how the run ends instead."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.why)
        self.stop = stop


def exit_of(followed: Followed, attempt: int, progress: Progress, devices: Sequence[int], first: int = 0) -> Exit:
    """What the supervisor needs to know of an attempt. `devices`: of its ranks on this node, from `first` on."""
    failure = followed.failure
    lost = progress.lost
    at = -1 if failure is None else failure.rank - first
    place = devices[at] if 0 <= at < len(devices) else None
    said = failure.text.strip().splitlines() if failure is not None else []
    fix = next((line.partition("fix:")[2].strip() for line in said if line.strip().startswith("fix:")), "")
    step = progress.step if failure is None or failure.step is None else failure.step
    return Exit(
        attempt=attempt, cause=followed.cause, code=followed.code, step=step, committed=progress.committed,
        error=failure.error if failure is not None else "", why=_why(followed), fix=fix, device=place,
        lost_steps=lost.steps, lost_seconds=lost.seconds, gained_seconds=progress.gained_seconds,
    )  # fmt: skip


def _why(followed: Followed) -> str:
    """One line: `lost: rank 1, step 7: its process was ended by SIGKILL`."""
    failure = followed.failure
    if failure is None:
        return followed.cause
    where = f"rank {failure.rank}" + (f", step {failure.step}" if failure.step is not None else "")
    return f"{followed.cause}: {where}: {failure.error or 'no word'}"


def said(ended: Exit, answer: Restart | Stop, begins: int, world: int | None) -> AttemptEnded:
    """The end of an attempt and what follows, as the event that is kept and shown."""
    again = isinstance(answer, Restart)
    return AttemptEnded(
        time=time.time(), attempt=ended.attempt, cause=ended.cause, exit_code=ended.code, step=ended.step,
        committed=ended.committed, error=ended.why, lost_steps=ended.lost_steps, lost_seconds=ended.lost_seconds,
        then=answer.counted if isinstance(answer, Restart) else answer.why, begins=begins if again else None,
        world=world if again else None,
    )  # fmt: skip


Attempt = Callable[[int, list[int], Progress], tuple[Exit, Followed]]
Prepare = Callable[[frozenset[Device]], int | None]


def supervised(
    run: Callable[[], Path | None],
    attempt: Attempt,
    prepare: Prepare,
    budgets: Restarts,
    say: Say,
    idle: Callable[[float], object] = time.sleep,
) -> Followed:
    """Begin attempts until one is the last; its Followed, with the code of the whole.

    run: the run's folder, where it is known by now; attempt: what follows one, given how many were made before and the
    signals that came; prepare: makes ready for another one without these devices, and says how many ranks it has; it
    raises Again where there can be none; say: shows a line; idle: spends so many seconds of a pause. A signal that
    comes between two attempts ends the run with its code.
    """
    history: list[Exit] = []
    progress = Progress()
    with watch.received() as came:
        while True:
            progress.begin()
            ended, followed = attempt(len(history), came, progress)
            history.append(ended)
            answer, world = _answer(history, budgets, came, prepare)
            event = said(ended, answer, ended.attempt + 1, world)
            if isinstance(answer, Restart) or (answer.why and (len(history) > 1 or ended.elsewhere)):
                say(f"{sentence(event)}; its logs: {followed.logs}")
            _keep(run(), event, say)
            if isinstance(answer, Restart) and _paused(answer.pause_seconds, came, idle):
                continue
            return followed._replace(code=answer.code if isinstance(answer, Stop) else told_code(came))


def _answer(
    history: list[Exit], budgets: Restarts, came: list[int], prepare: Prepare
) -> tuple[Restart | Stop, int | None]:
    answer = decide(history, budgets)
    if isinstance(answer, Stop):
        return answer, None
    if came:
        return Stop(told_code(came)), None
    try:
        return answer, prepare(answer.leave_out)
    except Again as no:
        return no.stop, None


def _keep(run: Path | None, event: AttemptEnded, say: Say) -> None:
    """A full disk must not end what could go on: the screen has it anyway."""
    if run is None or not run.is_dir():
        return
    try:
        with EventWriter(run_folder.attempts_path(run)) as writer:
            writer.emit(event)
    except OSError as error:
        say(f"{run_folder.attempts_path(run)} does not hold this: {error}")


def _paused(seconds: float, came: list[int], idle: Callable[[float], object]) -> bool:
    """Wait, unless a signal comes; whether none came."""
    until = time.monotonic() + seconds
    while not came and time.monotonic() < until:
        idle(POLL_SECONDS)
    return not came


def told_code(came: list[int]) -> int:
    """Of a run that was told to stop while no rank was there to save anything."""
    return EXIT_INTERRUPTED if came[0] == signal.SIGINT else EXIT_REQUEUE
