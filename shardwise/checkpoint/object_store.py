"""A Store at a URL: one object a key, through fsspec. S3 and what speaks like it in parts, others as their driver does.

An object is there whole or not at all: one PUT, or the completion of its parts. What passes by itself (5xx, throttling,
timeouts, a connection cut) is tried again, a bounded number of times, and told; nothing below tries again unseen.
Credentials come from the environment and the provider's own files alone.
"""

import contextlib
import errno
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, TypeVar

from shardwise.checkpoint.retries import Retries, code_of, passes, status_of
from shardwise.checkpoint.s3_uploads import S3Uploads, parsed
from shardwise.checkpoint.store import LocalStore, Piece, Store
from shardwise.checkpoint.store_errors import StoreError, told
from shardwise.environment import injected_fault
from shardwise.errors import CheckpointError, RecipeError
from shardwise.inputs.store_url import is_url, require_plain

Result = TypeVar("Result")
Tell = Callable[[str, str], None]

Keys = list[str]  # The class below has a method of that name.

PART_BYTES = 32 * 2**20
_CONNECT_SECONDS, _READ_SECONDS = 5, 60
_KEYS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the node a role"
_RIGHTS = "allow s3:PutObject, s3:GetObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket there"


def store_at(location: str, tell: Tell | None = None) -> Store:
    """The Store of a folder or a URL. Raises: RecipeError for a URL that cannot be used."""
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    return ObjectStore(location, tell=tell) if is_url(location) else LocalStore(location)


def say_on_stderr(what: str, why: str) -> None:
    print(f"shardwise: {what}: {why}", file=sys.stderr)


class ObjectStore:
    """A Store at a URL. `tell(what, why)` hears of each further try.

    Host memory of a write: six parts, four of them on their way. Of drivers other than S3's, an object of several parts
    is there at once only where the driver makes it so; what a commit needs is `create`, and require_create tries that.

    Raises: RecipeError where nothing here speaks that protocol, or there is a secret in the URL.
    """

    def __init__(
        self,
        url: str,
        *,
        tell: Tell | None = None,
        retries: Retries = Retries(),  # noqa: B008 (a frozen value)
        sleep: Callable[[float], None] = time.sleep,
        part_bytes: int = PART_BYTES,
        timeouts: tuple[float, float] = (_CONNECT_SECONDS, _READ_SECONDS),
    ) -> None:
        require_plain(url, "checkpoint.store")
        self.url = url.rstrip("/")
        self.tell = say_on_stderr if tell is None else tell
        self._retries, self._sleep, self._part_bytes = retries, sleep, part_bytes
        planted = injected_fault("store_seconds")
        self._system, self._root = _connect(self.url, timeouts if planted is None else (float(planted),) * 2)
        self._uploads = S3Uploads(self._system) if hasattr(self._system, "call_s3") else None

    def __str__(self) -> str:
        return self.url

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        path, parts = self._path(key), _parts(pieces, self._part_bytes)
        first, second = next(parts, b""), next(parts, None)
        if second is None:
            self._tried("written", key, lambda: self._system.pipe_file(path, first))
        elif self._uploads is not None:
            self._uploads.write(path, chain([first, second], parts), partial(self._tried, "written", key))
        else:
            self._write_stream(key, path, chain([first, second], parts))

    def create(self, key: str, value: Piece) -> None:
        path, data = self._path(key), bytes(value)

        def put() -> None:
            try:
                self._system.pipe_file(path, data, mode="create")
            except Exception as error:
                if not isinstance(error, FileExistsError) and status_of(error) != 412:
                    raise
                if self._system.cat_file(path) != data:
                    raise FileExistsError(errno.EEXIST, "it is there already", f"{self}/{key}") from error

        self._tried("written", key, put)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        path = self._path(key)
        return self._tried("read", key, lambda: self._whole_answer(path, start, length))

    def _whole_answer(self, path: str, start: int, length: int | None) -> bytes:
        """Raises: ConnectionError where less came than is there, so that it is tried again."""
        try:
            if start == 0 and length is None:
                data = bytes(self._system.cat_file(path))
            else:
                data = bytes(self._system.cat_file(path, start=start, end=None if length is None else start + length))
        except Exception as error:
            if status_of(error) != 416:
                raise
            data = b""  # It begins behind the end.
        if length is None or len(data) < length:
            there = max(0, int(self._system.info(path)["size"]) - start)
            if len(data) != there and len(data) != length:
                raise ConnectionError(f"{len(data)} bytes came, and {there} are there")
        return data

    def list(self, prefix: str = "") -> Keys:
        folder = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
        found = self._tried("listed", prefix or "/", lambda: self._found(folder))
        keys = [path[len(self._root) + 1 :] for path in found if path.startswith(f"{self._root}/")]
        return sorted(key for key in keys if key.startswith(prefix))

    def _found(self, folder: str) -> Keys:
        try:
            found = [self._named(str(name)) for name in self._system.find(folder)]
        except FileNotFoundError:
            return []
        return found if self._uploads is None else found + self._unfinished(self._uploads, folder)

    def _unfinished(self, uploads: S3Uploads, folder: str) -> Keys:
        try:
            return [*uploads.unfinished(folder)]
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.ENOSYS:
                raise
            self.tell(f"uploads below {self} that were never completed are not looked for", _said(error))
            return []

    def delete(self, key: str) -> None:
        path = self._path(key)
        upload = parsed(path) if self._uploads is not None else None
        if self._uploads is not None and upload is not None:
            self._tried("deleted", key, partial(self._uploads.drop, *upload))
        else:
            self._tried("deleted", key, lambda: self._gone(path))

    def exists(self, key: str) -> bool:
        def look() -> bool:
            try:
                return bool(self._system.info(self._path(key))["type"] == "file")
            except FileNotFoundError:
                return False

        return self._tried("looked at", key, look)

    def _gone(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(path)

    def _write_stream(self, key: str, path: str, parts: Iterable[bytes]) -> None:
        """Through the driver's own file; one that fails is discarded, never closed, since closing publishes it."""
        file = self._tried("written", key, lambda: self._system.open(path, "wb"))
        try:
            for part in parts:
                self._tried("written", key, partial(file.write, part), tries=1)
        except BaseException:
            # The cause is what matters. Closed in name, it is not published when it is collected.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise
        self._tried("written", key, file.close, tries=1)

    def _tried(self, done: str, key: str, act: Callable[[], Result], *, tries: int = 0) -> Result:
        """What `act` gives, at the first try that does. Raises: StoreError; FileNotFoundError, FileExistsError."""
        waits = self._retries._replace(tries=tries or self._retries.tries).waits()
        number = 0
        while True:
            number += 1
            try:
                return act()
            except Exception as error:
                wait = next(waits, None) if passes(error) else None
                if wait is None:
                    refused = self._refused(error, done, key, number)
                    if refused is error:
                        raise
                    raise refused from error
                self.tell(f"{self}/{key} was not {done} at try {number}, and is tried again", _said(error))
            self._sleep(wait)

    def _refused(self, error: Exception, done: str, key: str, tries: int) -> Exception:
        what = f"{self}/{key} cannot be {done}: {_said(error)}."
        if isinstance(error, FileExistsError | CheckpointError | StoreError):
            return error
        if code_of(error) == "NoSuchBucket":
            return StoreError(
                errno.ENXIO, what, why="there is no such bucket", fix="make it, or correct checkpoint.store"
            )
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "no such object", f"{self}/{key}")
        if passes(error):
            return StoreError(errno.ETIMEDOUT, what, why=f"the same at {tries} {'tries' if tries > 1 else 'try'}",
                              fix="check the store's health and this node's way to it (AWS_ENDPOINT_URL), then start "
                              "again: the last commit is whole")  # fmt: skip
        if "Credentials" in type(error).__name__ or "Token" in type(error).__name__:
            return StoreError(errno.EACCES, what, why="no credentials were found here", fix=_KEYS)
        if isinstance(error, PermissionError) or status_of(error) in (401, 403):
            return StoreError(errno.EACCES, what, why="these credentials may not", fix=f"{_KEYS}; {_RIGHTS}")
        if isinstance(error, OSError):
            return told(error, done, f"{self}/{key}")
        return StoreError(errno.EIO, what, why=f"the driver of {self.url.partition(':')[0]}:// refused it",
                          fix="correct checkpoint.store, or this driver's own configuration")  # fmt: skip

    def _named(self, name: str) -> str:
        """A driver's path in the form that the root has."""
        return name if name.startswith("/") == self._root.startswith("/") else f"/{name.lstrip('/')}"

    def _path(self, key: str) -> str:
        """Raises: CheckpointError for a key that points outside the store."""
        pure = PurePosixPath(key)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise CheckpointError(
                f"{key!r} is not a key of {self}.",
                why="a key is a relative path that stays inside the store",
                fix="do not use this checkpoint: its manifest was not written by Shardwise",
            )
        return f"{self._root}/{pure}"


