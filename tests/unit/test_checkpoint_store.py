"""Stores: the laws that every Store keeps, and the fakes that the other checkpoint tests use."""

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.store import LocalStore, Piece, Store
from shardwise.errors import CheckpointError


class MemoryStore:
    """A Store in a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        self.values[key] = b"".join(bytes(piece) for piece in pieces)

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


def test_list_gives_the_keys_with_a_prefix_in_order(store: Store) -> None:
    for key in ("s-2/x", "s-1/y", "s-1/x", "t"):
        store.write(key, [b""])
    assert store.list() == ["s-1/x", "s-1/y", "s-2/x", "t"]
    assert store.list("s-1/") == ["s-1/x", "s-1/y"]
    assert store.list("none") == []


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
