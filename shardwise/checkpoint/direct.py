"""Large files of a disk past its page cache, in a thread: digests are taken of one block while another is on its way.
No torch.

A checkpoint is written once and seldom read. Through the cache it pushes out what training reads, costs a copy by the
core that takes the digests, and comes in bursts when the kernel finds that there is too much to write back: 512 MiB by
each of two cores took 0.45 to 0.65 s past it, and 0.67 to 5 s through it (benchmarks/RESULTS.md, checkpoints).

The blocks lie in huge pages: a disk's request has a limited number of pieces (254 here), which small pages use up after
a MiB. Read that way, 512 MiB took 0.22 to 0.29 s, in small pages 0.56 to 0.84 s.

Where a file system has no O_DIRECT (EINVAL, when it is opened or first used) the same goes through the cache, into the
same file.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

# A multiple of any disk's block; large enough for its full rate, small enough for a cache.
BLOCK_BYTES = 4 * 2**20
# One is filled or hashed, one is on its way, one waits.
BUFFERS = 3
HUGE_PAGE_BYTES = 2 * 2**20  # On x86-64 and most others; where it is another size the blocks are only not all huge.

Block = npt.NDArray[np.uint8]


def write_new(path: Path, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """A file that was not there, durable when this returns. A piece may be overwritten once the next is asked for.

    Host memory: BUFFERS blocks. Raises: FileExistsError; OSError.
    """
    handle = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        rest, begun = iter(pieces), bytearray()
        for piece in rest:
            begun += piece
            if len(begun) >= BLOCK_BYTES:
                break
        if len(begun) < BLOCK_BYTES:
            _through_cache(handle)
            _write_all(handle, memoryview(begun), 0)
        else:
            with _Writer(handle) as file:
                file.write(begun)
                for piece in rest:
                    file.write(piece)
                file.finish()
        os.fsync(handle)
    finally:
        os.close(handle)


def read_blocks(path: Path, size: int) -> Iterator[memoryview]:
    """A file from its beginning, and where it is longer than `size`, some of what is beyond. A block is the caller's
    until the next is asked for.

    Raises: OSError.
    """
    handle = _opened(path, os.O_RDONLY)
    free: queue.Queue[Block | None] = queue.Queue()
    ready: queue.Queue[tuple[Block, int] | Exception] = queue.Queue()

    def fetch() -> None:
        position = 0
        try:
            while (block := free.get()) is not None:
                length = _read_some(handle, block, position)
                ready.put((block, length))
                position += length
                if length < BLOCK_BYTES or position > size:
                    ready.put((block, 0))
                    return
        except Exception as error:
            ready.put(error)

    for block in _blocks():
        free.put(block)
    thread = threading.Thread(target=fetch, name="shardwise-reading", daemon=True)
    thread.start()
    try:
        while True:
            got = ready.get()
            if isinstance(got, Exception):
                raise got
            block, length = got
            if not length:
                return
            yield block.data[:length]
            free.put(block)
    finally:
        free.put(None)
        thread.join()
        os.close(handle)


class _Writer:
    """The caller fills blocks, a thread writes them in order. What the thread meets is raised by the next call."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._free: queue.Queue[Block] = queue.Queue()
        self._full: queue.Queue[tuple[Block, int] | None] = queue.Queue()
        for block in _blocks():
            self._free.put(block)
        self._block, self._filled, self._position = self._free.get(), 0, 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shardwise-writing", daemon=True)
        self._thread.start()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        data = np.frombuffer(piece, np.uint8)
        while len(data):
            taken = data[: BLOCK_BYTES - self._filled]
            # NumPy lets other threads run meanwhile; a slice of a memoryview does not.
            np.copyto(self._block[self._filled : self._filled + len(taken)], taken)
            self._filled, data = self._filled + len(taken), data[len(taken) :]
            if self._filled == BLOCK_BYTES:
                self._full.put((self._block, self._position))
                self._block, self._filled, self._position = self._free.get(), 0, self._position + BLOCK_BYTES
                self._raise()

    def finish(self) -> None:
        """Waits for the thread, and writes what is left over."""
        self._full.put(None)
        self._thread.join()
        self._raise()
        # The last is no whole number of a disk's blocks.
        _through_cache(self._handle)
        _write_all(self._handle, self._block.data[: self._filled], self._position)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (given := self._full.get()) is not None:
            block, position = given
            try:
                if self._error is None:
                    _write_all(self._handle, block.data, position)
            except Exception as error:
                self._error = error
            self._free.put(block)


def _blocks() -> list[Block]:
    """BUFFERS of them, each at the beginning of a huge page where the kernel has them."""
    size = BUFFERS * BLOCK_BYTES
    # Not shared with anybody: only such memory is given huge pages.
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without them says EINVAL.
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Data workers are forked at any time, and a disk that writes into memory of both would serve one. Source: open(2).
    memory.madvise(mmap.MADV_DONTFORK)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE_BYTES
    return [whole[begin : begin + BLOCK_BYTES] for begin in range(first, first + size, BLOCK_BYTES)]


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some file systems have made the file before they refuse.
    if flags & os.O_EXCL:
        path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666)


def _through_cache(handle: int) -> None:
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)


def _write_all(handle: int, data: memoryview, position: int) -> None:
    while len(data):
        try:
            written = os.pwrite(handle, data, position)
        except OSError as error:
            if not _refused(handle, error):
                raise
            continue
        data, position = data[written:], position + written


def _read_some(handle: int, block: Block, position: int) -> int:
    """Fills the block, or as much of it as there is."""
    filled = 0
    while filled < len(block):
        try:
            got = os.preadv(handle, [block.data[filled:]], position + filled)
        except OSError as error:
            if not _refused(handle, error):
                raise
            continue
        if not got:
            break
        filled += got
        if filled % mmap.PAGESIZE:  # The end; going on from here would not lie as a disk asks for.
            _through_cache(handle)
    return filled


def _refused(handle: int, error: OSError) -> bool:
    """Whether it was O_DIRECT that was refused, which is off from now on."""
    direct = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
    if error.errno != errno.EINVAL or not direct:
        return False
    _through_cache(handle)
    return True
