"""A rank's tensors as one safetensors file, streamed to a Store while its digests are taken. No torch."""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from shardwise.checkpoint.manifest import Chunk, FileEntry, TensorEntry
from shardwise.checkpoint.root import region_sum
from shardwise.checkpoint.store import Piece, Store
from shardwise.regions import Region

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


# Small enough to lie in a cache between being hashed and being written.
PIECE_BYTES = 4 * 2**20


class Content(NamedTuple):
    """A region of a tensor to be written. `load` gives its bytes, row by row; it is called once, in its
    turn.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    load: Callable[[], memoryview]

    @property
    def bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * self.region.numel


class Written(NamedTuple):
    """A file and, of each tensor in it, the one chunk that it holds."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]


def file_order(contents: Sequence[Content]) -> list[Content]:
    """Widest items first, so that every tensor is aligned to its own width."""
    return sorted(contents, key=lambda content: (-ITEM_BYTES[content.dtype], content.name))


def header(contents: Sequence[Content], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors header for the contents in this order, padded to eight bytes.

    Source: https://huggingface.co/docs/safetensors (format).
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for content in contents:
        span = [position, position + content.bytes]
        entries[content.name] = {"dtype": content.dtype, "shape": content.region.shape, "data_offsets": span}
        position += content.bytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


class _Sums:
    """Takes the tensors' sums in a thread beside the writing, in order; one is at work and one may wait.

    No executor: the interpreter ends those before it waits for a save that is under way.
    """

    def __init__(self) -> None:
        self._given: queue.Queue[tuple[Content, memoryview] | None] = queue.Queue(1)
        self._found: list[str] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shardwise-sums", daemon=True)
        self._thread.start()

    def add(self, content: Content, data: memoryview) -> None:
        self._given.put((content, data))

    def end(self) -> list[str]:
        self._given.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            content, data = given
            try:
                item = ITEM_BYTES[content.dtype]
                self._found.append(region_sum(data, item, content.shape, content.region))
            except Exception as error:
                self._error = error


def write_file(store: Store, folder: str, name: str, contents: Sequence[Content]) -> Written:
    """Writes one file and returns its digests; of what `load` copies three tensors are in memory at most.

    Raises: OSError.
    """
    ordered = file_order(contents)
    top = header(ordered)
    hasher, chunks, position = xxhash.xxh3_128(), list[Chunk](), len(top)
    sums = _Sums()

    def stream() -> Iterator[Piece]:
        nonlocal position
        hasher.update(top)
        yield top
        for content in ordered:
            data = content.load()
            sums.add(content, data)
            own = xxhash.xxh3_128()
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                own.update(piece)
                hasher.update(piece)
                yield piece
            region = content.region
            chunks.append(Chunk(name, position, len(data), region.offsets, region.shape, own.hexdigest()))
            position += len(data)

    try:
        store.write(f"{folder}/{name}", stream())
    finally:
        found = sums.end()
    entries = (
        TensorEntry(content.name, content.dtype, content.shape, (chunk,), total)
        for content, chunk, total in zip(ordered, chunks, found, strict=True)
    )
    return Written(FileEntry(name, position, hasher.hexdigest()), tuple(entries))
