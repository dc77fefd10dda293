"""Which checkpoints are there, which may go, and their removal: once a newer one is verified, and only this run's own.

What stays: the newest `keep`; of the hours and days before that the last of each (`history`); the best by an evaluation
(`best`); what is pinned; and what is being written. Order is by step in the manifest, then by time, never by name.
"""

import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import NamedTuple

from shardwise.checkpoint import marks
from shardwise.checkpoint.manifest import MANIFEST, Damaged, Manifest, digest_of, read_manifest, read_stored
from shardwise.checkpoint.store import Store
from shardwise.inputs.recipe import CheckpointPolicy, History

_FOLDER = re.compile(r"^step-(\d{8,})-([0-9a-f]{6})-([0-9a-f]{8})-\d+$")
# What others call a checkpoint: step-100, checkpoint_100, global_step100, iter_0000100, epoch=3.ckpt.
_LIKE_ONE = re.compile(r"^(global_?step|step|checkpoint|ckpt|iter|iteration|epoch)[-_=]?\d+", re.IGNORECASE)
_HOUR_SECONDS, _DAY_SECONDS = 3600, 86400


class Committed(NamedTuple):
    """A folder with a whole manifest."""

    folder: str
    manifest: Manifest

    @property
    def order(self) -> tuple[int, float]:
        return (self.manifest.step, self.manifest.created)


class Broken(NamedTuple):
    """A folder whose manifest is damaged, or cannot be read."""

    folder: str
    step: int
    why: str


class Listing(NamedTuple):
    """What a store holds of one lineage, newest first. `torn` was never committed; `foreign` is of another lineage,
    `unknown` looks like a checkpoint that somebody else wrote.
    """

    committed: list[Committed]
    broken: list[Broken]
    torn: list[str]
    foreign: list[str]
    unknown: list[str] = []  # noqa: RUF012 (never changed in place: each listing is made with its own)


class Retained(NamedTuple):
    """What retention did: the folders that are gone, and what there is to say."""

    deleted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def folder_name(step: int, lineage: str, session: str, save: int) -> str:
    """A folder that was never there: the session is drawn anew by each attempt, `save` counts within it."""
    return f"step-{step:08d}-{tag(lineage)}-{session}-{save}"


def look(store: Store, lineage: str, known: MutableMapping[str, Committed] | None = None) -> Listing:
    """Reads every manifest, but for those in `known`, which it adds to: a committed one never changes. Folders of other
    lineages are told apart by their name, and never opened.

    Raises: OSError.
    """
    keys = set(store.list())
    found = Listing([], [], [], [], [])
    known = {} if known is None else known
    for folder in sorted({key.split("/", 1)[0] for key in keys if "/" in key}):
        match = _FOLDER.match(folder)
        if match is None:
            found.unknown.extend([folder] if _LIKE_ONE.match(folder) else [])
        elif match.group(2) != tag(lineage):
            found.foreign.append(folder)
        elif f"{folder}/{MANIFEST}" not in keys:
            found.torn.append(folder)
        elif folder in known:
            found.committed.append(known[folder])
        else:
            _open(store, folder, lineage, found)
    known.update({item.folder: item for item in found.committed})
    found.committed.sort(key=lambda item: item.order, reverse=True)
    found.broken.sort(key=lambda item: item.step, reverse=True)
    return found


