"""A fork's beginning: a checkpoint of one run copied under the lineage of another, from any store to any. No torch.

Its manifest is created last, as every commit's is: a fork that dies on the way has nothing, and the same again ends it.
"""

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec
import xxhash

from shardwise.checkpoint import marks
from shardwise.checkpoint.manifest import MANIFEST, Damaged, FileEntry, Manifest, read_stored, seal
from shardwise.checkpoint.retention import Committed, look, tag, verify_commit
from shardwise.checkpoint.store import LocalStore, Store
from shardwise.errors import CheckpointError, RunFolderError

# Of a file at a time: a part of an object store's upload fits it twice.
PIECE_BYTES = 16 * 2**20


def beginnings(store: Store, lineage: str) -> list[Committed]:
    """What a run may begin at, newest first: committed, and passed over by no mark. Raises: OSError."""
    over = marks.passed_over(store)
    return [item for item in look(store, lineage).committed if item.folder not in over]


def begin(
    source: Store, found: Sequence[Committed], target: Store, lineage: str, tell: Callable[[str, str], None]
) -> str:
    """Copies the first of `found` that is whole; its folder in `target`. One that is damaged is told, and passed over.

    Raises: CheckpointError where none is; RunFolderError where `target` has checkpoints of this lineage already;
    OSError.
    """
    ours = {renamed(item.folder, lineage) for item in found}
    there = [item.folder for item in look(target, lineage).committed if item.folder not in ours]
    if there:
        raise RunFolderError(
            f"{target} holds checkpoints of a run of this name: {there[0]}.",
            why="the fork would go on with them, or delete them in time",
            fix="give the fork another name",
        )
    for item in found:
        try:
            return copied(source, item.folder, target, lineage)
        except Damaged as error:
            tell(f"the checkpoint {item.folder} was passed over", f"{error.what} {error.why}")
    raise CheckpointError(
        f"None of the {len(found)} checkpoints in {source} is whole.",
        why="every one of them was told above",
        fix="restore one from a backup",
    )


def copied(source: Store, folder: str, target: Store, lineage: str) -> str:
    """A checkpoint's folder in `target`: the same files, linked where both stores lie on one file system, else copied
    against their digests; the same manifest but for its lineage.

    Raises: Damaged where it is not what was saved, or is deleted meanwhile; OSError.
    """
    manifest, own = verify_commit(source, folder), renamed(folder, lineage)
    for file in manifest.files:
        if not _linked(source, f"{folder}/{file.name}", target, f"{own}/{file.name}"):
            target.write(f"{own}/{file.name}", _verified(source, f"{folder}/{file.name}", file))
    target.create(f"{own}/{MANIFEST}", seal(_belonging_to(manifest, lineage)))
    return own


def renamed(folder: str, lineage: str) -> str:
    """A checkpoint's folder as another lineage names it: the same whenever it is asked for."""
    return re.sub(r"^(step-\d+-)[0-9a-f]{6}", rf"\g<1>{tag(lineage)}", folder)


def _belonging_to(manifest: Manifest, lineage: str) -> Manifest:
    return msgspec.structs.replace(manifest, lineage=lineage)


def _linked(source: Store, key: str, target: Store, copy: str) -> bool:
    if not (isinstance(source, LocalStore) and isinstance(target, LocalStore)):
        return False
    return target.link(copy, source.root / key)


def _verified(store: Store, key: str, file: FileEntry) -> Iterator[bytes]:
    """A file's pieces. Raises: Damaged at its end, before a store publishes what it was given."""
    hasher, position = xxhash.xxh3_128(), 0
    while position < file.bytes:
        piece = read_stored(store, key, position, min(PIECE_BYTES, file.bytes - position))
        if not piece:
            break
        hasher.update(piece)
        position += len(piece)
        yield piece
    if hasher.hexdigest() != file.digest:
        raise Damaged(f"{key} is damaged.", why="its digest is not the one in the manifest", fix="check the disk")
