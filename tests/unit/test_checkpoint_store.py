"""Stores: the laws that every Store keeps, and the fakes that the other checkpoint tests use."""

import errno
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.store import LocalStore, Piece, Store
from shardwise.checkpoint.store_errors import ADVICE, StoreError, told
from shardwise.errors import CheckpointError


class MemoryStore:
    """A Store in a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        self.values[key] = b"".join(bytes(piece) for piece in pieces)

    def create(self, key: str, value: Piece) -> None:
        if self.values.setdefault(key, bytes(value)) != value:
            raise FileExistsError(key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key not in self.values:
            raise FileNotFoundError(key)
        return self.values[key][start : None if length is None else start + length]

    def list(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def exists(self, key: str) -> bool:
        return key in self.values


class FaultyStore:
    """A Store that calls `fault` before its `at`-th operation, from 1; each piece written is one."""

    def __init__(self, inner: Store, at: int, fault: Callable[[str], None]) -> None:
        self.inner, self.at, self.fault = inner, at, fault
        self.operations: list[str] = []

    def _tick(self, operation: str) -> None:
        self.operations.append(operation)
        if len(self.operations) == self.at:
            self.fault(operation)

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        def ticking() -> Iterable[Piece]:
            for piece in pieces:
                self._tick(f"piece of {key}")
                yield piece
            self._tick(f"commit {key}")

        self._tick(f"write {key}")
        self.inner.write(key, ticking())

    def create(self, key: str, value: Piece) -> None:
        self._tick(f"create {key}")
        self.inner.create(key, value)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._tick(f"read {key}")
        return self.inner.read(key, start, length)

    def list(self, prefix: str = "") -> list[str]:
        self._tick(f"list {prefix}")
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self._tick(f"delete {key}")
        self.inner.delete(key)

    def exists(self, key: str) -> bool:
        self._tick(f"exists {key}")
        return self.inner.exists(key)


def disk_full(operation: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=["memory", "local"])
def store(request: Any, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "not" / "there" / "yet")


def test_what_is_written_is_read_back_whole_and_in_ranges(store: Store) -> None:
    store.write("a/b", [b"01", bytearray(b"234"), memoryview(b"56789")])
    assert store.read("a/b") == b"0123456789"
    assert store.read("a/b", 3, 4) == b"3456"
    assert store.read("a/b", 8, 40) == b"89"
    assert store.read("a/b", 40, 1) == b""


def test_a_second_write_replaces_the_first(store: Store) -> None:
    store.write("k", [b"a long value"])
    store.write("k", [b"short"])
    assert store.read("k") == b"short"


def test_a_key_is_created_once_and_keeps_its_first_value(store: Store) -> None:
    store.create("a/k", b"first")
    with pytest.raises(FileExistsError):
        store.create("a/k", b"second")
    assert store.read("a/k") == b"first"
    # Whoever tries again after an answer that was lost has created it.
    store.create("a/k", b"first")
    store.delete("a/k")
    store.create("a/k", memoryview(b"third"))
    assert store.read("a/k") == b"third"


def test_list_gives_the_keys_with_a_prefix_in_order(store: Store) -> None:
    for key in ("s-2/x", "s-1/y", "s-1/x", "t"):
        store.write(key, [b""])
    assert store.list() == ["s-1/x", "s-1/y", "s-2/x", "t"]
    assert store.list("s-1/") == ["s-1/x", "s-1/y"]
    assert store.list("none") == []
    assert store.list("s-") == ["s-1/x", "s-1/y", "s-2/x"]
    assert store.list("s-1/y") == ["s-1/y"]
    assert store.list("none/at/all") == []


def test_what_is_deleted_is_absent_and_may_be_deleted_again(store: Store) -> None:
    store.write("a/b", [b"x"])
    assert store.exists("a/b")
    store.delete("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")
    assert store.list() == []
    with pytest.raises(FileNotFoundError):
        store.read("a/b")


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert store.list() == []
    assert not store.exists("a")


def test_a_write_that_fails_leaves_the_old_value_and_no_litter(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b", [b"old"])

    def pieces() -> Iterable[bytes]:
        yield b"half of the new"
        disk_full("")

    with pytest.raises(OSError, match="No space"):
        store.write("a/b", pieces())
    assert store.read("a/b") == b"old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_what_a_dead_writer_left_is_listed_under_another_name_and_can_be_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".b.0a1b2c3d.tmp").write_bytes(b"torn")
    assert not store.exists("a/b")
    for key in store.list("a/"):
        store.delete(key)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["../outside", "/etc/passwd", "a/../../b", "", "."])
def test_a_key_cannot_leave_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match="not a key"):
        LocalStore(tmp_path).read(key)


def test_of_many_that_create_one_key_exactly_one_succeeds_and_its_value_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def attempt(name: int) -> int | None:
        try:
            store.create("a/k", str(name).encode() * 1000)
        except FileExistsError:
            return None
        return name

    with ThreadPoolExecutor(8) as pool:
        winners = [name for name in pool.map(attempt, range(1, 33)) if name is not None]
    assert len(winners) == 1
    assert store.read("a/k") == str(winners[0]).encode() * 1000
    assert store.list() == ["a/k"]


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=3), max_size=8), st.text("ab/", max_size=4))
def test_a_listing_is_what_begins_with_its_prefix(keys: list[list[str]], prefix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        local, memory = LocalStore(folder), MemoryStore()
        for key in ("/".join(parts) + "/k" for parts in keys):
            for store in (local, memory):
                store.write(key, [b"x"])
        if not prefix.startswith("/"):
            assert local.list(prefix) == memory.list(prefix)


def test_keys_that_others_delete_meanwhile_are_no_error(tmp_path: Path) -> None:
    stores = [LocalStore(tmp_path) for _ in range(4)]
    for at in range(40):
        stores[0].write(f"s-{at}/k", [b"x"])

    def purge(store: LocalStore) -> None:
        while keys := store.list():
            for key in keys:
                store.delete(key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(purge, stores))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- disks that refuse


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_with_its_fix_and_what_was_there_stays_whole(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    store.write("s-1/k", [b"old" * 1000])
    with pytest.raises(StoreError, match="the disk is full") as caught:
        store.write("s-2/k", [bytes(64 * 1024)] * 8)
    assert caught.value.errno == errno.ENOSPC
    assert "checkpoint.keep" in caught.value.fix
    assert store.list() == ["s-1/k"]
    assert store.read("s-1/k") == b"old" * 1000
    # The fix, applied.
    store.delete("s-1/k")
    store.write("s-2/k", [bytes(64 * 1024)] * 3)


def test_the_room_that_is_left_is_what_can_still_be_written(small_disk: Path) -> None:
    store = LocalStore(small_disk / "not" / "yet")
    free = store.free_bytes()
    assert free is not None
    assert 0 < free <= 256 * 1024
    store.write("k", [bytes(100_000)])
    assert store.free_bytes() == free - 25 * 4096


def test_a_disk_mounted_read_only_is_told(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError, match="read-only") as caught:
        LocalStore(small_disk).write("k", [b"x"])
    assert caught.value.errno == errno.EROFS


def test_a_limit_on_the_size_of_a_file_is_told_and_leaves_no_litter(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match="ulimit -f") as caught:
            LocalStore(tmp_path).write("a/k", [bytes(64 * 1024)] * 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert LocalStore(tmp_path).list() == []


def test_a_disk_that_fails_while_it_is_read_is_told(tmp_path: Path) -> None:
    # The first page of a process's memory is never mapped, and reading it is a real EIO.
    (tmp_path / "k").symlink_to("/proc/self/mem")
    with pytest.raises(StoreError, match="the disk failed") as caught:
        LocalStore(tmp_path).read("k", 0, 16)
    assert caught.value.errno == errno.EIO


FORBIDDEN = """
import os, sys
from shardwise.checkpoint.store import LocalStore
if os.getuid() == 0:
    os.setuid(65534)
store = LocalStore(sys.argv[1])
for act in (lambda: store.write("a/k", [b"x"]), lambda: store.create("b", b"x"), lambda: store.list()):
    try:
        act()
    except OSError as error:
        print(error.errno, error.fix)
"""


def test_a_folder_that_this_user_may_not_use_is_told_and_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    closed.chmod(0o000)
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", FORBIDDEN, closed], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert all(line.startswith(f"{errno.EACCES} let this user") for line in lines)


def test_a_file_where_a_folder_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(StoreError, match="a file stands where") as caught:
        LocalStore(tmp_path).write("a/k", [b"x"])
    assert caught.value.errno == errno.ENOTDIR


@pytest.mark.parametrize("number", [*ADVICE, errno.EXDEV])
def test_every_error_says_what_why_and_what_to_do(number: int) -> None:
    error = told(OSError(number, os.strerror(number)), "written", "a/k")
    assert (error.errno, error.what) == (number, f"a/k cannot be written: {os.strerror(number)}.")
    assert errno.errorcode[number] in error.why
    assert error.fix
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert told(error, "read", "elsewhere") is error
