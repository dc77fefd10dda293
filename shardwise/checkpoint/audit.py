"""A checkpoint looked at from outside, byte by byte: no ranks, no torch, and nothing in it is run or unpacked."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import xxhash

from shardwise.checkpoint import marks
from shardwise.checkpoint.files import ITEM_BYTES
from shardwise.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Damaged,
    FileEntry,
    Manifest,
    TensorEntry,
    digest_of,
    fault_of,
    read_manifest,
    read_stored,
)
from shardwise.checkpoint.retention import step_of, verify_commit
from shardwise.checkpoint.root import added, region_sum, root_of
from shardwise.checkpoint.store import Store
from shardwise.regions import Region

# Bytes that no tensor has, a header or what was added at the end, are read so many at a time.
_PIECE_BYTES = 4 * 2**20


class Fault(msgspec.Struct, frozen=True):
    """What is wrong in a checkpoint. `tensor` and the bytes from `begin` to before `end` of the file, where known."""

    file: str
    what: str
    tensor: str = ""
    begin: int = 0
    end: int = 0


class Audit(msgspec.Struct, frozen=True):
    """What was found of one checkpoint. `root` as recomputed, "" without sums; `foreign`: files not its own."""

    folder: str
    step: int
    bytes: int
    root: str
    faults: tuple[Fault, ...]
    foreign: tuple[str, ...] = ()


class Item(msgspec.Struct, frozen=True):
    """A line of a list. `state`: whole (the manifest is, and files end where they should), damaged, torn (it was never
    committed). `marks`: pinned, passed over.
    """

    folder: str
    step: int
    state: str
    why: str = ""
    world: int = 0
    plan: str = ""
    bytes: int = 0
    created: float = 0.0
    root: str = ""
    lineage: str = ""
    samples: int | None = None
    marks: tuple[str, ...] = ()


def survey(store: Store) -> list[Item]:
    """Every checkpoint in a store, of whatever lineage, newest first; other folders are left out. Raises: OSError."""
    keys = set(store.list())
    told = {folder: ["pinned"] for folder in marks.pinned(store)}
    for folder in marks.passed_over(store):
        told.setdefault(folder, []).append("passed over")
    folders = {key.split("/", 1)[0] for key in keys if "/" in key}
    ours = sorted(folder for folder in folders if step_of(folder) >= 0 or f"{folder}/{MANIFEST}" in keys)
    items = [_item(store, folder, tuple(told.get(folder, ())), f"{folder}/{MANIFEST}" in keys) for folder in ours]
    return sorted(items, key=lambda item: (item.step, item.created), reverse=True)


def audit(store: Store, folder: str) -> Audit:
    """Reads every byte of every file against its digests, and makes the root anew. Host memory: the largest chunk once.

    Raises: Damaged where the manifest is damaged or is not there; OSError.
    """
    try:
        manifest = read_manifest(store, folder)
    except FileNotFoundError as error:
        raise Damaged(f"{folder} has no manifest.", why="it was deleted, or was never committed") from error
    faults = [Fault("", fault, entry.name) for entry in manifest.tensors if (fault := fault_of(entry))]
    sums: dict[str, list[str]] = {entry.name: [] for entry in manifest.tensors}
    for file in manifest.files:
        for one in _read(store, folder, file, _held(manifest, file)):
            if isinstance(one, Fault):
                faults.append(one)
            else:
                sums[one.tensor].append(one.sum)
    if not faults:
        faults = _of_sums(manifest, sums)
    root = root_of(manifest.step, [_with(entry, sums) for entry in manifest.tensors], manifest.state)
    known = {MANIFEST, *(file.name for file in manifest.files)}
    found = [key.split("/", 1)[1] for key in store.list(f"{folder}/")]
    foreign = tuple(name for name in found if name not in known)
    return Audit(folder, manifest.step, manifest.bytes, root if manifest.root else "", tuple(faults), foreign)


class _Summed(NamedTuple):
    tensor: str
    sum: str


class _Part(NamedTuple):
    entry: TensorEntry
    chunk: Chunk


def _held(manifest: Manifest, file: FileEntry) -> list[_Part]:
    parts = [_Part(entry, chunk) for entry in manifest.tensors for chunk in entry.chunks if chunk.file == file.name]
    return sorted(parts, key=lambda part: part.chunk.start)


def _read(store: Store, folder: str, file: FileEntry, parts: list[_Part]) -> Iterator[Fault | _Summed]:
    """A file from its first byte to its last: of each chunk its sum, or what is wrong with it."""
    key, hasher, position, found = f"{folder}/{file.name}", xxhash.xxh3_128(), 0, False
    for entry, chunk in parts:
        if chunk.start < position or chunk.start + chunk.bytes > file.bytes:
            yield Fault(file.name, "lies over another, or beyond the file's end", entry.name, chunk.start, _end(chunk))
            return
        try:
            for piece in _pieces(store, key, position, chunk.start):
                hasher.update(piece)
                position += len(piece)
            data = read_stored(store, key, chunk.start, chunk.bytes)
        except Damaged as error:
            yield Fault(file.name, error.why)
            return
        hasher.update(data)
        position += len(data)
        if position < _end(chunk):
            yield Fault(file.name, f"ends after {position} of {file.bytes} bytes", entry.name, position, _end(chunk))
            return
        if digest_of(data) != chunk.digest:
            found = True
            yield Fault(file.name, "has another digest than was saved", entry.name, chunk.start, _end(chunk))
        else:
            region = Region(chunk.offsets, chunk.shape)
            yield _Summed(entry.name, region_sum(data, ITEM_BYTES[entry.dtype], entry.shape, region))
    yield from _rest(store, key, file, position, hasher, parts, found)


def _rest(
    store: Store, key: str, file: FileEntry, position: int, hasher: xxhash.xxh3_128, parts: list[_Part], found: bool
) -> Iterator[Fault]:
    """Behind the last chunk, and what no chunk explains."""
    try:
        for piece in _pieces(store, key, position, file.bytes):
            hasher.update(piece)
            position += len(piece)
        beyond = len(read_stored(store, key, file.bytes, 1))
    except Damaged as error:
        yield Fault(file.name, error.why)
        return
    if position < file.bytes:
        yield Fault(file.name, f"ends after {position} of {file.bytes} bytes", "", position, file.bytes)
    elif beyond:
        yield Fault(file.name, f"goes on behind its {file.bytes} bytes", "", file.bytes, file.bytes + 1)
    elif not found and hasher.hexdigest() != file.digest:
        header = parts[0].chunk.start if parts else file.bytes
        yield Fault(file.name, "has another header than was saved", "", 0, header)


def _pieces(store: Store, key: str, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        piece = read_stored(store, key, begin, min(_PIECE_BYTES, end - begin))
        if not piece:
            return
        yield piece
        begin += len(piece)


def _of_sums(manifest: Manifest, sums: dict[str, list[str]]) -> list[Fault]:
    """Where every byte is as it was written, and yet is not what the manifest says of the tensors."""
    if not manifest.root:
        return []
    wrong = [
        Fault("", "its sum is not the one in the manifest", entry.name)
        for entry in manifest.tensors
        if added(sums[entry.name]) != entry.sum
    ]
    if not wrong and root_of(manifest.step, manifest.tensors, manifest.state) != manifest.root:
        wrong.append(Fault(MANIFEST, "its root is not that of its tensors and state"))
    return wrong


def _with(entry: TensorEntry, sums: dict[str, list[str]]) -> TensorEntry:
    return msgspec.structs.replace(entry, sum=added(sums[entry.name]))


def _end(chunk: Chunk) -> int:
    return chunk.start + chunk.bytes


def _item(store: Store, folder: str, said: tuple[str, ...], committed: bool) -> Item:
    step = max(step_of(folder), 0)
    if not committed:
        return Item(folder, step, "torn", why="it was never committed", marks=said)
    try:
        manifest = verify_commit(store, folder)
    except Damaged as error:
        return Item(folder, step, "damaged", why=f"{error.what} {error.why}", marks=said)
    return Item(
        folder, manifest.step, "whole", why=manifest.why, world=manifest.world, plan=_plan(manifest),
        bytes=manifest.bytes, created=manifest.created, root=manifest.root, lineage=manifest.lineage,
        samples=manifest.samples, marks=said,
    )  # fmt: skip


def _plan(manifest: Manifest) -> str:
    """`pp 2 x tp 2, zero 1`, as far as the manifest has a decision."""
    decision = manifest.decision if isinstance(manifest.decision, dict) else {}
    mesh = decision.get("mesh", {})
    axes = [f"{axis} {degree}" for axis, degree in mesh.items() if isinstance(degree, int) and degree > 1]
    zero = [f"zero {decision['zero']}"] if "zero" in decision else []
    return ", ".join([" x ".join(axes)] * bool(axes) + zero)
