"""A node that takes part in a run and does not hold its meeting: it starts the ranks that it is told to, and says how
they ended.
"""

import socket
import time
from collections import deque
from pathlib import Path

from shardwise.errors import EXIT_REQUEUE, RecipeError
from shardwise.launch import nodes, run_folder, watch
from shardwise.launch.address import Address, written
from shardwise.launch.attempts import Say, exit_of, told_code
from shardwise.launch.meeting import BEAT_SECONDS, JOIN_SECONDS, Begin, EndAttempt, Ended, Leave, Over, Refused
from shardwise.launch.progress import Progress
from shardwise.launch.task import Task
from shardwise.plan.plan import Plan


def take_part(task: Task, address: Address) -> int:
    """Join the meeting there, and do this node's part until the run is over or the host is gone; the exit code."""
    with watch.received() as came:
        connection = _reach(address, came, task.say)
        if connection is None:
            return told_code(came) if came else EXIT_REQUEUE
        return Participant(task, connection, came).run()


def _reach(address: Address, came: list[int], say: Say) -> socket.socket | None:
    """A connection to the host, which may start later than this node; None where it never came, or a signal did."""
    began, why = time.monotonic(), ""
    while not came and time.monotonic() - began < JOIN_SECONDS:
        try:
            return socket.create_connection(address, timeout=2 * BEAT_SECONDS)
        except OSError as error:
            if not why:
                say(f"waiting for the host at {written(address)} ({error.strerror or error})")
            why = error.strerror or str(error)
        time.sleep(BEAT_SECONDS / 2)
    if not came:
        say(f"no host at {written(address)} within {JOIN_SECONDS:.0f} s: {why}")
    return None


class Participant:
    """A node that takes part in a meeting. came: the signals that were sent to it."""

    def __init__(self, task: Task, connection: socket.socket, came: list[int]) -> None:
        self.task, self.came = task, came
        self.here = str(connection.getsockname()[0])
        folder, lost = task.recipe.run, task.recipe.train.lost_seconds
        self.guest = nodes.Guest(connection, task.join(), lambda: nodes.read_secret(folder), lost)
        self.heard: deque[Begin | EndAttempt] = deque()
        self.over: Over | None = None

    def run(self) -> int:
        """Raises: RecipeError where the host refuses this node."""
        name, began, said = self.task.several.name, time.monotonic(), False
        try:
            while self.over is None and not self.came:
                self._listen(BEAT_SECONDS / 2)
                if self.guest.joined and not said:
                    said = True
                    self.task.say(f"node {name} takes part")
                if not self.guest.challenged and time.monotonic() - began >= JOIN_SECONDS:
                    self.over = Over(EXIT_REQUEUE, f"the host said nothing for {JOIN_SECONDS:.0f} s")
                while self.heard and self.over is None:
                    one = self.heard.popleft()
                    if isinstance(one, Begin):
                        self._attempt(one)
            if self.over is None:
                self.guest.tell(Leave())
                return told_code(self.came)
            self.task.say(f"node {name} ends: {self.over.why or 'the run is over'}")
            return self.over.code
        finally:
            self.guest.close()

    def _listen(self, seconds: float) -> None:
        for one in self.guest.turn(seconds):
            if isinstance(one, Refused):
                raise RecipeError(one.what, why=one.why, fix=one.fix)
            if isinstance(one, Over):
                self.over = one
            if isinstance(one, Begin | EndAttempt):
                self.heard.append(one)

    def _wish(self, attempt: int) -> watch.Wish | None:
        self._listen(0.0)
        told = any(isinstance(one, EndAttempt) and one.attempt == attempt for one in self.heard)
        return "end" if told or self.over is not None else None

    def _attempt(self, part: Begin) -> None:
        recipe, name = self.task.recipe, self.task.several.name
        last = part.first_rank + part.ranks - 1
        self.task.say(f"attempt {part.attempt}: ranks {part.first_rank} to {last} of {part.world}")
        logs = run_folder.new_logs_folder(Path(recipe.run) / "logs", f"attempt-{part.attempt:03d}-{name}")
        job = self.task.part(part, Plan.from_json(bytes(part.plan)), self.here, logs)
        followed = self.task.follow(
            job, Path(recipe.run), part.attempt, came=self.came, wish=lambda: self._wish(part.attempt)
        )
        if self.over is None:
            ended = exit_of(followed, part.attempt, Progress(), self.task.places(part), part.first_rank)
            self.guest.tell(Ended(ended, told=bool(self.came)))
