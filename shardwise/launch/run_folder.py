"""The run folder: whether a run is new, goes on, is finished, or belongs to somebody else; and its lock.

    run/run.json         the recipe, the number of attempts, where it was forked from, whether it is finished
    run/plan.json        the plan of the latest attempt
    run/lock             held (flock) by the first rank while it trains
    run/command.lock     held (flock) by `shardwise train` from before the ranks start until they have ended
    run/events/  run/logs/
    run/checkpoints/     unless checkpoint.store names a folder or URL for them: all else is appended to or locked

`open_run` only looks. `held` is what the first rank does: lock, look, record the attempt.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardwise.environment import hostname
from shardwise.errors import RunFolderError
from shardwise.events.values import Failed, from_line
from shardwise.inputs.recipe import Recipe
from shardwise.inputs.recipe_changes import Change, changed
from shardwise.plan.plan import Plan

Count = Annotated[int, msgspec.Meta(ge=0)]
TRAINING, COMMAND = "lock", "command.lock"


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run was finished for: a later, larger end makes it go on."""

    step: Count
    steps: int | None = None
    epochs: int | None = None
    tokens: int | None = None


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """run.json."""

    recipe: Recipe
    attempts: Count = 0
    forked_from: str = ""
    finished: End | None = None
    schema_version: Literal[1] = 1


class RunState(msgspec.Struct, frozen=True):
    """A run as it stands for the recipe given now: its folder, and the number of the next attempt."""

    folder: Path
    attempt: int
    resume: bool
    finished: bool
    changes: tuple[Change, ...] = ()


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock."""

    pid: int
    host: str


def plan_path(folder: str | Path) -> Path:
    return Path(folder) / "plan.json"


def events_path(folder: str | Path, attempt: int) -> Path:
    return Path(folder) / "events" / f"attempt-{attempt:03d}.jsonl"


def attempts_path(folder: str | Path) -> Path:
    """Where the command that starts the ranks tells how each attempt ended."""
    return Path(folder) / "events" / "attempts.jsonl"


def tell(path: str | None, folder: Path) -> None:
    """Say to the command that started this rank where its run lies, if it asked to know (`told`)."""
    if path is not None:
        _write(Path(path), os.fsencode(folder.resolve()))


def told(path: str) -> Path | None:
    """What a Trainer told with `tell`; None before it did, or where nobody asked."""
    try:
        return Path(os.fsdecode(Path(path).read_bytes())) if path else None
    except FileNotFoundError:
        return None


def new_logs_folder(parent: str | Path, name: str) -> Path:
    """A folder for one start's logs that is not there yet: <name>, or <name>.2 and on."""
    path, number = Path(parent) / name, 1
    while path.exists():
        number += 1
        path = Path(parent) / f"{name}.{number}"
    return path


def failures(folder: str | Path, since: float) -> list[Failed]:
    """What ranks recorded when they raised, from this time (unix seconds) on."""
    found = []
    for path in (Path(folder) / "events").glob("failed-*.json"):
        failed = from_line(path.read_bytes())
        if isinstance(failed, Failed) and failed.time >= since:
            found.append(failed)
    return found


def checkpoints_folder(folder: str | Path) -> Path:
    return Path(folder) / "checkpoints"


def read_record(folder: str | Path) -> RunRecord | None:
    """run.json; None where no run has started there.

    Raises: RunFolderError where it cannot be read.
    """
    path = Path(folder) / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise RunFolderError(f"{folder} is a file.", fix="give another run folder") from None
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(
            f"{path} cannot be read.",
            why=str(error),
            fix="start another run with --fresh, or give another run=",
        ) from None


def write_record(folder: str | Path, record: RunRecord) -> None:
    _write(Path(folder) / "run.json", msgspec.json.format(msgspec.json.encode(record)))


def write_plan(folder: str | Path, plan: Plan) -> Path:
    """Write plan.json and return its path."""
    path = plan_path(folder)
    _write(path, msgspec.json.format(plan.to_json()))
    return path


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)


def open_run(folder: str | Path, recipe: Recipe) -> RunState:
    """How the run in this folder stands for this recipe. Changes nothing.

    Raises: RunFolderError where keys differ that a run may not change.
    """
    folder = Path(folder)
    record = read_record(folder)
    if record is None:
        return RunState(folder=folder, attempt=1, resume=False, finished=False)
    changes = tuple(changed(record.recipe, recipe))
    refused = [change for change in changes if not change.allowed]
    if refused:
        raise RunFolderError(
            f"The run in {folder} was started with another recipe.",
            why="; ".join(f"{change.key}: {change.before} -> {change.after}" for change in refused),
            fix="--fork NAME (a new run from its newest checkpoint), --fresh (start over), or undo it",
        )
    return RunState(
        folder=folder,
        attempt=record.attempts + 1,
        resume=True,
        finished=record.finished is not None and _same_end(record.finished, recipe),
        changes=changes,
    )


