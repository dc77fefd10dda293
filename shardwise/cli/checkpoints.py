"""`shardwise checkpoints list|verify|ledger|diff|prune`: what lies in a store, whether it is whole, what may go."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.checkpoint.audit import Audit, Fault, Item, audit, survey
from shardwise.checkpoint.compare import compare
from shardwise.checkpoint.export import Dtype, export
from shardwise.checkpoint.lease import Lease, Leased
from shardwise.checkpoint.manifest import MANIFEST, Damaged, read_manifest
from shardwise.checkpoint.object_store import say_on_stderr, store_at
from shardwise.checkpoint.retention import Retained, look, retain, step_of
from shardwise.checkpoint.store import LocalStore, Piece, Store
from shardwise.data.ledger import kept_in, prove
from shardwise.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, RecipeError
from shardwise.inputs import hub
from shardwise.inputs.recipe import CheckpointPolicy
from shardwise.inputs.store_url import is_url, redacted, require_plain
from shardwise.launch import run_folder
from shardwise.report import checkpoints as report


class Place(NamedTuple):
    """What somebody named: a store of checkpoints, and one of them or all ("")."""

    store: Store
    folder: str
    run: Path | None


def find(target: str) -> Place:
    """A run folder, a folder or URL of checkpoints, or one checkpoint. Raises: RecipeError where there is none."""
    if is_url(target):
        require_plain(target, "the place")
        parent, _, last = target.rstrip("/").rpartition("/")
        one = step_of(last) >= 0
        return Place(store_at(parent if one else target, say_on_stderr), last if one else "", None)
    path = Path(target).resolve()
    if (path / MANIFEST).is_file() or (step_of(path.name) >= 0 and path.is_dir()):
        return Place(LocalStore(path.parent), path.name, _run_of(path.parent))
    record = run_folder.read_record(path) if path.is_dir() else None
    if record is not None and record.recipe.checkpoint.store:
        return Place(store_at(record.recipe.checkpoint.store, say_on_stderr), "", path)
    if run_folder.checkpoints_folder(path).is_dir():
        return Place(LocalStore(run_folder.checkpoints_folder(path)), "", path)
    if path.is_dir() and any(step_of(each.name) >= 0 for each in path.iterdir()):
        return Place(LocalStore(path), "", _run_of(path))
    raise RecipeError(
        f"There is no run or checkpoint {redacted(target)}.",
        fix="name a run's folder, a checkpoint's folder (RUN/checkpoints/step-...), or a URL of checkpoints",
    )


def _run_of(checkpoints: Path) -> Path | None:
    return checkpoints.parent if checkpoints.name == "checkpoints" else None


def listed(target: str, as_json: bool) -> int:
    """What lies there, as far as manifests and the files' ends tell."""
    place = find(target)
    with told():
        items = [item for item in survey(place.store) if place.folder in ("", item.folder)]
    print(report.items_json(items) if as_json else report.items(items, str(place.store)))
    return EXIT_DONE


def verify(target: str, as_json: bool) -> int:
    """Every byte of one checkpoint, or of all that were committed; 1 where one is not what was saved."""
    place = find(target)
    with told():
        names = (
            [place.folder] if place.folder else [item.folder for item in survey(place.store) if item.state != "torn"]
        )
        audits = []
        for name in names:
            audits.append(_audited(place.store, name))
            if not as_json:
                print(report.audit(audits[-1]), flush=True)
    if as_json:
        print(report.audits_json(audits))
    elif not audits:
        print(f"no checkpoints in {place.store}")
    return EXIT_FAILED if any(one.faults for one in audits) else EXIT_DONE


def _audited(store: Store, folder: str) -> Audit:
    try:
        return audit(store, folder)
    except Damaged as error:
        return Audit(folder, max(step_of(folder), 0), 0, "", (Fault(MANIFEST, f"{error.what} {error.why}"),))


def ledger(target: str, as_json: bool) -> int:
    """Whether every sample up to a checkpoint was trained on once; 1 where one came twice or never."""
    with told():
        store, folder = _one(target)
        try:
            segments = kept_in(read_manifest(store, folder).state)
        except Damaged as error:
            raise CheckpointError(error.what, why=error.why, fix="shardwise checkpoints list RUN") from error
    if segments is None:
        raise CheckpointError(
            f"{folder} has no ledger of samples.",
            why="a Trainer keeps one; a loop of one's own does not",
            fix="name a checkpoint of shardwise train, or of sw.Trainer",
        )
    found = prove(segments)
    print(report.ledger_json(folder, segments, found) if as_json else report.ledger(folder, found))
    return EXIT_FAILED if found.faults else EXIT_DONE


def diff(before: str, after: str, as_json: bool) -> int:
    """Two checkpoints; 0 where they hold the same state. A run stands for its newest."""
    with told():
        found = compare(_one(before), _one(after))
    print(report.difference_json(found) if as_json else report.difference(found))
    return EXIT_DONE if found.same else EXIT_FAILED


