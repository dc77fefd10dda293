"""What a disk or a network refused, as an OSError that says what, why and what to do."""

import contextlib
import errno
import os
from collections.abc import Iterator

_SPACE = "free space there, or keep fewer checkpoints (checkpoint.keep, checkpoint.history)"
_ACCESS = "let this user write there, or choose another run folder (run = ...)"
_DISK = "look at the kernel's log (dmesg) and the disk's health, then start again: the last commit is whole"
_SERVER = "check that the server is up and reachable from this node, then start again: the last commit is whole"

# What the number means for a checkpoint, and the change that makes it go away. Source: errno(3), open(2), fsync(2).
ADVICE: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _SPACE),
    errno.EDQUOT: ("this user's quota is used up", "raise the quota, or keep fewer checkpoints (checkpoint.keep)"),
    errno.EFBIG: (
        "a file may not be that large there",
        "raise the limit (ulimit -f, the file system's own, the store's parts), or split the state over more ranks",
    ),
    errno.EACCES: ("this user may not", _ACCESS),
    errno.EPERM: ("this user may not", _ACCESS),
    errno.EROFS: ("it is mounted read-only", "mount it for writing, or choose another run folder (run = ...)"),
    errno.EIO: ("the disk failed", _DISK),
    errno.ESTALE: (
        "the NFS server no longer knows this file or folder",
        "see that nobody removed or re-exported the folder, mount it anew on this node, and start again",
    ),
    errno.ENOENT: (
        "the folder went away while it was written",
        "see who removes folders there, and start again: the last commit that is left is whole",
    ),
    errno.ENOTDIR: ("a file stands where a folder should be", "move it away, or choose another run folder (run = ...)"),
    errno.EMFILE: ("this process has too many files open", "raise ulimit -n"),
    errno.ENAMETOOLONG: ("the path is too long", "choose a shorter run folder (run = ...)"),
    errno.ETIMEDOUT: ("no answer in time", _SERVER),
    errno.ECONNREFUSED: ("nothing answers at that address", _SERVER),
    errno.EHOSTUNREACH: ("that host cannot be reached", _SERVER),
    errno.ENOTCONN: ("the mount has lost its server", "mount it anew on this node, and start again"),
}


class StoreError(OSError):
    """A store's OSError with `what`, `why` and `fix`; `errno` stays the cause's."""

    def __init__(self, number: int, what: str, *, why: str, fix: str) -> None:
        super().__init__(number, what)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.errno, self.what, self.why, self.fix)


def _rebuild(number: int, what: str, why: str, fix: str) -> StoreError:
    return StoreError(number, what, why=why, fix=fix)


def told(error: OSError, act: str, where: object) -> StoreError:
    """The same error with what it means and what to do. `act`: "written", "read", ...; `where`: the path or key."""
    if isinstance(error, StoreError):
        return error
    number = error.errno or errno.EIO
    meaning, fix = ADVICE.get(number, ("", "start again: what was committed before is whole"))
    said = error.strerror or str(error)
    return StoreError(number, f"{where} cannot be {act}: {said}.", why=f"{meaning} ({_name(number)})".lstrip(), fix=fix)


@contextlib.contextmanager
def telling(act: str, where: object, *, absent: bool = False) -> Iterator[None]:
    """An OSError inside becomes a StoreError; with `absent`, a FileNotFoundError stays what it is."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if absent and isinstance(error, FileNotFoundError):
            raise
        raise told(error, act, where) from error


def _name(number: int) -> str:
    return errno.errorcode.get(number, os.strerror(number))
