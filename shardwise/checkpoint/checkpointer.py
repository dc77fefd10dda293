"""The Checkpointer: save, resume, and stop in an orderly way, in a loop of your own or in the Trainer's."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from torch import nn

from shardwise import ranks
from shardwise.checkpoint import marks
from shardwise.checkpoint.arrival import check_arrival
from shardwise.checkpoint.assembly import Header, machine
from shardwise.checkpoint.background import Work
from shardwise.checkpoint.completeness import Completeness, refuse
from shardwise.checkpoint.exchange import Exchange
from shardwise.checkpoint.interval import MOST_STEPS
from shardwise.checkpoint.manifest import Damaged, Json, Manifest, digest_of, read_manifest
from shardwise.checkpoint.restore import Names, Staged, apply, check_world, entries_of, names_of, stage
from shardwise.checkpoint.retention import Committed, folder_name, look, retain, step_of
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
    trouble_of,
)
from shardwise.checkpoint.snapshot import Snapshot, Stateful, Subject, by_name, join, pack_state, snapshot
from shardwise.checkpoint.staging import HostBuffer
from shardwise.checkpoint.store import LocalStore, Store
from shardwise.checkpoint.switch import Here, told
from shardwise.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, CheckpointError, RecipeError
from shardwise.events import Events, Fallback, Resumed, Saved, SaveFailed
from shardwise.inputs.recipe import CheckpointPolicy
from shardwise.names import aliases_of, holders_of

Result = TypeVar("Result")


class StopRequest(Protocol):
    """Tells whether this process was asked to stop: `shardwise.resilience.signals.StopSignals`."""

    @property
    def received(self) -> int | None: ...


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


class Skipped(NamedTuple):
    """A checkpoint that resume passed over, and why."""

    folder: str
    why: str


class Checkpointer:
    """Keeps weights, optimizer, `state=`, data position and random generators of a run, committed or absent.

    `module` and `optimizer` are single objects or dicts by name; sharded (fully_shard), replicated,
    wrapped in DDP, compiled or plain. `data` tells its position as JSON; a scheduler, a scaler or an
    average of the weights goes into `state`, as objects with state_dict and load_state_dict, or directly
    as tensors and JSON values. `aliases`: where a tied weight lies on several ranks under several names, as
    in a pipeline, each such name that this rank holds and the first one, under which another rank keeps it
    (with several modules `<module>/<name>`); left out, they are those of what sw.parallelize has cut.
    `run` is the run's folder: checkpoints lie in `checkpoints/` below it, unless a `store` is given.
    `lineage` tells runs in one store apart: only checkpoints of the same lineage are resumed from, or ever
    deleted. `plan`, and its `decision`, as JSON: what the manifest says of how the work was split.
    `completeness` looks for state that is not kept.
    `holders`: where a model's parts lie on different ranks (a pipeline of your own), the ranks that hold the same part
    as this one; left out, those that sw.parallelize chose, else all.

    `begin` copies this rank's part into host memory, kept from save to save, and a thread writes it while training goes
    on; `save` waits for the commit, and takes host memory for one tensor at a time. Resuming takes this rank's shards
    once, in the same memory.

    Example:
        with StopSignals() as signals:
            checkpointer = Checkpointer("runs/mine", model, optimizer, signals=signals)
            for step in range(checkpointer.resume() + 1, 1001):
                train(step)
                checkpointer.step(step)
    """

    def __init__(
        self,
        run: str | Path,
        module: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        *,
        data: Stateful | None = None,
        state: MutableMapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        holders: Sequence[int] | None = None,
        policy: CheckpointPolicy | None = None,
        signals: StopRequest | None = None,
        events: Events | None = None,
        store: Store | None = None,
        lineage: str = "",
        plan_digest: str = "",
        decision: Json = None,
        plan: Json = None,
        completeness: Completeness | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises: RecipeError naming a key of `state` that is neither tensors nor JSON values."""
        self.state: MutableMapping[str, Any] = {} if state is None else state
        self.policy = policy or CheckpointPolicy()
        self.store = store or LocalStore(Path(run) / "checkpoints")
        self.skipped: tuple[Skipped, ...] = ()
        self.saved_step: int | None = None
        self.resumed_from: str | None = None
        modules = by_name(module, nn.Module)
        self._subject = Subject(
            modules,
            by_name(optimizer, torch.optim.Optimizer),
            data,
            self.state,
            f"rank-{ranks.rank():05d}",
            _known_aliases(modules) if aliases is None else aliases,
            ranks.world(),
            _known_holders(modules) if holders is None else dict.fromkeys(modules, tuple(sorted(holders))),
        )
        self.failures = 0
        self.backoff_seconds = FIRST_BACKOFF_SECONDS
        self._buffer = HostBuffer()
        self._flight: Flight | None = None
        self._work: Work[tuple[Outcome, float]] | None = None
        self._manifests: dict[str, Committed] = {}
        self._scores: tuple[int, dict[str, float]] = (-1, {})
        self._undeleted: tuple[str, ...] = ()
        self._outcome_read: Exchange | None = None
        self._signals = signals
        self._events = events
        self._lineage, self._plan_digest, self._decision, self._plan = lineage, plan_digest, decision, plan
        self._clock = clock
        self._completeness = completeness
        self._session, self._saves = "", 0
        _check_state(self.state)

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
            self._flight = self._start(step, why, samples, stage=self.policy.asynchronous)
        except NoRoom as error:
            self._failed(step, why, error)
            self._judge(error)
            return None
        return None if self.policy.asynchronous else self.settle()

    def finish(self, step: int, why: str, *, samples: int | None = None) -> SavedCheckpoint | None:
        """The state after `step` is committed when this returns: by the save under way, or else by another; None where
        it was before. Collective. Raises: CheckpointError as `save`.
        """
        saved = self.settle()
        return saved if self.saved_step == step else self._waited_for(step, why, samples)

    def rest(self) -> None:
        """Waits until what the policy no longer keeps is deleted, which goes on after a commit, and tells what did not
        go. No collective.
        """
        if self._work is not None:
            self._work.end()
        notes, self._undeleted = self._undeleted, ()
        for note in notes:
            self._say(Fallback(what="old checkpoints were not all deleted", why=note))

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
        started = self._clock()
        self.rest()
        self._session = self._session or new_session()
        folder = folder_name(step, self._lineage, self._session, self._saves)
        self._saves += 1
        header = Header(step, started, why, self._lineage, self._plan_digest, self._decision, samples, self._plan)
        prepared = prepare(self.store, step, self._taken)
        if prepared.low:
            self._say(Fallback(what="little room is left for checkpoints", why=prepared.low))
        if self._outcome_read is not None and ranks.is_main():
            self._outcome_read.forget()  # Every rank has settled that save before it came here.
        exchange = Exchange(folder, LIMIT_SECONDS)
        task = Task(self.store, folder, header, prepared, exchange, self.policy.retries, self.backoff_seconds)
        if stage:
            staged(task, self._buffer)
        self._work = work = Work(partial(self._carry_out, task), partial(self._after, task), f"shardwise-save-{step}")
        return Flight(step, why, folder, started, self._clock() - started, exchange, work)

    def _taken(self) -> Snapshot:
        """What is to be kept. Raises: CheckpointError at the first save where that is not all; later it is told."""
        found = [] if self._completeness is None else self._completeness.found()
        if self._saves == 1:
            refuse((one.path, one.kind) for one in found)
        for one in found:
            why = f"{one.path} is a {one.kind} that changes, and nothing registers it"
            self._say(Fallback(what="a checkpoint does not hold all of the state", why=why))
        return snapshot(self._subject)

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
            self._say(Fallback(what=f"the save of step {flight.step} did not go smoothly", why=note))
        return landed

    def _committed(self, flight: Flight, outcome: Outcome, ended: float, waited: float) -> SavedCheckpoint:
        self.failures, self.saved_step = 0, flight.step
        stall = flight.stall_seconds + waited
        saved = SavedCheckpoint(self._path(flight.folder), flight.step, outcome.bytes, ended - flight.started, stall)
        self._say(
            Saved(
                step=saved.step, path=saved.path, bytes=saved.bytes, seconds=saved.seconds, why=flight.why,
                stall_seconds=saved.stall_seconds, host_bytes=self._buffer.bytes,
            )
        )  # fmt: skip
        return saved

    def _failed(self, step: int, why: str, error: CheckpointError) -> None:
        self.failures += 1
        self._say(SaveFailed(step=step, why=why, error=str(error), in_a_row=self.failures))

    def _judge(self, error: CheckpointError) -> None:
        """Raises: CheckpointError where the policy says that training must not go on."""
        if isinstance(error, Lasting):
            raise error
        if self.policy.abort_after and self.failures >= self.policy.abort_after:
            raise CheckpointError(
                f"{self.failures} saves in a row failed. The last: {error.what}", why=error.why, fix=error.fix
            ) from error

    def step(self, step: int) -> bool:
        """After each step: saves when the policy says so, or when any rank was asked to stop; True if it
        saved, or began to.

        A save of the policy's is written while training goes on; how it ended is told, and judged, at a later step.
        Collective; with `signals`, and while a save is under way, one small all-reduce a step. Raises: SystemExit after
        an agreed signal's save, with 130 for SIGINT and 75 (put me back in the queue) for the others; CheckpointError.
        """
        asked = agreed_signal(self._signals) if self._signals is not None else None
        if asked is not None:
            self.finish(step, signal.Signals(asked).name)
            raise SystemExit(exit_code(asked))
        if self._flight is not None and not _any_rank(self.pending):
            self.settle()
        every = MOST_STEPS if self.policy.every_steps == "auto" else self.policy.every_steps
        if every == 0 or step % every:
            return False
        self.begin(step, why=f"every {every} steps")
        return True

    def resume(self, *, strict_world: bool = True) -> int:
        """Loads the newest checkpoint that is whole, and returns its step; 0 where there is none at all.

        Every digest is verified, on all ranks, before anything is changed. A damaged checkpoint, and one that a mark
        passes over, is said (an event, and `skipped`) and the one before is taken. With `strict_world` another number
        of ranks is refused; without, tensors are loaded for any world. What is not the same again then is told, random
        generators too (switch.py). Where there is a root, what has arrived in the training's tensors is summed up and
        compared with it.

        Collective. Raises: CheckpointError where there are some and none can be taken, or where the newest does not
        fit the model, optimizer or `state`, naming the keys.
        """
        step = self._newest(strict_world)
        if not step and self.skipped:
            raise CheckpointError(
                f"None of the {len(self.skipped)} checkpoints in {self.store} can be resumed from.",
                why="; ".join(f"{item.folder}: {item.why}" for item in self.skipped),
                fix="restore one from a backup, or begin another run folder",
            )
        return step

    def _newest(self, strict_world: bool) -> int:
        """As `resume`, but 0 also where there are some and none can be taken. Collective."""
        self.settle()
        self.rest()
        candidates, skipped = self._candidates()
        self.skipped = tuple(skipped)
        current, names = self._look() if candidates else (Snapshot(), Names(set(), {}))
        for folder, digest, trouble in candidates:
            staged = None
            if not trouble:
                staged, trouble = self._on_all(partial(self._stage, folder, digest, strict_world, current, names))
            if staged is not None:
                apply(staged, self._subject)
                entries = entries_of(staged.manifest, self._subject.role)
                check_arrival(staged.manifest, entries, staged.targets, staged.values)
                self._keep_memory(staged.manifest)
                return self._resumed(folder, staged.manifest)
            self.skipped = (*self.skipped, Skipped(folder, trouble))
        self._say_skipped()
        return 0

    def _keep_memory(self, manifest: Manifest) -> None:
        """What a resume took is kept for saves that need about as much: a replica holds more than it writes."""
        share = 1.5 * manifest.bytes / ranks.world()
        if not self.policy.asynchronous or self._buffer.bytes > share:
            self._buffer.free()

    def go_back(self, before: int, why: str) -> int:
        """Loads the newest whole checkpoint of a step before `before`, as `resume` does, and returns its step; what is
        from then on is passed over from now on, for this reason.

        Collective. Raises: CheckpointError, also where there is none.
        """
        self.settle()
        self._on_all(partial(self._pass_over, before, why))
        step = self._newest(strict_world=True)
        if not step:
            raise CheckpointError(
                f"There is no checkpoint from before step {before} to go back to.",
                why=why,
                fix="save more often (checkpoint.every_steps), or keep more (checkpoint.keep)",
            )
        return step

    def _pass_over(self, before: int, why: str) -> None:
        """On rank 0. Raises: OSError."""
        if ranks.is_main():
            for item in look(self.store, self._lineage).committed:
                if item.manifest.step >= before:
                    marks.pass_over(self.store, item.folder, why)

    def committed(self) -> list[Committed]:
        """The committed checkpoints, newest first: their manifests are verified, their files are not.

        Waits for the save that is under way.
        """
        self.rest()
        return look(self.store, self._lineage).committed

    def latest(self) -> str | None:
        """Where the newest committed checkpoint lies; None where there is none."""
        return next((self._path(item.folder) for item in self.committed()), None)

    def _candidates(self) -> tuple[list[tuple[str, str, str]], list[Skipped]]:
        """Folders newest first, with their manifests' digests and why a mark passes them over, if one does: rank 0
        looks, and all take its word. Collective.
        """
        seen: dict[str, Any] = {}
        if ranks.is_main():
            listing, over = look(self.store, self._lineage), marks.passed_over(self.store)
            why = {folder: said.why or "a mark says so" for folder, said in over.items()}
            seen["whole"] = [
                [item.folder, _identity(item.manifest), why.get(item.folder, "")] for item in listing.committed
            ]
            seen["broken"] = [[item.folder, item.why] for item in listing.broken]
        seen = ranks.broadcast_json(seen)
        return [tuple(item) for item in seen["whole"]], [Skipped(*item) for item in seen["broken"]]

    def _look(self) -> tuple[Snapshot, Names]:
        """What this rank has now, and the names of what all have. Collective. Raises: CheckpointError."""
        current, _ = self._on_all(lambda: snapshot(self._subject))
        current = current or Snapshot()
        held = ranks.gather_json(msgspec.to_builtins(names_of(current)))
        return current, reduce(or_, (msgspec.convert(each, Names) for each in held))

    def _on_all(self, act: Callable[[], Result]) -> tuple[Result | None, str]:
        """What `act` gives, if it does on every rank; None and why, where it is damaged for one. Collective.
        Raises: CheckpointError, on all ranks, where one is in trouble.
        """
        result: Result | None = None
        answer: dict[str, Any] = {"damaged": "", "trouble": None}
        try:
            result = act()
        except Damaged as error:
            answer["damaged"] = f"rank {ranks.rank()}: {error.what} {error.why}"
        except Exception as error:
            answer["trouble"] = msgspec.to_builtins(trouble_of(error, self.store))
        answers = ranks.gather_json(answer)
        for each in answers:
            if each["trouble"]:
                trouble = msgspec.convert(each["trouble"], Trouble)
                raise CheckpointError(trouble.what, why=trouble.why, fix=trouble.fix)
        damaged = [each["damaged"] for each in answers if each["damaged"]]
        return (None, damaged[0]) if damaged else (result, "")

    def _stage(self, folder: str, digest: str, strict_world: bool, current: Snapshot, names: Names) -> Staged:
        try:
            manifest = read_manifest(self.store, folder)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"Rank {ranks.rank()} does not see {folder} in {self.store}, and rank 0 does.",
                why="the run folder is not shared by all nodes",
                fix="put the run on a file system that every node mounts",
            ) from error
        if _identity(manifest) != digest:
            raise Damaged(f"{folder} differs between ranks.", why="rank 0 read another manifest")
        if strict_world:
            check_world(manifest, folder, ranks.world())
        return stage(self.store, folder, manifest, self._subject, current, names, self._here(), self._buffer)

    def _here(self) -> Here:
        return Here(ranks.world(), self._decision, machine())

    def _resumed(self, folder: str, manifest: Manifest) -> int:
        self._say_skipped()
        self.resumed_from, self.saved_step = self._path(folder), manifest.step
        self._say(
            Resumed(step=manifest.step, path=self.resumed_from, told=told(manifest, self._here()), root=manifest.root)
        )
        return manifest.step

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """What the weights after `step` gave on held-out data, for checkpoint.best: said before that step is saved."""
        self._scores = (step, dict(values))

    def pin(self, saved: SavedCheckpoint, why: str = "asked") -> None:
        """Retention never deletes this one. On rank 0. Raises: CheckpointError where it is gone already; OSError."""
        if not marks.pin(self.store, Path(saved.path).name, why):
            raise CheckpointError(f"{saved.path} is no longer there.", fix="save and pin another")

    def _score(self, current: str) -> None:
        step, values = self._scores
        if not self.policy.best or step != step_of(current):
            return
        try:
            marks.evaluated(self.store, current, values)
        except Exception as error:
            self._undeleted += (f"{current} cannot be among the best: {type(error).__name__}: {error}",)

    def _retain(self, current: str) -> None:
        """No failure here fails the run."""
        self._score(current)
        bad = {item.folder for item in self.skipped}
        done = retain(
            self.store, self._lineage, self.policy, current, session=self._session, bad=bad, known=self._manifests
        )
        self._undeleted += done.notes

    def _path(self, folder: str) -> str:
        return f"{self.store}/{folder}"

    def _say_skipped(self) -> None:
        for item in self.skipped:
            self._say(Fallback(what=f"the checkpoint {item.folder} was passed over", why=item.why))

    def _say(self, event: Saved | SaveFailed | Resumed | Fallback) -> None:
        """To the events on rank 0; without any, what went wrong goes to stderr, since nobody else would tell."""
        if not ranks.is_main():
            return
        if self._events is not None:
            self._events.emit(event)
        elif isinstance(event, Fallback):
            print(f"shardwise: {event.what}: {event.why}", file=sys.stderr)
        elif isinstance(event, SaveFailed):
            print(f"shardwise: a save failed, {event.in_a_row} in a row: {event.error}", file=sys.stderr)


