"""A folder that somebody else wrote, sealed: the digest of each file, in a manifest that is written last. No torch.

What is whole is sealed, and what is not sealed is not whole: a process that dies while it writes leaves no seal.
"""

import os
import sys
from pathlib import Path

import msgspec
import xxhash

SEAL = "shardwise.json"
_BLOCK_BYTES = 4 * 2**20


class SealedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file by its path in the folder. digest: xxh3, 128 bits."""

    name: str
    bytes: int
    digest: str


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of a folder that was whole after `step`."""

    step: int
    files: tuple[SealedFile, ...]
    schema_version: int = 1


def seal(folder: str | Path, step: int) -> Seal:
    """Make the folder's files durable, read each back for its digest, and write the seal. Raises: OSError."""
    folder = Path(folder)
    made = Seal(step, tuple(_sealed(folder, path) for path in _files(folder)))
    beside = folder / f".{SEAL}.{os.getpid()}"
    with beside.open("wb") as file:
        file.write(msgspec.json.encode(made))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(folder / SEAL)
    for directory in (*(path for path in folder.rglob("*") if path.is_dir()), folder, folder.parent):
        _sync(directory)
    return made


def problem(folder: str | Path) -> str:
    """What is wrong with a folder, with the file's name; empty where every file is what was sealed. Raises: OSError."""
    folder = Path(folder)
    try:
        kept = msgspec.json.decode((folder / SEAL).read_bytes(), type=Seal)
    except FileNotFoundError:
        return "it has no seal: whoever wrote it did not come to an end"
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return f"{SEAL} cannot be read: {error}"
    for file in kept.files:
        path = folder / file.name
        if not path.is_file():
            return f"{file.name} is gone"
        if path.stat().st_size != file.bytes:
            return f"{file.name} has {path.stat().st_size} bytes, and had {file.bytes}"
        if _digest(path) != file.digest:
            return f"{file.name} is damaged: its bytes are others than were written"
    return ""


def newest_whole(output: str | Path) -> str | None:
    """The folder checkpoint-N of the largest N that is whole, as `resume_from_checkpoint` takes it; None where none is.

    What is passed over is said on stderr, with the reason. Raises: OSError.
    """
    for folder in sorted(Path(output).glob("checkpoint-*"), key=_step, reverse=True):
        if _step(folder) < 0:
            continue
        why = problem(folder)
        if not why:
            return str(folder)
        print(f"{folder} is passed over: {why}", file=sys.stderr, flush=True)
    return None


def _step(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith((SEAL, f".{SEAL}")))


def _sealed(folder: Path, path: Path) -> SealedFile:
    _sync(path)
    return SealedFile(str(path.relative_to(folder)), path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
