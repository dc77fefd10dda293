"""Loads: the newest checkpoint that is whole, on all ranks or on none; what cannot be loaded is passed over, told, and
counted, so that no run ends at it for ever.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from shardwise import ranks
from shardwise.checkpoint import marks
from shardwise.checkpoint.arrival import check_arrival
from shardwise.checkpoint.assembly import machine
from shardwise.checkpoint.manifest import Damaged, Manifest, Record, digest_of, read_manifest
from shardwise.checkpoint.restore import Names, Staged, apply, check_world, entries_of, names_of, stage
from shardwise.checkpoint.retention import Committed, look
from shardwise.checkpoint.saves import Saves, Shared
from shardwise.checkpoint.saving import Trouble, may_pass, trouble_of
from shardwise.checkpoint.snapshot import Snapshot, snapshot
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.switch import Here, told
from shardwise.errors import BadInput, CheckpointError
from shardwise.events import Fallback, Resumed

Result = TypeVar("Result")

# damaged: it is not what was saved; unread, passing: the store does not give it, and may in a moment; misfit: it is not
# of this training; failed: nobody expected it.
Kind = Literal["", "damaged", "unread", "passing", "misfit", "failed"]


class LoadFailed(CheckpointError):
    """A checkpoint that is whole and fits could not be loaded. It counts against that checkpoint."""


class Skipped(NamedTuple):
    """A checkpoint that resume passed over, and why."""

    folder: str
    why: str


class Report(Record, frozen=True):
    """How something went on one rank."""

    kind: Kind = ""
    trouble: Trouble | None = None


class Loads:
    """The loads of one training, whose saves are settled before each."""

    def __init__(self, shared: Shared, saves: Saves) -> None:
        self.shared, self._saves = shared, saves
        self.skipped: tuple[Skipped, ...] = ()
        self.resumed_from: str | None = None

    def resume(self, strict_world: bool) -> int:
        """As Checkpointer.resume."""
        step = self._newest(strict_world)
        if not step and self.skipped:
            raise CheckpointError(
                f"None of the {len(self.skipped)} checkpoints in {self.shared.store} can be resumed from.",
                why="; ".join(f"{item.folder}: {item.why}" for item in self.skipped),
                fix="restore one from a backup, or begin another run folder",
            )
        return step

    def go_back(self, before: int, why: str) -> int:
        """As Checkpointer.go_back."""
        self._saves.settle()
        on_all(self.shared.store, partial(self._pass_over, before, why))
        step = self._newest(strict_world=True)
        if not step:
            raise CheckpointError(
                f"There is no checkpoint from before step {before} to go back to.",
                why=why,
                fix="save more often (checkpoint.every_steps), or keep more (checkpoint.keep)",
            )
        return step

    def committed(self) -> list[Committed]:
        """The committed checkpoints, newest first: their manifests are verified, their files are not."""
        return look(self.shared.store, self.shared.lineage).committed

    def _pass_over(self, before: int, why: str) -> None:
        """On rank 0. Raises: OSError."""
        if ranks.is_main():
            for item in self.committed():
                if item.manifest.step >= before:
                    marks.pass_over(self.shared.store, item.folder, why)

    def _newest(self, strict_world: bool) -> int:
        """As `resume`, but 0 also where there are some and none can be taken. Collective."""
        self._saves.settle()
        self._saves.rest()
        candidates, skipped = self._candidates()
        self._skip(*skipped, anew=True)
        current, names = self._look() if candidates else (Snapshot(), Names(set(), {}))
        for folder, digest, why in candidates:
            staged = None
            if not why:
                staged, why = self._staged(folder, partial(self._stage, folder, digest, strict_world, current, names))
            if staged is not None:
                self._put(folder, staged)
                return self._resumed(folder, staged.manifest)
            self._skip(Skipped(folder, why))
        self._say_skipped()
        return 0

    def _skip(self, *skipped: Skipped, anew: bool = False) -> None:
        self.skipped = skipped if anew else (*self.skipped, *skipped)
        self.shared.bad = frozenset(item.folder for item in self.skipped)

    def _candidates(self) -> tuple[list[tuple[str, str, str]], list[Skipped]]:
        """Folders newest first, with their manifests' digests and why a mark passes them over, if one does: rank 0
        looks, and all take its word. Collective. Raises: CheckpointError.
        """
        found, _ = on_all(self.shared.store, self._seen)
        seen = ranks.broadcast_json(found)
        return [tuple(item) for item in seen["whole"]], [Skipped(*item) for item in seen["broken"]]

    def _seen(self) -> dict[str, Any]:
        """On rank 0. Raises: OSError."""
        if not ranks.is_main():
            return {}
        listing, over = look(self.shared.store, self.shared.lineage), marks.passed_over(self.shared.store)
        why = {folder: said.why or "a mark says so" for folder, said in over.items()}
        return {
            "whole": [[item.folder, _identity(item.manifest), why.get(item.folder, "")] for item in listing.committed],
            "broken": [[item.folder, item.why] for item in listing.broken],
        }

    def _look(self) -> tuple[Snapshot, Names]:
        """What this rank has now, and the names of what all have. Collective. Raises: CheckpointError."""
        current, _ = on_all(self.shared.store, lambda: snapshot(self.shared.subject))
        current = current or Snapshot()
        held = ranks.gather_json(msgspec.to_builtins(names_of(current)))
        return current, reduce(or_, (msgspec.convert(each, Names) for each in held))

    def _staged(self, folder: str, act: Callable[[], Staged]) -> tuple[Staged | None, str]:
        """What every rank has staged; None, and why, where one finds it damaged or cannot read it. What may pass is
        tried again, checkpoint.retries times. Collective. Raises: CheckpointError where it does not fit; LoadFailed.
        """
        for attempt in range(self.shared.policy.retries + 1):
            staged, reports = reported(self.shared.store, act)
            self._require(folder, reports, fatal=("misfit", "failed"))
            why = first_of(reports)
            if not why:
                return staged, ""
            if any(one.kind not in ("", "passing") for one in reports) or attempt == self.shared.policy.retries:
                break
            self.shared.say(Fallback(what=f"{folder} cannot be read, and is tried again", why=why))
            time.sleep(self.shared.backoff_seconds * 2**attempt)
        return None, why

    def _stage(self, folder: str, digest: str, strict_world: bool, current: Snapshot, names: Names) -> Staged:
        store, here = self.shared.store, self._here()
        try:
            manifest = read_manifest(store, folder)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"Rank {ranks.rank()} does not see {folder} in {store}, and rank 0 does.",
                why="the run folder is not shared by all nodes",
                fix="put the run on a file system that every node mounts",
            ) from error
        if _identity(manifest) != digest:
            raise Damaged(f"{folder} differs between ranks.", why="rank 0 read another manifest")
        if strict_world:
            check_world(manifest, folder, ranks.world())
        return stage(store, folder, manifest, self.shared.subject, current, names, here, self.shared.buffer)

    def _put(self, folder: str, staged: Staged) -> None:
        """Into the training, on every rank. Collective. Raises: CheckpointError where it is refused; LoadFailed."""
        _, reports = reported(self.shared.store, partial(apply, staged, self.shared.subject))
        self._require(folder, reports, fatal=("misfit", "damaged", "unread", "passing", "failed"))
        entries = entries_of(staged.manifest, self.shared.subject.role)
        try:
            check_arrival(staged.manifest, entries, staged.targets, staged.values)
        except CheckpointError as error:
            self._count(folder)
            raise LoadFailed(error.what, why=error.why, fix=error.fix) from error
        self._keep_memory(staged.manifest)

    def _require(self, folder: str, reports: list[Report], *, fatal: tuple[Kind, ...]) -> None:
        """Raises: CheckpointError, the same on every rank, of the first report of such a kind; LoadFailed, counted,
        where it is not the training's own fault.
        """
        for one in reports:
            if one.trouble is None or one.kind not in fatal:
                continue
            if one.kind == "misfit":
                raise CheckpointError(one.trouble.what, why=one.trouble.why, fix=one.trouble.fix)
            self._count(folder)
            raise LoadFailed(
                f"{folder} could not be loaded: rank {one.trouble.rank}: {one.trouble.what}",
                why=one.trouble.why,
                fix=f"start again; after {marks.FRUITLESS_LIMIT} such loads the checkpoint before it is taken",
            )

    def _count(self, folder: str) -> None:
        """On rank 0; that it failed is what matters, whether or not the store hears of it."""
        if ranks.is_main():
            with contextlib.suppress(Exception):
                marks.failed(self.shared.store, folder, secrets.token_hex(8))

    def _keep_memory(self, manifest: Manifest) -> None:
        """What a resume took is kept for saves that need about as much: a replica holds more than it writes."""
        share = 1.5 * manifest.bytes / ranks.world()
        if not self.shared.policy.asynchronous or self.shared.buffer.bytes > share:
            self.shared.buffer.free()

    def _here(self) -> Here:
        return Here(ranks.world(), self.shared.decision, machine())

    def _resumed(self, folder: str, manifest: Manifest) -> int:
        self._say_skipped()
        self.resumed_from, self.shared.saved_step = self.shared.path(folder), manifest.step
        self.shared.say(
            Resumed(step=manifest.step, path=self.resumed_from, told=told(manifest, self._here()), root=manifest.root)
        )
        return manifest.step

    def _say_skipped(self) -> None:
        for item in self.skipped:
            self.shared.say(Fallback(what=f"the checkpoint {item.folder} was passed over", why=item.why))


def reported(store: Store, act: Callable[[], Result]) -> tuple[Result | None, list[Report]]:
    """What `act` gives on this rank, and how it went on every one. Collective."""
    result, mine = _tried(store, act)
    return result, [msgspec.convert(each, Report) for each in ranks.gather_json(msgspec.to_builtins(mine))]


def _tried(store: Store, act: Callable[[], Result]) -> tuple[Result | None, Report]:
    try:
        return act(), Report()
    except Damaged as error:
        kind: Kind = "damaged"
        trouble = trouble_of(error, store, "read")
    except OSError as error:
        kind = "passing" if may_pass(error) else "unread"
        trouble = trouble_of(error, store, "read")
    except Exception as error:
        kind = "misfit" if isinstance(error, CheckpointError | BadInput) else "failed"
        trouble = trouble_of(error, store, "read")
    return None, Report(kind, trouble)


def on_all(store: Store, act: Callable[[], Result]) -> tuple[Result | None, list[Report]]:
    """As `reported`. Raises: CheckpointError, the same on every rank, where one is in any trouble. Collective."""
    result, reports = reported(store, act)
    for one in reports:
        if one.trouble is not None:
            raise CheckpointError(one.trouble.what, why=one.trouble.why, fix=one.trouble.fix)
    return result, reports


def first_of(reports: list[Report]) -> str:
    """The first trouble of any rank in one line; empty where there is none."""
    found = next((one.trouble for one in reports if one.trouble is not None), None)
    return "" if found is None else f"rank {found.rank}: {found.what} {found.why}"


def _identity(manifest: Manifest) -> str:
    return digest_of(msgspec.json.encode(manifest))