def agreed_signal(signals: StopRequest) -> int | None:
    """The signal that any rank received: SIGTERM before SIGINT; None where none did. Collective."""
    flags = torch.zeros(2, device=ranks.wire_device())
    if signals.received == signal.SIGINT:
        flags[0] = 1
    elif signals.received is not None:
        flags[1] = 1
    interrupted, terminated = ranks.all_reduce_sum(flags).tolist()
    return signal.SIGTERM if terminated else signal.SIGINT if interrupted else None


def exit_code(number: int) -> int:
    """130 for Ctrl-C; 75, put me back in the queue, for the rest."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


def _known_aliases(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """As parallelize left them with each module."""
    return {
        join(name, alias): join(name, first)
        for name, module in modules.items()
        for alias, first in aliases_of(module).items()
    }


def _known_holders(modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """As parallelize left them with each module."""
    found = {name: holders_of(module) for name, module in modules.items()}
    return {name: held for name, held in found.items() if held is not None}


def _any_rank(flag: bool) -> bool:
    """Collective."""
    return bool(ranks.all_reduce_sum(torch.tensor([float(flag)], device=ranks.wire_device())).item())


def _identity(manifest: Manifest) -> str:
    return digest_of(msgspec.json.encode(manifest))


def _check_state(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        try:
            pack_state(name, value, {})
        except CheckpointError as error:
            raise RecipeError(f"{join('state', name)}: {error.what}", why=error.why, fix=error.fix) from None
