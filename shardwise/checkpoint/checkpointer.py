"""The Checkpointer: save, resume, and stop in an orderly way, in a loop of your own or in the Trainer's."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwise import ranks
from shardwise.checkpoint import marks
from shardwise.checkpoint.completeness import Completeness
from shardwise.checkpoint.interval import MOST_STEPS
from shardwise.checkpoint.loads import Loads, Skipped
from shardwise.checkpoint.manifest import Json
from shardwise.checkpoint.retention import Committed
from shardwise.checkpoint.saves import Said, SavedCheckpoint, Saves, Shared
from shardwise.checkpoint.snapshot import Stateful, Subject, by_name, join, pack_state
from shardwise.checkpoint.staging import HostBuffer
from shardwise.checkpoint.store import LocalStore, Store
from shardwise.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, CheckpointError, RecipeError
from shardwise.events import Events, Fallback, SaveFailed
from shardwise.inputs.recipe import CheckpointPolicy
from shardwise.names import aliases_of, holders_of


class StopRequest(Protocol):
    """Tells whether this process was asked to stop: `shardwise.resilience.signals.StopSignals`."""

    @property
    def received(self) -> int | None: ...


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
        modules = by_name(module, nn.Module)
        subject = Subject(
            modules,
            by_name(optimizer, torch.optim.Optimizer),
            data,
            self.state,
            f"rank-{ranks.rank():05d}",
            _known_aliases(modules) if aliases is None else aliases,
            ranks.world(),
            _known_holders(modules) if holders is None else dict.fromkeys(modules, tuple(sorted(holders))),
        )
        self._signals = signals
        self._shared = Shared(
            store or LocalStore(Path(run) / "checkpoints"), lineage, policy or CheckpointPolicy(), subject, decision,
            partial(_say, events), HostBuffer(),
        )  # fmt: skip
        self._saves = Saves(self._shared, plan_digest=plan_digest, plan=plan, completeness=completeness, clock=clock)
        self._loads = Loads(self._shared, self._saves)
        _check_state(self.state)

    @property
    def store(self) -> Store:
        return self._shared.store

    @property
    def policy(self) -> CheckpointPolicy:
        return self._shared.policy

    @property
    def saved_step(self) -> int | None:
        """Of the newest commit that is known; None before the first."""
        return self._shared.saved_step

    @property
    def resumed_from(self) -> str | None:
        return self._loads.resumed_from

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What the last resume passed over."""
        return self._loads.skipped

    @property
    def failures(self) -> int:
        """Saves that failed in a row."""
        return self._saves.failures

    @property
    def pending(self) -> bool:
        """Whether a save is under way whose end this rank does not know yet."""
        return self._saves.pending

    def save(self, step: int, why: str = "asked", *, samples: int | None = None) -> SavedCheckpoint:
        """Commits the state after `step`; then drops what the policy no longer keeps.

        Collective. Raises: CheckpointError, on every rank, naming the first that failed; then nothing was
        kept of this checkpoint, and everything of those before.
        """
        return self._saves.save(step, why, samples=samples)

    def begin(self, step: int, why: str = "policy", *, samples: int | None = None) -> SavedCheckpoint | None:
        """Copies the state after `step` and has it written while training goes on; `settle` tells how it ended.

        Waits for a save that is under way already. With checkpoint.asynchronous = false it waits for the commit, and
        returns it. What fails is an event, and the policy's to judge. Collective. Raises: CheckpointError, on every
        rank, for state that cannot be kept, and as `settle`.
        """
        return self._saves.begin(step, why, samples=samples)

    def finish(self, step: int, why: str, *, samples: int | None = None) -> SavedCheckpoint | None:
        """The state after `step` is committed when this returns: by the save under way, or else by another; None where
        it was before. Collective. Raises: CheckpointError as `save`.
        """
        return self._saves.finish(step, why, samples=samples)

    def settle(self) -> SavedCheckpoint | None:
        """Waits for the save that is under way, if any, and tells what came of it; None where nothing was committed.

        To be called by all ranks at the same step. Raises: CheckpointError, on every rank, for a failure that no other
        try would mend, and for the last of policy.abort_after failures in a row.
        """
        return self._saves.settle()

    def rest(self) -> None:
        """Waits until what the policy no longer keeps is deleted, which goes on after a commit, and tells what did not
        go. No collective.
        """
        self._saves.rest()

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
        if self._saves.under_way and not _any_rank(self.pending):
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
        return self._loads.resume(strict_world)

    def go_back(self, before: int, why: str) -> int:
        """Loads the newest whole checkpoint of a step before `before`, as `resume` does, and returns its step; what is
        from then on is passed over from now on, for this reason.

        Collective. Raises: CheckpointError, also where there is none.
        """
        return self._loads.go_back(before, why)

    def committed(self) -> list[Committed]:
        """The committed checkpoints, newest first: their manifests are verified, their files are not.

        Waits for the save that is under way.
        """
        self.rest()
        return self._loads.committed()

    def latest(self) -> str | None:
        """Where the newest committed checkpoint lies; None where there is none."""
        return next((self._shared.path(item.folder) for item in self.committed()), None)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """What the weights after `step` gave on held-out data, for checkpoint.best: said before that step is saved."""
        self._saves.evaluated(step, values)

    def pin(self, saved: SavedCheckpoint, why: str = "asked") -> None:
        """Retention never deletes this one. On rank 0. Raises: CheckpointError where it is gone already; OSError."""
        if not marks.pin(self.store, Path(saved.path).name, why):
            raise CheckpointError(f"{saved.path} is no longer there.", fix="save and pin another")


def _say(events: Events | None, event: Said) -> None:
    """To the events on rank 0; without any, what went wrong goes to stderr, since nobody else would tell."""
    if not ranks.is_main():
        return
    if events is not None:
        events.emit(event)
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


def _check_state(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        try:
            pack_state(name, value, {})
        except CheckpointError as error:
            raise RecipeError(f"{join('state', name)}: {error.what}", why=error.why, fix=error.fix) from None
