"""Where checkpoint bytes live: a small protocol, and a folder on a local or shared file system."""

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Protocol

from shardwise.errors import CheckpointError

Piece = bytes | bytearray | memoryview


class Store(Protocol):
    """Keys to bytes. A key is a relative POSIX path; there are no folders beyond what keys spell.

    `write` is atomic and durable for one key: after it returns the bytes outlive a crash, and before that a
    reader sees the old value or none. Nothing is promised across keys. Errors are OSError; a key that is not
    there is FileNotFoundError.
    """

    def write(self, key: str, pieces: Iterable[Piece]) -> None: ...

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """The bytes from `start`; fewer than `length` where the value ends before."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`, sorted; what writers that died left behind is among them."""
        ...

    def delete(self, key: str) -> None:
        """A key that is not there is no error."""
        ...

    def exists(self, key: str) -> bool: ...


class LocalStore:
    """A Store in a folder: a temporary file beside the target, fsync, rename, fsync of the folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        path = self._path(key)
        _make_durable_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            # The cause is what matters; a file system that is failing may refuse the clean-up too.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _fsync_folder(path.parent)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._path(key).open("rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def list(self, prefix: str = "") -> list[str]:
        keys = []
        for folder, _, names in os.walk(self.root):
            relative = PurePosixPath(Path(folder).relative_to(self.root).as_posix())
            keys += [str(relative / name) for name in names]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        if path.parent != self.root:
            # The folder goes with its last key; where it does not, there is another, or it is gone already.
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def _path(self, key: str) -> Path:
        """Raises: CheckpointError for a key that points outside the store."""
        pure = PurePosixPath(key)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise CheckpointError(
                f"{key!r} is not a key of {self.root}.",
                why="a key is a relative path that stays inside the store",
                fix="do not use this checkpoint: its manifest was not written by Shardwise",
            )
        return self.root / pure


def _make_durable_folder(folder: Path) -> None:
    """Creates the folder and its parents, each entered durably in the one above."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _fsync_folder(path.parent)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
