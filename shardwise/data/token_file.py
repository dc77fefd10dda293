"""The token file: made once, found again by what it is made of, whole or absent.

`<cache>/tokens/<digest>/` holds `tokens.bin` and `header.json`. The digest is xxh3-128 of the format, the
tokenizer and the content of every file, so a changed text is another token file. `<cache>/tokens/index/`
remembers which digest belongs to files of such paths, sizes and times, so that a later start reads none of
them.

No torch here: the command line prepares the data before any rank starts.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from shardwise.data.coder import Tokenizer
from shardwise.data.files import TextFile, find
from shardwise.data.rows import Texts, paths
from shardwise.data.tokenize import UNIT_BYTES, Coding, Work, encode_all, named, units
from shardwise.environment import cache_folder, usable_cpus
from shardwise.errors import DataError
from shardwise.units import format_bytes

FORMAT = 1
# (work done, work in all), in bytes: each byte of the text is read twice, for its digest and for its tokens.
Progress = Callable[[int, int], None]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What header.json says about the tokens.bin beside it."""

    format: int
    digest: str
    tokenizer: str
    vocab_size: int
    dtype: str
    tokens: int
    documents: int
    source_bytes: int


class TokenFile(msgspec.Struct, frozen=True):
    """A token file that is whole. `path` is its tokens.bin: `header.tokens` numbers of `header.dtype`."""

    path: str
    header: Header


def prepare(
    text: Texts,
    *,
    tokenizer: str = "bytes",
    text_key: str = "text",
    progress: Progress | None = None,
    processes: int = 0,
    cache: Path | None = None,
) -> TokenFile:
    """The token file of these texts: found, or made now by `processes` processes (0: as many as there are
    cores).

    Two runs that start at once make it once; a maker that is killed leaves nothing that counts.

    Raises: DataError.
    """
    return prepare_as(Coding(tokenizer), text, text_key, progress, processes, cache)


def prepare_as(
    coding: Coding,
    text: Texts,
    text_key: str,
    progress: Progress | None = None,
    processes: int = 0,
    cache: Path | None = None,
) -> TokenFile:
    """The same of any coding. Raises: DataError."""
    coder = named(coding, text_key)
    files = find(paths(text, (cache or cache_folder()) / "rows"))
    if coding.chat:
        _require_json_lines(files)
    root = (cache or cache_folder()) / "tokens"
    entry = root / "index" / _stat_digest(files, coder, text_key)
    known = _known(root, entry)
    if known is not None:
        return known
    job = _Job(files, coding, coder, text_key, _reported(progress, files), processes or usable_cpus())
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry):
            return _known(root, entry) or _made(root, entry, job)
    except OSError as error:
        raise _cannot_write(root, error, files) from error


class _Job(msgspec.Struct, frozen=True):
    files: tuple[TextFile, ...]
    coding: Coding
    tokenizer: Tokenizer
    text_key: str
    advance: Callable[[int], None]
    processes: int


def _require_json_lines(files: Sequence[TextFile]) -> None:
    other = next((file.path for file in files if file.kind != "json_lines"), None)
    if other is not None:
        raise DataError(
            f"{other} is no file of JSON lines.", why="a conversation is a row of one", fix="name *.jsonl files"
        )


def split_samples(tokens: int, sequence_length: int, valid_fraction: float) -> tuple[int, int]:
    """How many samples are for training and how many, from the tail, are held out; no token is in both.

    A sample takes `sequence_length` tokens and the one after them, so each part has one token more than its
    samples.

    Raises: DataError where the text is too short for one sample in each.
    """
    parts = 2 if valid_fraction > 0 else 1
    whole = max(0, tokens - parts) // sequence_length
    if whole < parts:
        need = parts * (sequence_length + 1)
        raise DataError(
            f"The text has {tokens} tokens; sequence_length = {sequence_length} needs {need}.",
            why="one sequence and the token after it for training" + (", and as much held out" if parts == 2 else ""),
            fix="give more text, or a smaller sequence_length" + (", or valid_fraction = 0" if parts == 2 else ""),
        )
    valid = min(whole - 1, max(1, round(whole * valid_fraction))) if valid_fraction > 0 else 0
    return whole - valid, valid


def open_token_file(folder: Path) -> TokenFile:
    """Raises: DataError where the header and the file's length do not fit."""
    path = folder / "tokens.bin"
    try:
        header = msgspec.json.decode((folder / "header.json").read_bytes(), type=Header)
        size = path.stat().st_size
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{folder} holds no token file.", why=str(error), fix=f"delete {folder}") from error
    want = header.tokens * (2 if header.dtype == "uint16" else 4)
    if header.format != FORMAT or size != want:
        raise DataError(
            f"The token file in {folder} is not whole.",
            why=f"format {header.format} (this version: {FORMAT}), {size} bytes where the header says {want}",
            fix=f"delete {folder}; the next start makes it again",
        )
    return TokenFile(str(path), header)