def require_create(store: Store) -> None:
    """Tries whether a key can be created once only, as the commit of a checkpoint needs; leaves nothing behind.

    Raises: CheckpointError where a second creation succeeds; OSError where the store cannot be used.
    """
    key, value = f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        store.create(key, value)
        with contextlib.suppress(FileExistsError):
            store.create(key, b"another")
        if store.read(key) != value:
            raise CheckpointError(
                f"{store} lets a second writer replace what must be created once.",
                why="it ignores the condition If-None-Match, so two jobs could commit over each other",
                fix="use a server that keeps it (S3 itself, or a newer version of yours), or a mounted file system",
            )
    finally:
        store.delete(key)


def _connect(url: str, timeouts: tuple[float, float]) -> tuple[Any, str]:
    """fsspec's file system of a URL, with its own unseen retries off, and the path of the URL in it."""
    import fsspec  # type: ignore[import-untyped]  # Not before a URL is used: it is slow to load, and most runs have none.

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    protocol = url.partition("://")[0]
    if protocol in ("s3", "s3a"):
        connect, read = timeouts
        options["config_kwargs"] = {
            "connect_timeout": connect, "read_timeout": read, "retries": {"total_max_attempts": 1, "mode": "standard"},
        }  # fmt: skip
    try:
        system, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        needs = "pip install 'shardwise[s3]'" if protocol in ("s3", "s3a") else f"pip install what reads {protocol}://"
        raise RecipeError(f"Nothing here reads {url}.", why=str(error), fix=needs) from None
    except ValueError as error:
        raise RecipeError(
            f"{url} cannot be used.", why=str(error), fix="checkpoint.store = s3://bucket/prefix, or a folder"
        ) from None
    if hasattr(system, "call_s3"):
        system.retries = 1
    return system, str(root).rstrip("/")


def _parts(pieces: Iterable[Piece], size: int) -> Iterator[bytes]:
    """The same bytes in parts of one size; the last may be shorter."""
    part = bytearray()
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while len(part) + len(rest) >= size:
            taken = size - len(part)
            yield bytes(part) + bytes(rest[:taken])
            part, rest = bytearray(), rest[taken:]
        part += rest
    if part:
        yield bytes(part)


def _said(error: BaseException) -> str:
    """An error in one line: its kind, the status that came, what it says."""
    status = status_of(error)
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}{f' (HTTP {status})' if status else ''}: {said}".rstrip(": .")
