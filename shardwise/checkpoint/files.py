"""A rank's tensors as one safetensors file, streamed to a Store while its digests are taken. No torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from shardwise.checkpoint.manifest import Chunk, FileEntry, TensorEntry, digest_of
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


def header(contents: Sequence[Content]) -> bytes:
    """A safetensors header for the contents in this order, padded to eight bytes.

    Source: https://huggingface.co/docs/safetensors (format).
    """
    entries, position = {}, 0
    for content in contents:
        span = [position, position + content.bytes]
        entries[content.name] = {"dtype": content.dtype, "shape": content.region.shape, "data_offsets": span}
        position += content.bytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def write_file(store: Store, folder: str, name: str, contents: Sequence[Content]) -> Written:
    """Writes one file, a tensor in host memory at a time, and returns its digests.

    Raises: OSError.
    """
    ordered = file_order(contents)
    top = header(ordered)
    hasher, entries, position = xxhash.xxh3_128(), [], len(top)

    def stream() -> Iterator[Piece]:
        nonlocal position
        hasher.update(top)
        yield top
        for content in ordered:
            data = content.load()
            hasher.update(data)
            entries.append(_entry(content, name, position, data))
            position += len(data)
            yield data

    store.write(f"{folder}/{name}", stream())
    return Written(FileEntry(name, position, hasher.hexdigest()), tuple(entries))


def _entry(content: Content, file: str, start: int, data: memoryview) -> TensorEntry:
    chunk = Chunk(file, start, len(data), content.region.offsets, content.region.shape, digest_of(data))
    part = region_sum(data, ITEM_BYTES[content.dtype], content.shape, content.region)
    return TensorEntry(content.name, content.dtype, content.shape, (chunk,), part)
