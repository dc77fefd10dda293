"""Attempt after attempt: which follow, what a signal between two of them does, and what is kept of each."""

import os
import signal
from pathlib import Path

import pytest

from shardwise.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
from shardwise.events.reader import read
from shardwise.events.values import AttemptEnded, RolledBack, RunStarted, Saved, Step
from shardwise.inputs.recipe import Restarts
from shardwise.launch.attempts import Again, Followed, supervised
from shardwise.launch.progress import Progress
from shardwise.launch.run_folder import attempts_path
from shardwise.launch.supervise import Device, Exit, Stop


class Script:
    """What a job could have done, attempt by attempt."""

    def __init__(self, folder: Path, *exits: Exit, sends: int = 0) -> None:
        self.folder, self.exits, self.sends = folder, exits, sends
        self.left_out: list[frozenset[Device]] = []
        self.begun = 0

    def attempt(self, before: int, came: list[int], progress: Progress) -> tuple[Exit, Followed]:
        assert before == self.begun
        ended = self.exits[self.begun]
        self.begun += 1
        if self.sends:
            os.kill(os.getpid(), self.sends)
        return ended, Followed(ended.code, (), ended.cause, None, False, "logs")

    def prepare(self, leave_out: frozenset[Device]) -> int:
        self.left_out.append(leave_out)
        return 2

    def supervised(self, budgets: Restarts = Restarts()) -> int:  # noqa: B008 (a frozen value)
        return supervised(lambda: self.folder, self.attempt, self.prepare, budgets, print).code


def crash(attempt: int) -> Exit:
    return Exit(attempt, "lost", 1, step=attempt, device=1)


def done(attempt: int) -> Exit:
    return Exit(attempt, "done", 0)


def test_attempts_go_on_until_one_is_done_and_each_is_kept(tmp_path: Path) -> None:
    script = Script(tmp_path, crash(1), done(2))
    assert script.supervised() == 0 and script.begun == 2
    kept = [event for event in read(attempts_path(tmp_path)) if isinstance(event, AttemptEnded)]
    assert [(one.attempt, one.cause, one.begins) for one in kept] == [(1, "lost", 2), (2, "done", None)]


def test_a_device_that_failed_twice_is_left_out_of_the_next_attempt(tmp_path: Path) -> None:
    script = Script(tmp_path, crash(1), crash(2), done(3))
    assert script.supervised(Restarts(crashes=2)) == 0
    assert script.left_out == [frozenset(), frozenset({Device("", 1)})]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, EXIT_REQUEUE), (signal.SIGINT, EXIT_INTERRUPTED)])
def test_a_signal_as_an_attempt_ends_begins_no_other(tmp_path: Path, sent: int, code: int) -> None:
    before = signal.getsignal(sent)
    script = Script(tmp_path, crash(1), sends=sent)
    assert script.supervised() == code and script.begun == 1
    assert signal.getsignal(sent) is before


def test_no_attempt_begins_where_none_can(tmp_path: Path) -> None:
    script = Script(tmp_path, crash(1))

    def none(leave_out: frozenset[Device]) -> int:
        raise Again(Stop(EXIT_REQUEUE, "1 device is left"))

    assert supervised(lambda: tmp_path, script.attempt, none, Restarts(), print).code == EXIT_REQUEUE


def started(step: int) -> RunStarted:
    return RunStarted(run="run", attempt=1, world=2, pids=(1, 2), device="cpu", plan="", step=step)


def step(number: int, seconds: float = 1.0) -> Step:
    return Step(
        step=number, steps=9, loss=1.0, grad_norm=1.0, lr=1.0, samples=1, tokens=None, step_seconds=seconds
    )  # fmt: skip


def saved(number: int) -> Saved:
    return Saved(step=number, path="", bytes=1, seconds=1.0, why="policy")


def test_every_trained_second_is_either_lost_or_gained_or_was_gained_before() -> None:
    progress = Progress()
    progress.begin()
    for event in (started(0), step(1), step(2), saved(2), step(3, 0.5)):
        progress.take(event)
    assert (progress.lost, progress.gained_seconds, progress.committed) == ((1, 0.5), 2.0, 2)
    progress.begin()
    for event in (started(2), step(3), step(4), saved(4)):
        progress.take(event)
    # Step 3 was reached before: only step 4 is progress.
    assert (progress.lost, progress.gained_seconds, progress.committed, progress.step) == ((0, 0.0), 1.0, 4, 4)


def test_what_is_rolled_back_is_not_lost_again_by_an_end() -> None:
    progress = Progress()
    progress.begin()
    for event in (started(0), step(1), saved(1), step(2), step(3), RolledBack(step=1, from_step=3, path="", why="")):
        progress.take(event)
    assert progress.lost == (0, 0.0) and progress.committed == 1
