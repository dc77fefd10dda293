"""The traces of a job, one a rank: a file, a folder of files, or an archive of them, read one after the other.

Nothing of an archive is written to disk, so no name in it leads anywhere; what it unpacks to is bounded, as is how many
files it has. Never imports torch.
"""

import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from shardwise.errors import BadInput
from shardwise.profiling.trace import Trace, read_from

MOST_FILES = 65_536
MOST_BYTES = 256 * 2**30  # of all members of an archive together, as its own table says
TRACE = re.compile(r"\.json(\.gz)?$", re.IGNORECASE)
# What frameworks call a rank's file: rank3.json, rank-00003_step-5.json.gz, worker2_step_12.169412.pt.trace.json
RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)


def traces_of(path: Path) -> Iterator[Trace]:
    """Each trace, in no order. Raises: BadInput where there is none, or where one is no trace."""
    found = False
    try:
        for file, name in _files(path):
            trace = read_from(file, name)
            found = True
            yield trace if trace.rank is not None else trace._replace(rank=rank_of(name))
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise BadInput(
            f"{path} cannot be read.", why=str(error), fix="look whether it is whole; make the archive again"
        ) from error
    if not found:
        raise BadInput(
            f"{path} holds no trace.",
            why="no file in it is called *.json or *.json.gz",
            fix="give what torch.profiler's tensorboard_trace_handler wrote: a file, a folder, or an archive",
        )


def rank_of(name: str) -> int | None:
    """By the file's name; None where it says none, or two."""
    found = {int(number) for number in RANK.findall(PurePosixPath(name).name)}
    return found.pop() if len(found) == 1 else None


def _files(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    if path.is_dir():
        yield from _of_folder(path)
    elif zipfile.is_zipfile(path):
        yield from _of_zip(path)
    elif path.is_file() and tarfile.is_tarfile(path):
        yield from _of_tar(path)
    else:
        with path.open("rb") as file:
            yield file, str(path)


def _of_folder(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    names = sorted(each for each in path.rglob("*") if TRACE.search(each.name) and each.is_file())
    _bound(path, len(names), 0)
    for name in names:
        with name.open("rb") as file:
            yield file, str(name)


def _of_zip(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _bound(path, len(members), sum(member.file_size for member in members))
        for member in members:
            if not member.is_dir() and TRACE.search(member.filename):
                if member.flag_bits & 1:
                    raise BadInput(f"{path} is locked.", why="its members are encrypted", fix="unpack it first")
                with archive.open(member) as file:
                    yield file, f"{path}:{member.filename}"


def _of_tar(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    with tarfile.open(path, "r|*") as archive:
        size = 0
        for count, member in enumerate(archive, start=1):
            size += member.size
            _bound(path, count, size)
            if member.isreg() and TRACE.search(member.name):
                file = archive.extractfile(member)
                assert file is not None  # of a regular file it is never None
                yield file, f"{path}:{member.name}"


def _bound(path: Path, files: int, size: int) -> None:
    if files > MOST_FILES or size > MOST_BYTES:
        raise BadInput(
            f"{path} is too large: {files} files, {size / 2**30:.0f} GiB.",
            why=f"at most {MOST_FILES} files and {MOST_BYTES // 2**30} GiB are read",
            fix="keep the traces of one job and of a few steps in it",
        )