def _known(root: Path, entry: Path) -> TokenFile | None:
    """The token file that the index names, if both are there and whole."""
    try:
        return open_token_file(root / entry.read_text())
    except (OSError, DataError):
        return None


def _stat_digest(files: Sequence[TextFile], tokenizer: Tokenizer, text_key: str) -> str:
    stats = [(file.path, file.key, file.size, file.mtime_ns) for file in files]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([FORMAT, tokenizer.name, text_key, stats]))


def _content_digest(job: _Job) -> str:
    """xxh3-128 of the format, the tokenizer, and each file's key and content (not of where they lie)."""
    with ThreadPoolExecutor(job.processes) as pool:  # reading and hashing release the interpreter
        contents = []
        for file, content in zip(job.files, pool.map(_file_digest, job.files), strict=True):
            contents.append((file.key, content))
            job.advance(file.size)
    text_key = job.text_key if any(file.kind == "json_lines" for file in job.files) else ""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([FORMAT, job.tokenizer.name, text_key, contents]))


def _file_digest(file: TextFile) -> str:
    state = xxhash.xxh3_128()
    try:
        with open(file.path, "rb") as stream:
            while block := stream.read(2**20):
                state.update(block)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read.", why=error.strerror or str(error)) from error
    return state.hexdigest()


def _made(root: Path, entry: Path, job: _Job) -> TokenFile:
    digest = _content_digest(job)
    folder = root / digest
    with _locked(folder):
        try:
            token_file = open_token_file(folder)
        except DataError:  # not there, or not whole: nobody else is making it, we hold its lock
            _remove(folder)
            token_file = _make(folder, digest, job)
    _write_whole(entry, digest.encode())
    return token_file


def _make(folder: Path, digest: str, job: _Job) -> TokenFile:
    """Write beside it, flush to the disk, and only then give it its name."""
    making = folder.with_name(f".making-{digest}")
    _remove(making)  # of a maker that was killed
    try:
        making.mkdir()
        header = _write_tokens(making / "tokens.bin", digest, job)
        _write_whole(making / "header.json", msgspec.json.format(msgspec.json.encode(header)) + b"\n")
        _sync(making)
        making.rename(folder)
        _sync(folder.parent)
    finally:
        _remove(making)
    return open_token_file(folder)


def _write_tokens(path: Path, digest: str, job: _Job) -> Header:
    work = tuple(units(job.files, cuts_anywhere=job.tokenizer.cuts_anywhere))
    total = sum(file.size for file in job.files)
    processes = job.processes if total > 2 * UNIT_BYTES else 1  # below that, starting them takes longer
    tokens = documents = 0
    encoding = encode_all(Work(job.coding, job.text_key, work), processes)
    with open(path, "wb") as out, contextlib.closing(encoding):
        for encoded in encoding:
            out.write(encoded.tokens.data)
            tokens += len(encoded.tokens)
            documents += encoded.documents
            job.advance(encoded.source_bytes)
        out.flush()
        os.fsync(out.fileno())
    _check_unchanged(job.files)
    if not tokens:
        raise DataError("The text is empty.", why=f"{len(job.files)} files hold 0 tokens", fix="give files with text")
    return Header(
        format=FORMAT,
        digest=digest,
        tokenizer=job.tokenizer.name,
        vocab_size=job.tokenizer.vocab_size,
        dtype=job.tokenizer.dtype,
        tokens=tokens,
        documents=documents,
        source_bytes=total,
    )


def _check_unchanged(files: Sequence[TextFile]) -> None:
    for file in files:
        try:
            now = Path(file.path).stat()
            same = (now.st_size, now.st_mtime_ns) == (file.size, file.mtime_ns)
        except OSError:
            same = False
        if not same:
            raise DataError(f"{file.path} changed while it was read.", fix="start again when nothing writes to it")


def _reported(progress: Progress | None, files: Sequence[TextFile]) -> Callable[[int], None]:
    """A function that adds to the work done and reports it."""
    total = 2 * sum(file.size for file in files)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return advance


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time is inside, for this path.

    The system frees the lock of a process that dies.
    """
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_whole(path: Path, content: bytes) -> None:
    """The file has this content or, if we are stopped, the one it had."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _cannot_write(root: Path, error: OSError, files: Sequence[TextFile]) -> DataError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    need = format_bytes(2 * sum(file.size for file in files))
    return DataError(
        f"The token file cannot be written below {root}.",
        why=f"{error.strerror or error}" + (f"; it takes about {need}; what was begun is removed" if full else ""),
        fix=("free space there, or " if full else "")
        + "set SHARDWISE_CACHE to a folder with room that you may write to",
    )
