"""`shardwise train --fork NAME`: a new run beside another, from its newest whole checkpoint, wherever that lies."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.checkpoint.fork import begin, beginnings
from shardwise.checkpoint.lease import Lease, Leased
from shardwise.checkpoint.lineage import kept_at
from shardwise.checkpoint.object_store import require_create, say_on_stderr
from shardwise.checkpoint.retention import Committed
from shardwise.checkpoint.store import Store
from shardwise.cli.checkpoints import told
from shardwise.errors import RunFolderError
from shardwise.inputs.recipe import Recipe
from shardwise.launch import run_folder


class Fork(NamedTuple):
    """A fork to be made: its recipe, and what it may begin at, newest first, in its source's store.

    `store` is None where the fork is there already, and goes on.
    """

    source: str
    recipe: Recipe
    store: Store | None
    found: Sequence[Committed] = ()


def planned(source: str, name: str, recipe: Recipe) -> Fork:
    """Changes nothing. Raises: RunFolderError where there is nothing to begin at, or NAME is another run."""
    forked, begun = run_folder.planned_fork(source, name, recipe)
    if begun is None:
        return Fork(source, forked, None)
    with told():
        store, lineage = kept_at(source, begun.recipe)
        found = beginnings(store, lineage)
    if not found:
        raise RunFolderError(f"--fork {name}: {source} has no committed checkpoint.", fix="start without --fork")
    return Fork(source, forked, store, found)


def make(fork: Fork) -> None:
    """The fork's first checkpoint, and then its record; in a store of checkpoints it is held meanwhile.

    Raises: RunFolderError, CheckpointError.
    """
    if fork.store is None:
        return
    with contextlib.ExitStack() as held, told():
        store, lineage = kept_at(fork.recipe.run, fork.recipe)
        if fork.recipe.checkpoint.store:
            require_create(store)
            store = Leased(store, held.enter_context(Lease(store, lineage, fork.recipe.run, tell=say_on_stderr)))
        begin(fork.store, fork.found, store, lineage, say_on_stderr)
    run_folder.record_fork(fork.source, fork.recipe)
