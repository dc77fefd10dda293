"""Opening a run: one rank holds the lock, all ranks see the same folder, and a run that is finished says so."""

import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec

from shardwise import ranks
from shardwise.environment import hostname, tell_run_path
from shardwise.errors import RunFolderError
from shardwise.events.reader import read
from shardwise.events.values import AnyEvent
from shardwise.inputs.recipe import Recipe
from shardwise.inputs.recipe_changes import Change
from shardwise.launch import run_folder
from shardwise.launch.run_folder import RunState


def open_run(held: contextlib.ExitStack, recipe: Recipe, *, fresh: bool) -> RunState:
    """Lock the run on rank 0 until `held` closes; the run as it stands, on every rank.

    Collective. Raises: RunFolderError on every rank.
    """

    def lock() -> Any:
        state = held.enter_context(run_folder.held(recipe.run, recipe, fresh=fresh))
        run_folder.tell(tell_run_path(), state.folder)
        return [state.attempt, state.resume, state.finished, msgspec.to_builtins(state.changes)]

    attempt, resume, finished, changes = ranks.on_main(lock)
    opened = RunState(
        folder=Path(recipe.run),
        attempt=attempt,
        resume=resume,
        finished=finished,
        changes=msgspec.convert(changes, tuple[Change, ...]),
    )
    require_shared(opened.folder)
    return opened


def require_shared(folder: Path) -> None:
    """Every rank must see the file that rank 0 leaves. Collective. Raises: RunFolderError."""
    nonce = ranks.broadcast_json(secrets.token_hex(8))
    path = ranks.on_main(lambda: str(run_folder.leave_nonce(folder, nonce)))
    seen = ranks.gather_json([hostname(), run_folder.sees_nonce(folder, nonce)])
    ranks.on_main(lambda: Path(path).unlink(missing_ok=True))
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise RunFolderError(
            f"{', '.join(blind)} cannot see what rank 0 writes in {folder}.",
            why="the run folder is local to a node; checkpoints would be torn over the nodes",
            fix="put the run on a file system that every node mounts (run = ...)",
        )


def told_before(opened: RunState) -> list[list[AnyEvent]]:
    """The events of this run's earlier attempts, oldest first."""
    paths = [run_folder.events_path(opened.folder, attempt) for attempt in range(1, opened.attempt)]
    return [read(path) for path in paths if path.exists()]


def say_finished(opened: RunState) -> None:
    if ranks.is_main():
        print(f"{opened.folder} is finished. Start another with fresh=True (--fresh), or raise the number of steps.")


def record_finished(recipe: Recipe, step: int) -> None:
    """Collective."""
    ranks.on_main(lambda: run_folder.finish(recipe.run, step))
