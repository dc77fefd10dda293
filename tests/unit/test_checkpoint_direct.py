"""Large files past the page cache: the same bytes whatever their size and pieces; faults are told, nothing is left."""

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardwise.checkpoint import direct
from shardwise.checkpoint.direct import BLOCK_BYTES, BUFFERS, read_blocks, write_new
from shardwise.checkpoint.manifest import Damaged, FileEntry, digest_of
from shardwise.checkpoint.reading import Wanted, read_file
from shardwise.checkpoint.store import LocalStore
from shardwise.checkpoint.store_errors import StoreError
from tests.unit.test_checkpoint_reading import wanted

SIZES = [0, 1, 4095, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, (BUFFERS + 2) * BLOCK_BYTES, 5 * BLOCK_BYTES + 777]


def made(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


def pieces(data: bytes, size: int) -> Iterator[memoryview]:
    """In one memory that is overwritten as soon as the next is asked for."""
    memory = bytearray(size)
    for start in range(0, len(data), size):
        part = data[start : start + size]
        memory[: len(part)] = part
        yield memoryview(memory)[: len(part)]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise")}


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_back_whatever_the_size(tmp_path: Path, size: int) -> None:
    data = made(size)
    for piece in (BLOCK_BYTES // 3 + 5, 3 * BLOCK_BYTES):
        path = tmp_path / f"of-{piece}"
        write_new(path, pieces(data, piece))
        assert path.read_bytes() == data
        assert b"".join(bytes(block) for block in read_blocks(path, size)) == data
    with pytest.raises(FileExistsError):
        write_new(path, [b"another"])
    assert path.read_bytes() == data and threads() == set()


@pytest.mark.parametrize("known", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES])
def test_a_file_that_is_longer_than_is_known_shows_it_and_is_not_read_to_its_end(tmp_path: Path, known: int) -> None:
    (tmp_path / "f").write_bytes(made(9 * BLOCK_BYTES))
    seen = sum(len(block) for block in read_blocks(tmp_path / "f", known))
    assert known < seen <= known + 2 * BLOCK_BYTES


def test_a_reader_that_is_left_early_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(made(9 * BLOCK_BYTES))
    blocks = read_blocks(tmp_path / "f", 9 * BLOCK_BYTES)
    next(blocks)
    assert threads() == {"shardwise-reading"}
    blocks.close()  # type: ignore[attr-defined]
    assert threads() == set()


def test_a_fork_does_not_get_what_a_disk_may_be_writing_into() -> None:
    blocks = direct._blocks()

    def mapped() -> list[bool]:
        spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return [any(int(a, 16) <= block.ctypes.data < int(b, 16) for a, b in spans) for block in blocks]

    assert mapped() == [True] * BUFFERS and all(block.ctypes.data % 4096 == 0 for block in blocks)
    child = os.fork()
    if child == 0:
        os._exit(sum(mapped()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_where_the_cache_cannot_be_passed_it_is_used(tmp_path: Path) -> None:
    """A write that does not lie as a disk asks for meets the EINVAL of a file system without O_DIRECT."""
    handle = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    data = memoryview(made(5001))[1:]
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        os.pwrite(handle, data, 0)
    direct._write_all(handle, data, 0)
    assert not fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT
    assert (tmp_path / "f").read_bytes() == data
    # Another error is no refusal.
    os.close(handle)
    handle = os.open(tmp_path / "f", os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        direct._write_all(handle, data, 0)
    os.close(handle)


def test_what_the_disk_refuses_on_the_way_is_told_and_leaves_neither_file_nor_thread(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    asked = []

    def endless() -> Iterator[bytes]:
        while True:
            asked.append(1)
            yield bytes(BLOCK_BYTES)

    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK_BYTES, hard))
    try:
        with pytest.raises(StoreError, match="ulimit -f") as caught:
            LocalStore(tmp_path).write("a/k", endless())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    # Told soon: no more is asked for than what lies in the buffers.
    assert len(asked) <= 3 + BUFFERS + 2
    assert LocalStore(tmp_path).list() == [] and threads() == set()


def test_what_fails_in_the_pieces_leaves_neither_file_nor_thread(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(2 * BLOCK_BYTES)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalStore(tmp_path).write("a/k", failing())
    assert LocalStore(tmp_path).list() == [] and threads() == set()


def test_a_disk_that_fails_while_it_is_streamed_is_told_and_what_is_gone_is_damage(tmp_path: Path) -> None:
    # The first page of a process's memory is never mapped, and reading it is a real EIO.
    (tmp_path / "k").symlink_to("/proc/self/mem")
    with pytest.raises(StoreError, match="the disk failed"):
        list(LocalStore(tmp_path).stream("k", 16))
    assert threads() == set()
    with pytest.raises(Damaged, match="not there"):
        read_file(LocalStore(tmp_path), "s", FileEntry("f", 4, ""), [], whole=True, alone=True)


def test_a_whole_file_read_alone_is_held_against_every_digest(tmp_path: Path) -> None:
    size = 2 * BLOCK_BYTES + 97
    data = made(size)
    store, entry, seen = LocalStore(tmp_path), FileEntry("f", size, digest_of(data)), dict[int, bytes]()
    spans = [(0, BLOCK_BYTES + 5), (BLOCK_BYTES + 5, BLOCK_BYTES - 5), (2 * BLOCK_BYTES, 97)]

    def asked() -> list[Wanted]:
        return [wanted(start, length, seen, data) for start, length in spans]

    store.write("s/f", [data])
    read_file(store, "s", entry, asked(), whole=True, alone=True)
    assert seen == {start: data[start : start + length] for start, length in spans}
    for position in (0, 4095, BLOCK_BYTES, 2 * BLOCK_BYTES + 96):
        flipped = bytearray(data)
        flipped[position] ^= 1
        for damaged in (bytes(flipped), data[:position], data + b"x"):
            store.write("s/f", [damaged])
            with pytest.raises(Damaged):
                read_file(store, "s", entry, asked(), whole=True, alone=True)
