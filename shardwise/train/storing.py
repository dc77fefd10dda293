"""Where a run's checkpoints lie: in its folder, or in a store of their own that one job holds at a time.

And what must not happen at a start: to begin anew beside checkpoints that were there, or to end for ever at one that
every attempt fails from.
"""

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from shardwise import ranks
from shardwise.checkpoint import marks
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.lease import Lease, Leased
from shardwise.checkpoint.lineage import kept_at
from shardwise.checkpoint.object_store import ObjectStore, Tell, require_create, say_on_stderr
from shardwise.checkpoint.retention import Listing, look, step_of
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError, RunFolderError
from shardwise.events.values import AnyEvent, Failed, Resumed, RunStarted, Saved
from shardwise.inputs.recipe import Recipe
from shardwise.launch import run_folder
from shardwise.launch.run_folder import RunState
from shardwise.train import opening


class Kept(NamedTuple):
    """The store of this rank, and the lineage that its checkpoints have there; where it is no run folder's, the name of
    this attempt, the same on all ranks.
    """

    store: Store
    lineage: str
    attempt: str = ""

    def tell_with(self, tell: Tell) -> None:
        """Further tries of a store by URL are told so from now on, on rank 0; the others' stay on stderr, their log."""
        inner = self.store.store if isinstance(self.store, Leased) else self.store
        if isinstance(inner, ObjectStore) and ranks.is_main():
            inner.tell = tell


def open_store(held: contextlib.ExitStack, recipe: Recipe, opened: RunState, *, fresh: bool) -> Kept:
    """The run's store; one of its own is tried, and held by rank 0 until `held` closes.

    Collective. Raises, on every rank: RunFolderError where another job holds it, or a fresh run would go on with what
    is there; CheckpointError where it cannot be used; RecipeError.
    """
    where = recipe.checkpoint.store
    store, lineage = kept_at(opened.folder, recipe)
    if not where:
        return Kept(store, lineage)
    leases: list[Lease] = []

    def hold() -> None:
        with _told(where):
            require_create(store)
            leases.append(held.enter_context(Lease(store, lineage, recipe.run, tell=say_on_stderr)))
            if fresh and look(store, lineage).committed:
                raise RunFolderError(
                    f"--fresh, and {where} holds checkpoints of this very run.",
                    why="it would go on with them, or delete them in time",
                    fix="give the new run another name (run = ...) and a checkpoint.store of its own",
                )

    ranks.on_main(hold)
    attempt = str(ranks.broadcast_json(secrets.token_hex(8)))
    return Kept(Leased(store, leases[0]) if leases else store, lineage, attempt)


def refuse_silent_start(kept: Kept, opened: RunState) -> None:
    """For a run that found nothing to resume from.

    Collective. Raises: CheckpointError, on every rank, where its store holds somebody's checkpoints, or where earlier
    attempts committed some.
    """

    def refuse() -> None:
        with _told(str(kept.store)):
            listing = look(kept.store, kept.lineage)
        if listing.committed:
            return
        saved = [event for events in opening.told_before(opened) for event in events if isinstance(event, Saved)]
        strange = strangers(listing)
        if saved:
            raise CheckpointError(
                f"{kept.store} holds none of this run's checkpoints, of which {len(saved)} were committed.",
                why=f"the last was of step {saved[-1].step}; they are deleted or moved, or checkpoint.store changed",
                fix="put them back (or checkpoint.store), or begin again with --fresh",
            )
        if strange:
            raise CheckpointError(
                f"{kept.store} holds checkpoints, and none of this run: {', '.join(strange[:3])}"
                f"{f' and {len(strange) - 3} more' if len(strange) > 3 else ''}.",
                why="to begin at step 0 beside them is seldom what was meant",
                fix="give the run its own checkpoint.store or run folder, or those keys and that name that they had",
            )

    ranks.on_main(refuse)


def strangers(listing: Listing) -> list[str]:
    """Folders that are, or look like, somebody else's checkpoints."""
    return [*listing.foreign, *listing.unknown]


def pass_over_fruitless(kept: Kept, opened: RunState) -> None:
    """Marks a checkpoint that attempt after attempt failed from, where there is an older one: attempts of this run
    folder, and in a store those of any machine. Collective.
    """

    def mark() -> None:
        told = opening.told_before(opened)
        path, failed = fruitless(told, run_folder.failures(opened.folder, 0.0))
        with _told(str(kept.store)):
            counted = marks.failures(kept.store)
            over = marks.passed_over(kept.store)
            left = [item.folder for item in look(kept.store, kept.lineage).committed if item.folder not in over]
            # Newest first: the last has no older one.
            for folder in left[:-1]:
                count = max(counted.get(folder, 0), failed if folder == PurePosixPath(path).name else 0)
                if count >= marks.FRUITLESS_LIMIT:
                    marks.pass_over(kept.store, folder, f"{count} attempts failed from it and committed nothing")

    ranks.on_main(mark)


def counting(kept: Kept, checkpointer: Checkpointer) -> Callable[[], None]:
    """To be called when a rank raises: a store is told that the checkpoint which this attempt went on from has seen one
    more failure, unless a later one was committed. A run folder knows by itself; a store outlives it, and tells the
    machine that comes next.

    Holds the checkpointer, and with it the model, no longer than its Trainer does.
    """
    seen = weakref.ref(checkpointer)

    def count() -> None:
        held = seen()
        folder = PurePosixPath(held.resumed_from or "").name if held is not None else ""
        if kept.attempt and held is not None and folder and held.saved_step == step_of(folder):
            marks.failed(kept.store, folder, kept.attempt)

    return count


def fruitless(attempts: Sequence[Sequence[AnyEvent]], failures: Sequence[Failed]) -> tuple[str, int]:
    """The checkpoint of the last attempt, and how many of the last attempts in a row resumed from it, committed nothing
    and failed. An attempt that was killed or preempted says nothing of its checkpoint, and is not counted.

    `attempts`: their events, oldest first. `failures`: what ranks recorded when they raised, in any order.
    """
    path, count = "", 0
    until = float("inf")
    for events in reversed(attempts):
        resumed = next((event.path for event in events if isinstance(event, Resumed)), "")
        path = path or resumed
        if not resumed or resumed != path or any(isinstance(event, Saved) for event in events):
            break
        started = next((event.time for event in events if isinstance(event, RunStarted | Resumed)), 0.0)
        count += any(started <= failed.time < until for failed in failures)
        until = started
    return path, count


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """What a store refuses, as an error that every rank can raise."""
    try:
        yield
    except OSError as error:
        what, why, fix = (getattr(error, name, "") for name in ("what", "why", "fix"))
        raise CheckpointError(what or f"{where} cannot be used: {error}", why=why, fix=fix) from error
