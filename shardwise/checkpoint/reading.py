"""Files read once: whole ones against their digest, and out of them the chunks that a rank wants. No torch."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from shardwise.checkpoint.lease import Leased
from shardwise.checkpoint.manifest import Chunk, Damaged, FileEntry, read_stored
from shardwise.checkpoint.store import LocalStore, Store

# Of a file at a time: small enough for a cache, large enough for a disk or a network; so many are read ahead.
PIECE_BYTES = 4 * 2**20
AHEAD = 2


class Wanted(NamedTuple):
    """A chunk; what gives the memory for its bytes when they come; what is done with it once they are verified."""

    chunk: Chunk
    memory: Callable[[], memoryview]
    then: Callable[[memoryview], None]


def read_file(
    store: Store, folder: str, file: FileEntry, wanted: Sequence[Wanted], *, whole: bool, alone: bool = False
) -> None:
    """Fills the memory of every wanted chunk, against its digest. With `whole` the file is read to its end, against its
    own digest too; else no more than the chunks are read. `alone`: no other process of this node reads most of it, so
    that it may as well be read past the page cache.

    Raises: Damaged, OSError.
    """
    key = f"{folder}/{file.name}"
    ordered = sorted(wanted, key=lambda one: one.chunk.start)
    if not whole:
        for one in ordered:
            _fill_alone(store, key, one)
        return
    hasher, position, left = xxhash.xxh3_128(), 0, [one for one in reversed(ordered) if one.chunk.bytes]
    for one in ordered:
        if not one.chunk.bytes:
            _fill_alone(store, key, one)
    open_chunks: list[_Filling] = []
    for piece in _stream(store, key, file.bytes) if alone else _pieces(store, key, file.bytes):
        hasher.update(piece)
        end = position + len(piece)
        while left and left[-1].chunk.start < end:
            open_chunks.append(_Filling(left.pop()))
        open_chunks = [one for one in open_chunks if not one.take(memoryview(piece), position, key)]
        position = end
    if position != file.bytes:
        raise _damaged(key, f"{position} bytes or more are there, {file.bytes} were written")
    if hasher.hexdigest() != file.digest:
        raise _damaged(key, "its digest is not the one in the manifest")
    if left or open_chunks:
        raise _damaged(key, "a chunk of the manifest lies beyond its end")


class _Filling:
    """A chunk of which some bytes may be there."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.memory, self.hasher, self.filled = wanted, wanted.memory(), xxhash.xxh3_128(), 0
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def take(self, piece: memoryview, position: int, key: str) -> bool:
        """Of a piece that begins at `position` what belongs to the chunk; True where that completes it."""
        chunk = self.wanted.chunk
        begin = chunk.start + self.filled - position
        part = piece[begin : begin + chunk.bytes - self.filled]
        self.hasher.update(part)
        # NumPy lets other threads run meanwhile; a slice of a memoryview does not.
        np.copyto(self.bytes[self.filled : self.filled + len(part)], np.frombuffer(part, np.uint8))
        self.filled += len(part)
        if self.filled < chunk.bytes:
            return False
        self.end(key)
        return True

    def end(self, key: str) -> None:
        chunk = self.wanted.chunk
        if self.hasher.hexdigest() != chunk.digest:
            raise _damaged(key, f"the chunk at byte {chunk.start} has another digest than the manifest says")
        self.wanted.then(self.memory)


def _fill_alone(store: Store, key: str, wanted: Wanted) -> None:
    chunk, filling = wanted.chunk, _Filling(wanted)
    if not chunk.bytes:
        filling.end(key)
    for start in range(0, chunk.bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, chunk.bytes - start)
        piece = read_stored(store, key, chunk.start + start, length)
        if len(piece) != length:
            raise _damaged(key, f"it ends inside the chunk at byte {chunk.start}")
        filling.take(memoryview(piece), chunk.start + start, key)


def _stream(store: Store, key: str, size: int) -> Iterator[bytes | memoryview]:
    """As `_pieces`, past the page cache where the store lies on a disk."""
    inner = store.store if isinstance(store, Leased) else store
    if not isinstance(inner, LocalStore):
        yield from _pieces(store, key, size)
        return
    try:
        yield from inner.stream(key, size)
    except FileNotFoundError as error:
        raise _damaged(key, "it is not there") from error


def _pieces(store: Store, key: str, size: int) -> Iterator[bytes]:
    """The file from its beginning, a piece beyond `size` bytes where there is more; a thread reads ahead."""
    ready: queue.Queue[bytes | Exception] = queue.Queue(AHEAD)
    enough = threading.Event()

    def fetch() -> None:
        position = 0
        try:
            while position <= size and not enough.is_set():
                piece = read_stored(store, key, position, PIECE_BYTES)
                ready.put(piece)
                position += len(piece)
                if len(piece) < PIECE_BYTES:
                    break
            ready.put(b"")
        except Exception as error:
            ready.put(error)

    threading.Thread(target=fetch, name="shardwise-reading", daemon=True).start()
    try:
        while piece := ready.get():
            if isinstance(piece, Exception):
                raise piece
            yield piece
    finally:
        enough.set()
        while not ready.empty():  # Room for the piece that the thread may be waiting to hand over.
            ready.get_nowait()


def _damaged(key: str, why: str) -> Damaged:
    return Damaged(f"{key} is damaged.", why=why, fix="resume takes the checkpoint before it; check the disk")
