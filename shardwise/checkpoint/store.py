"""Where checkpoint bytes live: a small protocol, and a folder on a local or shared file system."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from shardwise.checkpoint.direct import read_blocks, write_new
from shardwise.checkpoint.store_errors import telling
from shardwise.errors import CheckpointError

Piece = bytes | bytearray | memoryview


class Store(Protocol):
    """Keys to bytes. A key is a relative POSIX path; there are no folders beyond what keys spell.

    `write` and `create` are atomic and durable for one key: after they return the bytes outlive a crash, and before
    that a reader sees the old value or none. Nothing is promised across keys. Errors are OSError, with what, why and
    fix; a key that is not there is FileNotFoundError. Safe to call from several threads.
    """

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        """A piece may be overwritten by its owner once the next one is asked for."""
        ...

    def create(self, key: str, value: Piece) -> None:
        """As `write`, for a key that is not there yet: of several that create one key with values of their own, one
        succeeds. An equal value that is there is taken for this call's: an earlier try's answer may have been lost.

        Raises: FileExistsError where another value is there.
        """
        ...

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


# File systems that cannot do it say so with one of these.
_NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK})


class LocalStore:
    """A Store in a folder, on a local disk or NFS: a temporary file beside the target, fsync, rename, fsync of the
    folder.

    Where the file system has no hard links, `create` looks and then renames: still whole or absent, and two processes
    at once are then kept apart by the run's lock alone.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        path = self._path(key)
        with self._temporary(path, pieces) as temporary:
            temporary.replace(path)

    def create(self, key: str, value: Piece) -> None:
        path = self._path(key)
        try:
            if self.exists(key):
                raise FileExistsError(errno.EEXIST, "it is there already", str(path))
            with self._temporary(path, [value]) as temporary:
                _link_new(temporary, path)
        except FileExistsError:
            if self.read(key) != value:
                raise
            _fsync_folder(path.parent)

    def link(self, key: str, source: Path) -> bool:
        """Gives a file a second name here, since no file is ever changed in place; False where that cannot be done, as
        from another file system. Not durable before a key in the same folder is written.
        """
        path = self._path(key)
        with telling("written", path):
            _make_durable_folder(path.parent)
        try:
            os.link(source, path)
        except FileExistsError:
            return path.samefile(source)
        except OSError:
            return False
        return True

    def free_bytes(self) -> int | None:
        """What this user may still write there; None where it cannot be known."""
        folder = self.root
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        try:
            room = os.statvfs(folder)
        except OSError:
            return None
        return room.f_bavail * room.f_frsize

    @contextlib.contextmanager
    def _temporary(self, path: Path, pieces: Iterable[Piece]) -> Iterator[Path]:
        """A durable file beside `path` that the block publishes; whatever happens, none is left under this name."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        with telling("written", path):
            _make_durable_folder(path.parent)
            try:
                write_new(temporary, pieces)
                yield temporary
            finally:
                # The cause is what matters; a file system that is failing may refuse the clean-up too.
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            _fsync_folder(path.parent)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        path = self._path(key)
        with telling("read", path, absent=True), path.open("rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def stream(self, key: str, size: int) -> Iterator[memoryview]:
        """A value from its beginning, past the page cache, and where it is longer than `size` some of what is beyond. A
        piece is the caller's until the next is asked for.
        """
        path = self._path(key)
        with telling("read", path, absent=True):
            yield from read_blocks(path, size)

    def list(self, prefix: str = "") -> list[str]:
        keys = []
        top = self.root / prefix.rpartition("/")[0]
        with telling("listed", self.root):
            for folder, below, names in os.walk(top, onerror=_unless_gone):
                relative = PurePosixPath(Path(folder).relative_to(self.root).as_posix())
                # Of a large store only what can match is walked through.
                below[:] = [name for name in below if Path(folder) != top or str(relative / name).startswith(prefix)]
                keys += [str(relative / name) for name in names]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with telling("deleted", path), contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)
        if path.parent != self.root:
            # The folder goes with its last key; where it does not, there is another, or it is gone already.
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with telling("looked at", path):
            try:
                return stat.S_ISREG(path.stat().st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

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
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        _fsync_folder(path.parent)


def _link_new(source: Path, target: Path) -> None:
    """Give a file its second name, if nothing has it. Raises: FileExistsError; OSError."""
    try:
        os.link(source, target)
    except FileExistsError:
        # An NFS server whose first answer was lost says this of our own link. Source: open(2), O_EXCL on NFS.
        if source.stat().st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, "it is there already", str(target)) from None
        source.replace(target)


def _unless_gone(error: OSError) -> None:
    """A folder that another process deletes meanwhile holds nothing, nor does a file; a closed one is an error."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems have no fsync of a folder: an entry is durable there once the server answered.
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(handle)
