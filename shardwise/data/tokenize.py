"""Text into tokens: the tokenizer, units of work of a bounded size, and the processes that do them.

The workers are plain child processes that speak through pipes: they import neither torch nor the user's
script (as multiprocessing would), start in a moment, and end when their parent does, however it ends.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.data.coder import BadRow, Tokenizer, of_bytes
from shardwise.data.files import TextFile
from shardwise.data.order import seed_of
from shardwise.environment import child_environment
from shardwise.errors import DataError
from shardwise.inputs import hub
from shardwise.units import format_bytes

UNIT_BYTES = 4 * 2**20
_REPLY = struct.Struct("<BQQQ")


# A document that a model's own tokenizer takes as a whole: about a hundred bytes of memory go to each of its tokens.
LARGEST_DOCUMENT = 64 * 2**20


class Coding(msgspec.Struct, frozen=True):
    """What a tokenizer is made of, in this process or another: "bytes" or a folder; of chats also their template."""

    source: str = "bytes"
    chat: bool = False
    template: str = ""


def source_of(tokenizer: str, hf: str | None) -> str:
    """`data.tokenizer` with "auto" resolved: the folder of the model that it trains, else bytes. Raises: ModelError."""
    if tokenizer != "auto":
        return tokenizer
    return "bytes" if hf is None else str(hub.find(hf, weights=False))


def named(coding: Coding, text_key: str = "messages") -> Tokenizer:
    """`bytes`, or the tokenizer of a folder; of chats one that takes whole rows, whose messages are at `text_key`.

    Raises: DataError on another name.
    """
    if coding.chat:
        from shardwise.data import chat

        return chat.tokenizer(coding.source, coding.template, text_key)
    if coding.source == "bytes":
        return of_bytes()
    if Path(coding.source).is_dir():
        from shardwise.data import tokenizer_json

        return tokenizer_json.of_folder(coding.source)
    raise DataError(
        f'tokenizer = {coding.source!r} is neither "bytes" nor a folder.',
        why="a model's own tokenizer is read from the tokenizer.json in its folder",
        fix='tokenizer = "bytes", "auto" beside model.hf, or a folder with a tokenizer.json',
    )


class Piece(msgspec.Struct, frozen=True):
    """The bytes start..stop of a file; of JSON lines, the lines that start there."""

    file: TextFile
    start: int
    stop: int


Unit = tuple[Piece, ...]


class Encoded(NamedTuple):
    """The tokens of a unit, how many documents end in it, and how many bytes of the source it took."""

    tokens: NDArray[np.unsignedinteger]
    documents: int
    source_bytes: int


def units(files: Sequence[TextFile], unit_bytes: int = UNIT_BYTES, *, cuts_anywhere: bool = True) -> list[Unit]:
    """The work, in the order of the token file: documents by a hash of their key, so that its tail is a fair
    sample.

    A text file is one document, and cut into pieces only where `cuts_anywhere`. JSON lines are taken in chunks of
    `unit_bytes`; chunks, and the lines in each, are ordered by hash as well.
    """
    chunks: list[tuple[int, str, list[Piece]]] = []
    for file in files:
        step = unit_bytes if cuts_anywhere or file.kind == "json_lines" else max(file.size, 1)
        pieces = [Piece(file, at, min(at + step, file.size)) for at in range(0, file.size, step)]
        if file.kind == "text":
            chunks.append((seed_of("document", file.key), file.key, pieces))
        else:
            chunks += [(seed_of("document", file.key, piece.start), file.key, [piece]) for piece in pieces]
    chunks.sort(key=lambda chunk: chunk[:2])
    made: list[Unit] = []
    open_unit: list[Piece] = []
    size = 0
    for piece in (piece for _, _, pieces in chunks for piece in pieces):
        if open_unit and size + piece.stop - piece.start > unit_bytes:
            made.append(tuple(open_unit))
            open_unit, size = [], 0
        open_unit.append(piece)
        size += piece.stop - piece.start
    return [*made, tuple(open_unit)] if open_unit else made


def encode_unit(unit: Unit, tokenizer: Tokenizer, text_key: str) -> Encoded:
    """Raises: DataError where a file cannot be read or a line has no text."""
    parts: list[NDArray[np.unsignedinteger]] = []
    separator = np.array([tokenizer.separator], dtype=tokenizer.dtype)
    documents = 0
    for piece in unit:
        try:
            found = _rows(piece, tokenizer, text_key) if piece.file.kind == "json_lines" else [_text(piece, tokenizer)]
        except OSError as error:
            raise DataError(f"{piece.file.path} cannot be read.", why=error.strerror or str(error)) from error
        for tokens in found:
            parts.append(tokens.astype(tokenizer.dtype))
            if piece.file.kind == "json_lines" or piece.stop == piece.file.size:
                parts.append(separator)
                documents += 1
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=tokenizer.dtype)
    return Encoded(tokens, documents, sum(piece.stop - piece.start for piece in unit))


def _text(piece: Piece, tokenizer: Tokenizer) -> NDArray[np.unsignedinteger]:
    if not tokenizer.cuts_anywhere and piece.stop - piece.start > LARGEST_DOCUMENT:
        raise DataError(
            f"{piece.file.path} is one document of {format_bytes(piece.stop - piece.start)}.",
            why=f"a model's own tokenizer takes a document as a whole, of at most {format_bytes(LARGEST_DOCUMENT)}: "
            "pieces of it would have other tokens",
            fix="JSON lines (.jsonl), a document a line, or several files",
        )
    try:
        return tokenizer.encode(_bytes(piece))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{piece.file.path} is no text in UTF-8.", why=str(error), fix='leave it out, or tokenizer = "bytes"'
        ) from error


def _bytes(piece: Piece) -> bytes:
    with open(piece.file.path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.stop - piece.start)


def _rows(piece: Piece, tokenizer: Tokenizer, text_key: str) -> list[NDArray[np.unsignedinteger]]:
    """The tokens of the lines that start in the piece, in the order of a hash of their place."""
    found: list[tuple[int, NDArray[np.unsignedinteger]]] = []
    with open(piece.file.path, "rb") as file:
        file.seek(max(piece.start - 1, 0))
        if piece.start > 0:
            file.readline()  # the rest of a line from before the piece; just its end where one starts here
        at = file.tell()
        while at < piece.stop and (line := file.readline()):
            if line.strip():
                found.append((at, _row(line, piece.file.path, at, tokenizer, text_key)))
            at += len(line)
    found.sort(key=lambda item: seed_of("document", piece.file.key, item[0]))
    return [tokens for _, tokens in found]


def _row(line: bytes, path: str, at: int, tokenizer: Tokenizer, text_key: str) -> NDArray[np.unsignedinteger]:
    """Raises: DataError that names the line."""
    wanted = "text" if tokenizer.row is None else "conversation"
    try:
        value = _object(line)
        return tokenizer.row(value) if tokenizer.row is not None else tokenizer.encode(_text_of(value, text_key))
    except UnicodeDecodeError as error:
        why, fix = f"its text is not UTF-8: {error}", "mend the line"
    except BadRow as error:
        why, fix = error.why, error.fix
    raise DataError(f"{path}, line {_line_number(path, at)} has no {wanted}.", why=why, fix=fix)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRow(f"it is not JSON: {error}", "mend the line") from error
    if not isinstance(value, dict):
        raise BadRow(f"it holds a {type(value).__name__}, not an object", "mend the line")
    return value


def _text_of(value: dict[str, Any], text_key: str) -> bytes:
    if not isinstance(value.get(text_key), str):
        held = ", ".join(sorted(value)[:8]) or "none"
        kind = type(value[text_key]).__name__ if text_key in value else "missing"
        raise BadRow(
            f"text_key = {text_key!r} is {kind if kind == 'missing' else f'a {kind}'}; its keys: {held}",
            "set text_key to the key that holds the text, or mend the line",
        )
    return str(value[text_key]).encode("utf-8", "surrogatepass")


def _line_number(path: str, at: int) -> int:
    count, left = 1, at
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


class Work(msgspec.Struct, frozen=True):
    """What a child is told."""

    tokenizer: Coding
    text_key: str
    units: tuple[Unit, ...]


class _Failure(msgspec.Struct, frozen=True):
    what: str
    why: str
    fix: str


def encode_all(work: Work, processes: int) -> Generator[Encoded, None, None]:
    """Every unit in order, by so many child processes; in this process where one is enough.

    Closing the iterator ends the children. Raises: DataError.
    """
    processes = min(processes, len(work.units))
    # Templates are rendered by transformers, which takes seconds and much memory to come in: never in this process.
    if processes < 2 and not work.tokenizer.chat:
        tokenizer = named(work.tokenizer)
        for unit in work.units:
            yield encode_unit(unit, tokenizer, work.text_key)
        return
    children: list[subprocess.Popen[bytes]] = []
    try:
        for child in range(max(processes, 1)):  # unit i is the work of child i % their number
            share = Work(work.tokenizer, work.text_key, work.units[child :: max(processes, 1)])
            children.append(_start(share))
        dtype = named(work.tokenizer, work.text_key).dtype
        for at in range(len(work.units)):
            yield _receive(children[at % len(children)], dtype)
    finally:
        for process in children:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _start(work: Work) -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.append({root!r}); from shardwise.data.tokenize import child; child()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program],  # -P: a json.py in the user's folder must not be imported
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}),
    )
    if process.stdin is not None:
        try:
            process.stdin.write(msgspec.json.encode(work))
            process.stdin.close()
        except BrokenPipeError:  # it died at once; reading its first reply says how
            pass
    return process


def _receive(process: "subprocess.Popen[bytes]", dtype: str) -> Encoded:
    stream = process.stdout
    header = stream.read(_REPLY.size) if stream is not None else b""
    if stream is None or len(header) < _REPLY.size:
        raise _lost(process)
    failed, length, documents, source_bytes = _REPLY.unpack(header)
    payload = stream.read(length)
    if len(payload) < length:
        raise _lost(process)
    if failed:
        failure = msgspec.json.decode(payload, type=_Failure)
        raise DataError(failure.what, why=failure.why, fix=failure.fix)
    return Encoded(np.frombuffer(payload, dtype=dtype), documents, source_bytes)


def _lost(process: "subprocess.Popen[bytes]") -> DataError:
    code = process.wait()
    cause = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
    return DataError(
        "A process that turns text into tokens was lost.",
        why=f"{cause}; its own words, if any, stand above",
        fix="start again: nothing half-made is kept; if memory was short, free some first",
    )


def child() -> None:
    """The whole life of a child: work from stdin, one reply for each unit on stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its children
    with os.fdopen(os.dup(0), "rb") as source:
        work = msgspec.json.decode(source.read(), type=Work)
    with os.fdopen(os.dup(1), "wb") as out:
        try:
            tokenizer = named(work.tokenizer, work.text_key)
            for unit in work.units:
                encoded = encode_unit(unit, tokenizer, work.text_key)
                _reply(out, 0, encoded.tokens.tobytes(), encoded.documents, encoded.source_bytes)
        except DataError as error:
            _reply(out, 1, msgspec.json.encode(_Failure(error.what, error.why, error.fix)))
        except BrokenPipeError:
            os._exit(1)  # the parent is gone, and flushing on the way out would fail again


def _reply(out: IO[bytes], failed: int, payload: bytes, documents: int = 0, source_bytes: int = 0) -> None:
    out.write(_REPLY.pack(failed, len(payload), documents, source_bytes))
    out.write(payload)
    out.flush()
