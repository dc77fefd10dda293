"""Which checkpoints are there, which may go, and their removal: only after a commit, only this run's own."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shardwise.checkpoint.manifest import MANIFEST, Damaged, Manifest, digest_of, read_manifest
from shardwise.checkpoint.store import Store

_FOLDER = re.compile(r"^step-(\d{8,})-([0-9a-f]{6})-[0-9a-f]{8}-\d+$")


class Committed(NamedTuple):
    """A folder with a whole manifest."""

    folder: str
    manifest: Manifest

    @property
    def order(self) -> tuple[int, float]:
        return (self.manifest.step, self.manifest.created)


class Broken(NamedTuple):
    """A folder whose manifest is damaged."""

    folder: str
    step: int
    why: str


class Listing(NamedTuple):
    """What a store holds of one lineage, newest first. `torn` was never committed."""

    committed: list[Committed]
    broken: list[Broken]
    torn: list[str]
    foreign: list[str]


def folder_name(step: int, lineage: str, session: str, save: int) -> str:
    """A folder that was never there: the session is drawn anew by each attempt, `save` counts within it."""
    return f"step-{step:08d}-{_tag(lineage)}-{session}-{save}"


def look(store: Store, lineage: str) -> Listing:
    """Reads every manifest. Folders of other lineages are told apart by their name and never opened.

    Raises: OSError.
    """
    keys = store.list()
    found = Listing([], [], [], [])
    for folder in sorted({key.split("/", 1)[0] for key in keys if "/" in key}):
        match = _FOLDER.match(folder)
        if match is None:
            continue
        if match.group(2) != _tag(lineage):
            found.foreign.append(folder)
        elif f"{folder}/{MANIFEST}" not in keys:
            found.torn.append(folder)
        else:
            _open(store, folder, int(match.group(1)), found)
    found.committed.sort(key=lambda item: item.order, reverse=True)
    found.broken.sort(key=lambda item: item.step, reverse=True)
    return found


def surplus(committed: Sequence[Committed], *, keep: int, current: str, bad: Collection[str] = ()) -> list[str]:
    """The folders to delete, oldest first, now that `current` is committed.

    The newest `keep` stay, by step and then by time, and so does `current`. What is known to be damaged
    counts for nothing, and goes once it is older than all that stay.
    """
    ordered = sorted(committed, key=lambda item: item.order)
    good = [item for item in ordered if item.folder not in bad]
    stay = {item.folder for item in good[-max(keep, 1) :]} | {current}
    oldest = min((item.order for item in ordered if item.folder in stay), default=(0, 0.0))
    return [
        item.folder for item in ordered if item.folder not in stay and (item.folder not in bad or item.order < oldest)
    ]


def delete_folder(store: Store, folder: str) -> int:
    """Deletes a checkpoint, its manifest first, so that it is absent before it is torn; returns how many
    keys.

    Raises: OSError.
    """
    store.delete(f"{folder}/{MANIFEST}")
    keys = store.list(f"{folder}/")
    for key in keys:
        store.delete(key)
    return len(keys)


def _open(store: Store, folder: str, step: int, found: Listing) -> None:
    try:
        found.committed.append(Committed(folder, read_manifest(store, folder)))
    except FileNotFoundError:
        found.torn.append(folder)
    except Damaged as error:
        found.broken.append(Broken(folder, step, error.why))


def _tag(lineage: str) -> str:
    return digest_of(lineage.encode())[:6]