def kept(
    committed: Sequence[Committed],
    *,
    keep: int,
    history: History = History(),  # noqa: B008 (a frozen value)
    pinned: Collection[str] = (),
    best: Collection[str] = (),
    protected: Collection[str] = (),
    bad: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """The folders that stay, each with the reasons; newest first. What is `bad` stays by a pin or protection alone."""
    ordered = sorted(committed, key=lambda item: item.order, reverse=True)
    good = [item for item in ordered if item.folder not in bad]
    reasons = {
        "newest": {item.folder for item in good[: max(keep, 1)]},
        "hourly": _last_of_each(good, _HOUR_SECONDS, history.hourly),
        "daily": _last_of_each(good, _DAY_SECONDS, history.daily),
        "best": set(best) - set(bad),
        "pinned": set(pinned),
        "in use": set(protected),
    }
    found = {item.folder: tuple(why for why, held in reasons.items() if item.folder in held) for item in ordered}
    return {folder: why for folder, why in found.items() if why}


def _last_of_each(newest_first: Sequence[Committed], seconds: int, count: int) -> set[str]:
    """The newest checkpoint of each of the last `count` spans of time that have one."""
    spans: dict[int, str] = {}
    for item in newest_first:
        if len(spans) < count:
            spans.setdefault(int(item.manifest.created // seconds), item.folder)
    return set(spans.values())


def surplus(
    committed: Sequence[Committed],
    *,
    keep: int,
    current: str,
    bad: Collection[str] = (),
    history: History = History(),  # noqa: B008 (a frozen value)
    pinned: Collection[str] = (),
    best: Collection[str] = (),
) -> list[str]:
    """The folders to delete, oldest first, now that `current` is committed.

    What is known to be damaged counts for nothing, and goes once it is older than `keep` whole ones: until then it may
    be what is left of the run.
    """
    ordered = sorted(committed, key=lambda item: item.order)
    stay = kept(committed, keep=keep, history=history, pinned=pinned, best=best, protected=[current], bad=bad)
    newest = [item.order for item in ordered if "newest" in stay.get(item.folder, ())]
    oldest = newest[0] if len(newest) >= max(keep, 1) else (0, 0.0)
    return [
        item.folder for item in ordered if item.folder not in stay and (item.folder not in bad or item.order < oldest)
    ]


def best_of(scored: Mapping[str, float], count: int, *, highest: bool = False) -> list[str]:
    """The `count` folders with the best scores, the best first; of equals the one that sorts last, the newest."""
    ordered = sorted(scored.items(), key=lambda pair: (pair[1] if highest else -pair[1], pair[0]), reverse=True)
    return [folder for folder, _ in ordered[:count]]


def verify_commit(store: Store, folder: str) -> Manifest:
    """Reads a commit back: its manifest with its digest, and of each file whether it ends where it should.

    Not every byte: those were digested as they were written, and are against the same digests before they are loaded.
    Raises: Damaged, OSError.
    """
    try:
        manifest = read_manifest(store, folder)
    except FileNotFoundError as error:
        raise Damaged(f"{folder} has no manifest.", why="it was deleted, or was never committed") from error
    for file in manifest.files:
        key, last = f"{folder}/{file.name}", max(0, file.bytes - 1)
        there = len(read_stored(store, key, last, 2))
        if there != file.bytes - last:
            raise Damaged(f"{key} is damaged.", why=f"it does not end after {file.bytes} bytes")
    return manifest


def retain(
    store: Store,
    lineage: str,
    policy: CheckpointPolicy,
    current: str,
    *,
    session: str = "",
    bad: Collection[str] = (),
    in_flight: Collection[str] = (),
    known: MutableMapping[str, Committed] | None = None,
) -> Retained:
    """After the commit of `current`: deletes what `policy` no longer keeps and what was never committed.

    Deletes nothing before `current` is read back (`verify_commit`); a damaged one is passed over from then on. One
    process may call it at a time. What fails is in the notes: it never fails the run. A torn folder of another session
    goes once it is older than `current`; until then it may be in progress, and stands in nobody's way.
    """
    try:
        step = verify_commit(store, current).step
        read_back = {current, *(known or {})}
        listing = look(store, lineage, known)
        bad = {*bad, *marks.passed_over(store)} - {current}
        bad |= _damaged(store, listing, policy.keep, bad, read_back)
        old = surplus(
            listing.committed, keep=policy.keep, current=current, bad=bad, history=policy.history,
            pinned=[*marks.pinned(store), *in_flight], best=_best(store, listing, policy, bad),
        )  # fmt: skip
    except Exception as error:
        notes = [f"no old checkpoint was deleted: {type(error).__name__}: {error}"]
        return Retained(notes=(*notes, *(_not_counted(store, current, error) if isinstance(error, Damaged) else ())))
    torn = [folder for folder in listing.torn if folder not in in_flight and _over(folder, session, step)]
    deleted, notes = _delete_all(store, [*torn, *old], known)
    left = {item.folder for item in listing.committed} | {item.folder for item in listing.broken}
    notes += _without_orphans(store, lineage, left - set(deleted))
    return Retained(tuple(deleted), tuple(notes))


def delete_folder(store: Store, folder: str) -> int:
    """Deletes a checkpoint, its manifest first, so that it is absent before it is torn; returns how many keys.

    Raises: OSError.
    """
    store.delete(f"{folder}/{MANIFEST}")
    keys = store.list(f"{folder}/")
    for key in keys:
        store.delete(key)
    return len(keys)


def tag(lineage: str) -> str:
    """What stands for a lineage in the names of its folders."""
    return digest_of(lineage.encode())[:6]


def step_of(folder: str) -> int:
    """The step in a folder's name; -1 for a name of another kind."""
    match = _FOLDER.match(folder)
    return int(match.group(1)) if match else -1


def _open(store: Store, folder: str, lineage: str, found: Listing) -> None:
    try:
        manifest = read_manifest(store, folder)
    except FileNotFoundError:
        found.torn.append(folder)
    except Damaged as error:
        found.broken.append(Broken(folder, step_of(folder), error.why))
    except OSError as error:  # of one of them: where the store itself is out of reach, nothing was listed
        found.broken.append(Broken(folder, step_of(folder), f"its manifest cannot be read: {error.strerror or error}"))
    else:
        if manifest.lineage == lineage:
            found.committed.append(Committed(folder, manifest))
        else:
            found.foreign.append(folder)


def _damaged(store: Store, listing: Listing, keep: int, bad: Collection[str], read_back: Collection[str]) -> set[str]:
    """Of the newest that would be kept those that cannot be read back, which are passed over from now on.

    A process that was killed may have left one that nobody has looked at. Raises: OSError.
    """
    found: set[str] = set()
    whole = 0
    for item in listing.committed:
        if whole >= max(keep, 1):
            break
        if item.folder in bad:
            continue
        try:
            if item.folder not in read_back:
                verify_commit(store, item.folder)
            whole += 1
        except Damaged as error:
            found.add(item.folder)
            marks.pass_over(store, item.folder, f"it could not be read back: {error.why}")
    return found


def _not_counted(store: Store, folder: str, error: Damaged) -> list[str]:
    """What cannot be read back takes no other's place among the newest."""
    try:
        marks.pass_over(store, folder, f"it could not be read back after its commit: {error.why}")
    except Exception as trouble:
        return [f"{folder} was not marked as damaged: {type(trouble).__name__}: {trouble}"]
    return []


def _best(store: Store, listing: Listing, policy: CheckpointPolicy, bad: Collection[str]) -> list[str]:
    if policy.best == 0:
        return []
    direction, _, name = policy.best_by.partition(" ")
    there = {item.folder for item in listing.committed} - set(bad)
    scored = {f: s.values[name] for f, s in marks.scores(store).items() if f in there and name in s.values}
    return best_of(scored, policy.best, highest=direction == "highest")


def _over(folder: str, session: str, step: int) -> bool:
    """Whether nobody can be writing a torn folder any more: it is this session's, or older than what is committed."""
    match = _FOLDER.match(folder)
    return match is not None and (match.group(3) == session or int(match.group(1)) < step)


def _delete_all(
    store: Store, folders: Sequence[str], known: MutableMapping[str, Committed] | None
) -> tuple[list[str], list[str]]:
    """Each by itself: what cannot be deleted keeps no other from it."""
    deleted: list[str] = []
    notes: list[str] = []
    for folder in folders:
        try:
            # It may have been pinned since it was chosen.
            if not store.exists(marks.PINNED + folder):
                delete_folder(store, folder)
                deleted.append(folder)
                (known or {}).pop(folder, None)
        except Exception as error:
            notes.append(f"{folder} was not deleted: {type(error).__name__}: {error}")
    return deleted, notes


def _without_orphans(store: Store, lineage: str, left: Collection[str]) -> list[str]:
    """Removes what is said of this lineage's checkpoints that are gone."""
    try:
        for folder, keys in marks.marked(store.list(".")).items():
            if folder not in left and _FOLDER.match(folder) and f"-{tag(lineage)}-" in folder:
                for key in keys:
                    store.delete(key)
    except Exception as error:
        return [f"marks of checkpoints that are gone were not deleted: {type(error).__name__}: {error}"]
    return []
