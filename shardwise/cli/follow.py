"""Start a job and stand by it to its end: one attempt, as `train` and `run` share it."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REQUEUE
from shardwise.events.live import LiveLine
from shardwise.events.reader import Tail
from shardwise.events.values import AnyEvent, Compared, Step
from shardwise.launch import hang, local, run_folder, watch
from shardwise.launch.attempts import Followed
from shardwise.launch.outcome import came_after_stop, cause_of, exit_code, first_failure
from shardwise.launch.progress import Progress
from shardwise.launch.stopped import Stopped
from shardwise.report import errors

SHOWN_BYTES = 65536
# The codes of ranks that ended by themselves: what they left is meant to outlive them, as an upload's service is.
IN_ORDER = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tell(followed: Followed) -> None:
    """Say which rank failed first, and of what."""
    if followed.failure is not None and not followed.shown:
        say(errors.failure(followed.failure, followed.logs))


class Screen:
    """Passes a job's output and events on to the terminal."""

    def __init__(
        self, output: watch.Output, tail: Tail | None, quiet_stdout: bool, progress: Progress | None = None
    ) -> None:
        self.output, self.tail, self.live = output, tail, LiveLine()
        self.stdout = sys.stderr if quiet_stdout else sys.stdout
        self.events: list[AnyEvent] = []
        self.progress = progress or Progress()
        self.shown = ""

    def tick(self) -> None:
        # Read before the events and shown after them: an error stands below the steps that it ended.
        pieces = self.output.new()
        for event in self.tail.new() if self.tail is not None else ():
            self.progress.take(event)
            self.remember(event)
            if not isinstance(event, Compared):  # it stands in the summary
                self.live.emit(event)
        for stream, text in pieces:
            self.show(text, self.stdout if stream == "stdout" else sys.stderr)

    def show(self, text: str, stream: object) -> None:
        self.shown = (self.shown + text)[-SHOWN_BYTES:]
        if stream is sys.stderr:
            self.live.above(text)
        else:
            self.stdout.write(text)
            self.stdout.flush()

    def remember(self, event: AnyEvent) -> None:
        """Of many steps the first and the last are enough."""
        both = len(self.events) > 1 and all(isinstance(one, Step) for one in (event, *self.events[-2:]))
        self.events[-1 if both else len(self.events) :] = [event]


def follow(
    job: local.Job,
    run: Path | None,
    attempt: int,
    *,
    came: list[int] | None = None,
    progress: Progress | None = None,
    quiet_stdout: bool = False,
    wish: Callable[[], watch.Wish | None] = lambda: None,
) -> Followed:
    """Start the job, show its first rank's output and its events, and find which rank failed first.

    `run` is the run's folder where it is known before the ranks start; `came`: signals that the caller notes; `wish`:
    asked about as often as the ranks are looked at. The events are the first rank's: another node does not show them.
    """
    logs = Path(job.logs)
    tail = Tail(run_folder.events_path(run, attempt)) if run is not None and job.first_rank == 0 else None
    since, kills = time.time(), local.kernel_kills()
    process = local.start(job)
    screen = Screen(watch.Output(logs), tail, quiet_stdout, progress)
    stopped = Stopped(job, process.pid)
    ended = _watched(process, screen.tick, came, lambda: wish() or ("end" if stopped.found() else None))
    if ended.killed or ended.returned not in IN_ORDER:
        watch.end_left(job)
    exits = watch.exits(logs, job.world, ended, process.pid)
    run = run or run_folder.told(job.tells)
    records = run_folder.failures(run, since) if run is not None else []
    failure = None
    stuck = hang.found(logs)
    if stuck is not None:
        failure = hang.failure(stuck)
    elif ended.returned:
        failure = first_failure(records, exits, watch.rank_logs(logs, job.first_rank), ended.interrupted is not None)
        if failure is not None and came_after_stop(failure, screen.events):
            screen.show(
                f"rank {failure.rank}, after the run had stopped: {failure.error}; nothing is lost\n", sys.stderr
            )
            failure = None
    code = exit_code(ended.returned, screen.events, failure, exits, ended.interrupted)
    held = screen.output.held()
    if failure is None and code in (EXIT_DONE, EXIT_FAILED):
        screen.show(held, sys.stderr)
    screen.live.close()
    shown = failure is not None and (failure.rank == 0 or stuck is not None) and _was_shown(failure.text, screen.shown)
    code = EXIT_INTERRUPTED if ended.killed else code
    cause = cause_of(code, failure, stuck=stuck is not None, kernel_kills=local.kernel_kills() - kills)
    return Followed(code, tuple(screen.events), cause, failure, shown, job.logs)


def _watched(
    process: "subprocess.Popen[bytes]",
    tick: Callable[[], None],
    came: list[int] | None,
    wish: Callable[[], watch.Wish | None],
) -> watch.Ended:
    """No rank outlives this function, whatever is raised while it looks on."""
    try:
        return watch.watch(process, tick, came=came, wish=wish)
    except BaseException:
        watch.end_tree(process)
        raise


def _was_shown(text: str, shown: str) -> bool:
    """Whether the first rank has already said this on the screen."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return bool(first) and not first.startswith("Traceback") and first in shown