def _one(target: str) -> tuple[Store, str]:
    place = find(target)
    folder = place.folder or next((item.folder for item in survey(place.store) if item.state == "whole"), "")
    if not folder:
        raise RecipeError(f"There is no whole checkpoint in {redacted(target)}.", fix="shardwise checkpoints list RUN")
    return place.store, folder


def exported(target: str, out: str, like: str | None, dtype: Dtype, merged: bool, as_json: bool) -> int:
    """A checkpoint's weights, or its adapters, as a folder that from_pretrained loads."""
    with told():
        store, folder = _one(target)
        trained_from = Path(like) if like else _trained_from(store, folder)
        found = export(store, folder, Path(out), trained_from, dtype=dtype, merged=merged)
    print(report.exported_json(found) if as_json else report.exported(folder, found))
    return EXIT_DONE


def _trained_from(store: Store, folder: str) -> Path:
    """The folder that the run's model came from. Raises: RecipeError where none is on this machine."""
    plan = read_manifest(store, folder).plan or {}
    model = plan.get("recipe", {}).get("model", {})
    named = str(model.get("hf") or model.get("given") or "").removeprefix(hub.PREFIX)
    if named and Path(named, "config.json").is_file():
        return Path(named)
    if model.get("hf"):
        return hub.find(named, weights=False)
    raise RecipeError(
        f"{folder} does not say which folder its model came from."
        if not named
        else f"{folder} was trained from {named!r}, which is no folder here.",
        why="config.json, tokenizer and templates are copied from there",
        fix="--like FOLDER: one with that model's config.json",
    )


def prune(target: str, keep: int | None, as_json: bool, dry_run: bool) -> int:
    """Deletes what the run's policy no longer keeps, as a save does: not before the newest is read back."""
    place = find(target)
    if place.folder:
        raise RecipeError(f"{target} is one checkpoint.", fix="name its run: retention looks at all of them")
    record = run_folder.read_record(place.run) if place.run is not None else None
    if record is None and keep is None:
        raise RecipeError(f"Nothing says how many of {redacted(target)} to keep.", fix="--keep 3")
    policy = record.recipe.checkpoint if record is not None else CheckpointPolicy()
    policy = policy if keep is None else msgspec.structs.replace(policy, keep=keep)
    with contextlib.ExitStack() as held, told():
        store = _held(place, held, dry_run)
        done = _retained(store, policy)
    print(report.pruned_json(done, dry_run) if as_json else report.pruned(done, dry_run))
    return EXIT_FAILED if done.notes else EXIT_DONE


def _held(place: Place, held: contextlib.ExitStack, dry_run: bool) -> Store:
    """The store, for this command alone while it deletes. Raises: RunFolderError where a run uses it."""
    if dry_run:
        return _Untouched(place.store)
    if place.run is not None:
        held.enter_context(run_folder.locked(place.run, run_folder.COMMAND))
        held.enter_context(run_folder.locked(place.run))
    if isinstance(place.store, LocalStore):
        return place.store
    lineage = next((item.lineage for item in survey(place.store) if item.state == "whole"), "")
    lease = held.enter_context(Lease(place.store, lineage, str(place.run or "prune"), tell=say_on_stderr))
    return Leased(place.store, lease)


def _retained(store: Store, policy: CheckpointPolicy) -> Retained:
    """Of each lineage there, by itself."""
    newest: dict[str, Item] = {}
    for item in survey(store):
        if item.state != "torn":
            newest.setdefault(item.lineage if item.state == "whole" else _lineage_of(store, item), item)
    done = [retain(store, lineage, policy, item.folder) for lineage, item in newest.items()]
    return Retained(tuple(f for each in done for f in each.deleted), tuple(n for each in done for n in each.notes))


def _lineage_of(store: Store, damaged: Item) -> str:
    """Of a damaged checkpoint: a whole manifest says it, else the newest of the others does."""
    for lineage in dict.fromkeys(item.lineage for item in survey(store) if item.state == "whole"):
        listing = look(store, lineage)
        if damaged.folder in {*(one.folder for one in listing.committed), *(one.folder for one in listing.broken)}:
            return lineage
    return ""


class _Untouched:
    """A store in which nothing is changed: what would be deleted is gone for this process alone."""

    def __init__(self, store: Store) -> None:
        self._store, self._gone = store, set[str]()

    def __str__(self) -> str:
        return str(self._store)

    def write(self, key: str, pieces: object) -> None:
        pass

    def create(self, key: str, value: Piece) -> None:
        pass

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key in self._gone:
            raise FileNotFoundError(key)
        return self._store.read(key, start, length)

    def list(self, prefix: str = "") -> list[str]:
        return [key for key in self._store.list(prefix) if key not in self._gone]

    def delete(self, key: str) -> None:
        self._gone.add(key)

    def exists(self, key: str) -> bool:
        return key not in self._gone and self._store.exists(key)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What a store refuses, as an error with its fix."""
    try:
        yield
    except OSError as error:
        what, why, fix = (getattr(error, name, "") for name in ("what", "why", "fix"))
        raise CheckpointError(what or f"It cannot be read: {error}", why=why, fix=fix) from error
