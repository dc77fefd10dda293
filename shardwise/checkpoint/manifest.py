"""The manifest: what a checkpoint holds, with a digest of every byte, its own too. Writing it is the
commit.
"""

import math
from typing import Any, Literal

import msgspec
import xxhash

from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.regions import Region, doubled, is_grid, missing, overlap, whole

MANIFEST = "manifest.json"
Json = Any
_PIECE_BYTES = 8 * 2**20


class Damaged(CheckpointError):
    """What is stored is not what was saved: a digest differs, or something is missing or cut short."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen part of the manifest; unknown keys are errors."""


class Chunk(Record, frozen=True):
    """A region of a tensor: where its bytes lie in which file, and their digest."""

    file: str
    start: int
    bytes: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


class TensorEntry(Record, frozen=True):
    """A logical tensor. Its chunks cover it once. `sum` is root.py's, "" in a manifest of version 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    sum: str = ""


class FileEntry(Record, frozen=True):
    name: str
    bytes: int
    digest: str


class Machine(Record, frozen=True):
    """What the bits of a CPU run depend on. `revision` of the repository in which the script lies, "" outside one."""

    versions: dict[str, str]
    torch_threads: int
    cpu_capability: str
    revision: str = ""


class Manifest(Record, frozen=True):
    """A committed checkpoint.

    `state` holds what is the same on all ranks, `state_by_rank` what is not, by part. `aliases` names tied
    tensors and the one that was stored. `samples` is the global position; None where nobody counts. `root` is the
    same for the same state under every plan (root.py). `plan` is the whole plan with its recipe, where there was one.
    Version 1 had neither, and is read still.
    """

    step: int
    created: float
    why: str
    world: int
    lineage: str
    plan_digest: str
    decision: Json
    samples: int | None
    machine: Machine
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    state: dict[str, Json]
    state_by_rank: dict[str, tuple[Json, ...]]
    root: str = ""
    plan: Json = None
    schema_version: Literal[1, 2] = 2

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def state_of(self, part: str, rank: int) -> Json:
        """A rank's JSON of a part; None where the part, or the rank's share of it, was not saved."""
        if part in self.state:
            return self.state[part]
        ranks = self.state_by_rank.get(part, ())
        return ranks[rank] if rank < len(ranks) else None

    def parts(self) -> set[str]:
        return {*self.state, *self.state_by_rank}


class _Sealed(Record, frozen=True):
    digest: str
    manifest: msgspec.Raw


def digest_of(data: bytes | memoryview) -> str:
    """xxh3, 128 bits, in hex: against accidents, not against an adversary."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(manifest: Manifest) -> bytes:
    """The manifest as JSON, wrapped with the digest of that JSON."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(digest=digest_of(body), manifest=msgspec.Raw(body)))


def unseal(raw: bytes, where: str) -> Manifest:
    """The inverse of `seal`.

    Raises: Damaged.
    """
    try:
        sealed = msgspec.json.decode(raw, type=_Sealed)
        if digest_of(bytes(sealed.manifest)) != sealed.digest:
            raise _damaged(where, "its digest is not that of its content")
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(where, str(error)) from error
    fault = _foreign(manifest)
    if fault:
        raise _damaged(where, fault)
    return manifest


def _foreign(manifest: Manifest) -> str:
    """What no save of ours writes: names that lead out of the folder, and chunks that are nowhere; "" without it."""
    names = {file.name for file in manifest.files}
    for name in sorted(names):
        if name in ("", ".", "..", MANIFEST) or set(name) & set("/\\\0"):
            return f"it names a file {name!r}, which is not one of its folder's"
    for entry in manifest.tensors:
        for chunk in entry.chunks:
            sizes = (*chunk.shape, *chunk.offsets, chunk.start, chunk.bytes)
            if chunk.file not in names or not len(chunk.shape) == len(chunk.offsets) == len(entry.shape):
                return f"a chunk of {entry.name!r} is in no file of it, or has other dims than the tensor"
            if min(sizes) < 0:
                return f"a chunk of {entry.name!r} has a negative size or place"
    return ""


def read_manifest(store: Store, folder: str) -> Manifest:
    """Raises: Damaged, FileNotFoundError (not committed), OSError."""
    key = f"{folder}/{MANIFEST}"
    return unseal(store.read(key), key)


def verify_file(store: Store, folder: str, file: FileEntry) -> None:
    """Reads a file once, piece by piece, against its digest.

    Raises: Damaged.
    """
    key = f"{folder}/{file.name}"
    hasher, seen = xxhash.xxh3_128(), 0
    while seen <= file.bytes:
        piece = read_stored(store, key, seen, _PIECE_BYTES)
        hasher.update(piece)
        seen += len(piece)
        if len(piece) < _PIECE_BYTES:
            break
    if seen != file.bytes:
        raise _damaged(key, f"{seen} bytes or more are there, {file.bytes} were written")
    if hasher.hexdigest() != file.digest:
        raise _damaged(key, "its digest is not the one in the manifest")


def read_chunk(store: Store, folder: str, chunk: Chunk) -> bytes:
    """The verified bytes of a chunk.

    Raises: Damaged.
    """
    key = f"{folder}/{chunk.file}"
    data = read_stored(store, key, chunk.start, chunk.bytes)
    if len(data) != chunk.bytes or digest_of(data) != chunk.digest:
        raise _damaged(key, f"the chunk at byte {chunk.start} has another digest than the manifest says")
    return data


def read_stored(store: Store, key: str, start: int, length: int) -> bytes:
    """Raises: Damaged where the key is gone."""
    try:
        return store.read(key, start, length)
    except FileNotFoundError as error:
        raise _damaged(key, "it is not there") from error


def fault_of(entry: TensorEntry) -> str:
    """What keeps a tensor's chunks from covering it once, region and files named; "" where they do."""
    held, shape = [Region(chunk.offsets, chunk.shape) for chunk in entry.chunks], list(entry.shape)
    if is_grid(shape, held):
        return ""
    outside = next((region for region in held if region.numel and overlap(region, whole(shape)) != region), None)
    if outside is not None:
        return f"{outside} was written, which is outside its shape {shape}"
    twice = doubled(held)
    if twice is not None:
        files = [c.file for c in entry.chunks if overlap(twice, Region(c.offsets, c.shape))]
        return f"{twice} of {shape} was written more than once, in {', '.join(files)}"
    # Inside, and disjoint: the sizes tell whether they are all of it.
    if sum(region.numel for region in held) == math.prod(shape):
        return ""
    return f"{missing(shape, held)} of {shape} was written by no rank"


def _damaged(key: str, why: str) -> Damaged:
    return Damaged(f"{key} is damaged.", why=why, fix="resume takes the checkpoint before it; check the disk")
