"""Rows that are in memory or in somebody's table (a `datasets` object, a list): as a file of JSON lines. No torch."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shardwise.errors import DataError

Texts = str | Sequence[str] | Sequence[Mapping[str, Any]]


def paths(texts: Texts, folder: Path) -> str | Sequence[str]:
    """Names of files as they are; of rows, the file in `folder` that holds them. Raises: DataError."""
    if isinstance(texts, str) or not len(texts) or isinstance(texts[0], str):
        return texts  # type: ignore[return-value] # names, or nothing
    return str(_written(texts, folder))  # type: ignore[arg-type]


def _written(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Named by its content, so it is written once; whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    beside, state = folder / f".making-{os.getpid()}", xxhash.xxh3_128()
    try:
        with open(beside, "wb") as out:
            for number, row in enumerate(rows):
                line = _line(row, number)
                state.update(line)
                out.write(line)
            out.flush()
            os.fsync(out.fileno())
        path = folder / f"{state.hexdigest()}.jsonl"
        if not path.exists():
            beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _line(row: Mapping[str, Any], number: int) -> bytes:
    try:
        return msgspec.json.encode(dict(row)) + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Row {number} is no row of JSON.",
            why=str(error),
            fix="rows are mappings of names to text, numbers and lists of them: leave other columns out",
        ) from error