def _same_end(end: End, recipe: Recipe) -> bool:
    train = recipe.train
    return (end.steps, end.epochs, end.tokens) == (train.steps, train.epochs, train.tokens)


def move_aside(folder: str | Path) -> Path | None:
    """Rename a folder to the first free <folder>.<n>; nothing is deleted. None where there is no folder.

    Raises: RunFolderError while the run is in use.
    """
    folder = Path(folder)
    if not folder.exists():
        return None
    require_free(folder)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def planned_fork(source: str | Path, name: str, recipe: Recipe) -> tuple[Recipe, RunRecord | None]:
    """The recipe of the run NAME beside `source`, and the record of what it begins from; None where this fork was made
    already, and goes on. Changes nothing.

    Raises: RunFolderError where there is nothing to fork, or NAME is another run.
    """
    source = Path(source)
    target = source.parent / name
    forked = msgspec.structs.replace(recipe, run=str(target))
    if "/" in name or name in ("", ".", ".."):
        raise RunFolderError(f"--fork {name!r} is not a name.", fix="give a name without a slash")
    record = read_record(target)
    if record is not None:
        if record.forked_from == str(source):
            return forked, None
        raise RunFolderError(f"--fork {name}: {target} is another run already.", fix="give a new name")
    begun = read_record(source)
    if begun is None:
        raise RunFolderError(f"--fork {name}: there is no run in {source}.", fix="start it first, without --fork")
    return forked, begun


def record_fork(source: str | Path, recipe: Recipe) -> None:
    """Once its beginning is there: from now on the fork is a run."""
    write_record(recipe.run, RunRecord(recipe=recipe, forked_from=str(Path(source))))


@contextlib.contextmanager
def held(folder: str | Path, recipe: Recipe, *, fresh: bool = False) -> Iterator[RunState]:
    """Lock the run, record this attempt, and hold the lock to the end. The first rank alone does this.

    Raises: RunFolderError where another process holds it, or keys differ that a run may not change.
    """
    folder = Path(folder)
    if fresh:
        move_aside(folder)
    with locked(folder):
        state = open_run(folder, recipe)
        if not state.finished:
            record = read_record(folder) or RunRecord(recipe=recipe)
            write_record(folder, msgspec.structs.replace(record, recipe=recipe, attempts=state.attempt, finished=None))
        yield state


def finish(folder: str | Path, step: int) -> None:
    """Record that the run reached the end that its recipe names, after `step`."""
    record = read_record(folder)
    if record is not None:
        train = record.recipe.train
        end = End(step=step, steps=train.steps, epochs=train.epochs, tokens=train.tokens)
        write_record(folder, msgspec.structs.replace(record, finished=end))


@contextlib.contextmanager
def locked(folder: str | Path, name: str = TRAINING) -> Iterator[None]:
    """Hold one of the run's locks. It is released when this process ends, however it ends.

    Raises: RunFolderError that names the holder.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be written.", why=error.strerror or str(error), fix="give another run folder"
        ) from None
    _HELD.add(handle)
    try:
        if not _try_lock(handle, fcntl.LOCK_EX):
            raise _in_use(folder, name)
        os.ftruncate(handle, 0)
        os.pwrite(handle, msgspec.json.encode(Holder(os.getpid(), hostname())), 0)
        yield
    finally:
        _HELD.discard(handle)
        os.close(handle)


# A forked data worker inherits the open lock, and would keep it if it outlived its parent.
_HELD: set[int] = set()


def _let_go_in_child() -> None:
    for handle in _HELD:
        os.close(handle)


os.register_at_fork(after_in_child=_let_go_in_child)


def require_free(folder: str | Path) -> None:
    """Raises: RunFolderError while a process holds one of the run's locks."""
    for name in (TRAINING, COMMAND):
        try:
            handle = os.open(Path(folder) / name, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            if not _try_lock(handle, fcntl.LOCK_SH):
                raise _in_use(Path(folder), name)
        finally:
            os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(folder: Path, name: str) -> RunFolderError:
    try:
        holder = msgspec.json.decode((folder / name).read_bytes(), type=Holder)
        who = f"process {holder.pid} on {holder.host} trains there"
    except (OSError, msgspec.DecodeError):
        who = "another process has just started there"
    return RunFolderError(
        f"The run folder {folder} is in use.",
        why=who,
        fix="wait for it or stop it, or give another run folder (run = ...)",
    )


def leave_nonce(folder: str | Path, nonce: str) -> Path:
    """Write a file that every node must see before the first step: a node-local folder is found by that."""
    path = Path(folder) / f".seen-by-all-{nonce}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nonce)
    return path


def sees_nonce(folder: str | Path, nonce: str) -> bool:
    """Whether this node sees the file of `leave_nonce`."""
    path = Path(folder) / f".seen-by-all-{nonce}"
    return path.is_file() and path.read_text() == nonce
