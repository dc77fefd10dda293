"""Saves: begun by all ranks at once, written beside training by a thread, landed at a later step; then retention."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shardwise import ranks
from shardwise.checkpoint import marks
from shardwise.checkpoint.assembly import Header
from shardwise.checkpoint.background import Work
from shardwise.checkpoint.completeness import Completeness, refuse
from shardwise.checkpoint.exchange import Exchange
from shardwise.checkpoint.manifest import Json
from shardwise.checkpoint.retention import Committed, folder_name, retain, step_of
from shardwise.checkpoint.saving import (
    FIRST_BACKOFF_SECONDS,
    LIMIT_SECONDS,
    Lasting,
    NoRoom,
    Outcome,
    Task,
    Trouble,
    failed,
    new_session,
    prepare,
    staged,
)
from shardwise.checkpoint.snapshot import Snapshot, Subject, snapshot
from shardwise.checkpoint.staging import HostBuffer
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.events import Fallback, Resumed, Saved, SaveFailed
from shardwise.inputs.recipe import CheckpointPolicy

Said = Saved | SaveFailed | Resumed | Fallback


@dataclass
class Shared:
    """What saving and loading of one training have in common. say: to the events; buffer: host memory for this rank's
    part; bad: checkpoints that a resume passed over; backoff_seconds: before what failed is tried again, doubled each
    time.
    """

    store: Store
    lineage: str
    policy: CheckpointPolicy
    subject: Subject
    decision: Json
    say: Callable[[Said], None]
    buffer: HostBuffer
    saved_step: int | None = None
    bad: frozenset[str] = frozenset()
    backoff_seconds: float = FIRST_BACKOFF_SECONDS

    def path(self, folder: str) -> str:
        return f"{self.store}/{folder}"


class SavedCheckpoint(NamedTuple):
    """A commit. `bytes` over all ranks; `seconds` until it was durable, of which training stood still for
    `stall_seconds`.
    """

    path: str
    step: int
    bytes: int
    seconds: float
    stall_seconds: float


class Flight(NamedTuple):
    """A save that is under way: its answer is how it ended, and when."""

    step: int
    why: str
    folder: str
    started: float
    stall_seconds: float
    exchange: Exchange
    work: Work[tuple[Outcome, float]]


class Saves:
    """The saves of one training, one under way at a time. plan_digest, plan: what the manifest says of the plan."""

    def __init__(
        self,
        shared: Shared,
        *,
        plan_digest: str = "",
        plan: Json = None,
        completeness: Completeness | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.shared = shared
        self.failures = 0
        self._plan_digest, self._plan = plan_digest, plan
        self._completeness, self._clock = completeness, clock
        self._flight: Flight | None = None
        self._work: Work[tuple[Outcome, float]] | None = None
        self._manifests: dict[str, Committed] = {}
        self._scores: tuple[int, dict[str, float]] = (-1, {})
        self._undeleted: tuple[str, ...] = ()
        self._outcome_read: Exchange | None = None
        self._session, self._saves = "", 0

    def save(self, step: int, why: str = "asked", *, samples: int | None = None) -> SavedCheckpoint:
        """Commits the state after `step`; then drops what the policy no longer keeps.

        Collective. Raises: CheckpointError, on every rank, naming the first that failed; then nothing was
        kept of this checkpoint, and everything of those before.
        """
        self.settle()
        return self._waited_for(step, why, samples)

    def begin(self, step: int, why: str = "policy", *, samples: int | None = None) -> SavedCheckpoint | None:
        """Copies the state after `step` and has it written while training goes on; `settle` tells how it ended.

        Waits for a save that is under way already. With checkpoint.asynchronous = false it waits for the commit, and
        returns it. What fails is an event, and the policy's to judge. Collective. Raises: CheckpointError, on every
        rank, for state that cannot be kept, and as `settle`.
        """
        self.settle()
        try:
            self._flight = self._start(step, why, samples, stage=self.shared.policy.asynchronous)
        except NoRoom as error:
            self._failed(step, why, error)
            self._judge(error)
            return None
        return None if self.shared.policy.asynchronous else self.settle()

    def finish(self, step: int, why: str, *, samples: int | None = None) -> SavedCheckpoint | None:
        """The state after `step` is committed when this returns: by the save under way, or else by another; None where
        it was before. Collective. Raises: CheckpointError as `save`.
        """
        saved = self.settle()
        return saved if self.shared.saved_step == step else self._waited_for(step, why, samples)

    def rest(self) -> None:
        """Waits until what the policy no longer keeps is deleted, which goes on after a commit, and tells what did not
        go. No collective.
        """
        if self._work is not None:
            self._work.end()
        notes, self._undeleted = self._undeleted, ()
        for note in notes:
            self.shared.say(Fallback(what="old checkpoints were not all deleted", why=note))

    @property
    def under_way(self) -> bool:
        """Whether a save was begun that nobody has settled; the same on every rank."""
        return self._flight is not None

    @property
    def pending(self) -> bool:
        """Whether a save is under way whose end this rank does not know yet."""
        return self._flight is not None and not self._flight.work.done

    def settle(self) -> SavedCheckpoint | None:
        """Waits for the save that is under way, if any, and tells what came of it; None where nothing was committed.

        To be called by all ranks at the same step. Raises: CheckpointError, on every rank, for a failure that no other
        try would mend, and for the last of policy.abort_after failures in a row.
        """
        if self._flight is None:
            return None
        landed = self._land(self._flight)
        if isinstance(landed, CheckpointError):
            self._judge(landed)
            return None
        return landed

    def _waited_for(self, step: int, why: str, samples: int | None) -> SavedCheckpoint:
        """Collective. Raises: CheckpointError."""
        try:
            landed = self._land(self._start(step, why, samples, stage=False))
        except NoRoom as error:
            self._failed(step, why, error)
            raise
        if isinstance(landed, CheckpointError):
            raise landed
        self.rest()
        return landed

    def _start(self, step: int, why: str, samples: int | None, *, stage: bool) -> Flight:
        """Collective. Raises: CheckpointError, NoRoom."""
        started, shared = self._clock(), self.shared
        self.rest()
        self._session = self._session or new_session()
        folder = folder_name(step, shared.lineage, self._session, self._saves)
        self._saves += 1
        header = Header(step, started, why, shared.lineage, self._plan_digest, shared.decision, samples, self._plan)
        prepared = prepare(shared.store, step, self._taken)
        if prepared.low:
            shared.say(Fallback(what="little room is left for checkpoints", why=prepared.low))
        if self._outcome_read is not None and ranks.is_main():
            self._outcome_read.forget()  # Every rank has settled that save before it came here.
        exchange = Exchange(folder, LIMIT_SECONDS)
        task = Task(shared.store, folder, header, prepared, exchange, shared.policy.retries, shared.backoff_seconds)
        if stage:
            staged(task, shared.buffer)
        self._work = work = Work(partial(self._carry_out, task), partial(self._after, task), f"shardwise-save-{step}")
        return Flight(step, why, folder, started, self._clock() - started, exchange, work)

    def _taken(self) -> Snapshot:
        """What is to be kept. Raises: CheckpointError at the first save where that is not all; later it is told."""
        found = [] if self._completeness is None else self._completeness.found()
        if self._saves == 1:
            refuse((one.path, one.kind) for one in found)
        for one in found:
            why = f"{one.path} is a {one.kind} that changes, and nothing registers it"
            self.shared.say(Fallback(what="a checkpoint does not hold all of the state", why=why))
        return snapshot(self.shared.subject)

    def _carry_out(self, task: Task, given_up: threading.Event) -> tuple[Outcome, float]:
        """In the save's thread."""
        outcome = task.carry_out(given_up)
        return outcome, self._clock()

    def _after(self, task: Task, answer: tuple[Outcome, float]) -> None:
        """In the save's thread, when its end is known: on rank 0 drops what the policy no longer keeps."""
        if answer[0].trouble is None and task.exchange.rank == 0:
            self._retain(task.folder)

    def _land(self, flight: Flight) -> SavedCheckpoint | CheckpointError:
        """Waits for a save: what it committed, or the error that it ended with. Tells either, and what there was."""
        waited, self._flight, self._outcome_read = self._clock(), None, flight.exchange
        answer = flight.work.answer()
        if answer is None:  # In a fork, or where the thread died: nobody can say.
            trouble = Trouble(ranks.rank(), "its thread is gone.", "", "save again", lasting=False)
            answer = Outcome(trouble=trouble), waited
        outcome, ended = answer
        landed: SavedCheckpoint | CheckpointError
        if outcome.trouble is not None:
            landed = failed(flight.step, outcome.trouble)
            self._failed(flight.step, flight.why, landed)
        else:
            landed = self._committed(flight, outcome, ended, self._clock() - waited)
        for note in outcome.notes:
            self.shared.say(Fallback(what=f"the save of step {flight.step} did not go smoothly", why=note))
        return landed

    def _committed(self, flight: Flight, outcome: Outcome, ended: float, waited: float) -> SavedCheckpoint:
        self.failures, self.shared.saved_step = 0, flight.step
        stall = flight.stall_seconds + waited
        path, seconds = self.shared.path(flight.folder), ended - flight.started
        saved = SavedCheckpoint(path, flight.step, outcome.bytes, seconds, stall)
        self.shared.say(
            Saved(
                step=saved.step, path=saved.path, bytes=saved.bytes, seconds=saved.seconds, why=flight.why,
                stall_seconds=saved.stall_seconds, host_bytes=self.shared.buffer.bytes,
            )
        )  # fmt: skip
        return saved

    def _failed(self, step: int, why: str, error: CheckpointError) -> None:
        self.failures += 1
        self.shared.say(SaveFailed(step=step, why=why, error=str(error), in_a_row=self.failures))

    def _judge(self, error: CheckpointError) -> None:
        """Raises: CheckpointError where the policy says that training must not go on."""
        if isinstance(error, Lasting):
            raise error
        if self.shared.policy.abort_after and self.failures >= self.shared.policy.abort_after:
            raise CheckpointError(
                f"{self.failures} saves in a row failed. The last: {error.what}", why=error.why, fix=error.fix
            ) from error

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """What the weights after `step` gave on held-out data, for checkpoint.best: said before that step is saved."""
        self._scores = (step, dict(values))

    def _score(self, current: str) -> None:
        step, values = self._scores
        if not self.shared.policy.best or step != step_of(current):
            return
        try:
            marks.evaluated(self.shared.store, current, values)
        except Exception as error:
            self._undeleted += (f"{current} cannot be among the best: {type(error).__name__}: {error}",)

    def _retain(self, current: str) -> None:
        """No failure here fails the run."""
        self._score(current)
        shared = self.shared
        done = retain(
            shared.store, shared.lineage, shared.policy, current, session=self._session, bad=shared.bad,
            known=self._manifests,
        )  # fmt: skip
        self._undeleted += done.notes
