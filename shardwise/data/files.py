"""Which text files a recipe means: globs, folders, single files and `stdlib:`, in an order that is always the
same.

No torch here: the command line resolves the data before any rank starts.
"""

import glob
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Literal

import msgspec

from shardwise.errors import DataError

FOLDER_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
STDLIB = "stdlib:"
# Installed packages are no part of the library, and not every system ships the library's tests.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class TextFile(msgspec.Struct, frozen=True):
    """A file of text: one document, or one document a line (`json_lines`).

    `key` is its path below the folder that the pattern starts from, with `/`: the same on every machine.
    """

    path: str
    key: str
    kind: Literal["text", "json_lines"]
    size: int
    mtime_ns: int


def find(text: str | Sequence[str]) -> tuple[TextFile, ...]:
    """The files that `text` names, each once, sorted by pattern and key.

    A folder means its *.txt, *.md, *.py and *.jsonl, at any depth, without hidden ones. `stdlib:PATTERN` is
    below this Python's own library, without installed packages and tests. Relative paths start from the
    current folder.

    Raises: DataError where a pattern matches nothing or a file cannot be read.
    """
    patterns = (text,) if isinstance(text, str) else tuple(text)
    if not patterns:
        raise DataError("text is empty.", fix='name files, folders or globs, as in text = ["corpus/**/*.txt"]')
    found: dict[str, TextFile] = {}
    for pattern in patterns:
        root, paths = _matches(pattern)
        files = sorted((_text_file(path, root) for path in paths), key=lambda file: file.key)
        if not files:
            raise _nothing(pattern)
        for file in files:
            found.setdefault(file.path, file)
    return tuple(found.values())


def _matches(pattern: str) -> tuple[Path, list[Path]]:
    """The folder that keys are relative to, and the files below it that match."""
    if pattern.startswith(STDLIB):
        root = Path(sysconfig.get_path("stdlib"))
        return root, _below_stdlib(root, pattern.removeprefix(STDLIB))
    path = Path(pattern).expanduser()
    if glob.has_magic(str(path)):
        fixed = list(path.absolute().parts)
        magic = next(at for at, part in enumerate(fixed) if glob.has_magic(part))
        root = Path(*fixed[:magic])
        names = glob.glob(str(Path(*fixed[magic:])), root_dir=root, recursive=True)  # noqa: PTH207 - skips hidden ones
        return root, [root / name for name in names if (root / name).is_file()]
    if path.is_dir():
        root = path.absolute()
        return root, [file for file in _walk(root, frozenset()) if file.suffix in FOLDER_SUFFIXES]
    if not path.exists():
        raise _nothing(pattern)
    return path.absolute().parent, [path.absolute()]


def _below_stdlib(root: Path, pattern: str) -> list[Path]:
    name = pattern.removeprefix("**/")
    if pattern.startswith("**/") and "/" not in name:  # the usual one, without a walk through installed packages
        return [path for path in _walk(root, _NOT_STDLIB) if PurePath(path.name).match(name)]
    return [
        path for path in root.glob(pattern) if path.is_file() and not _NOT_STDLIB & set(path.relative_to(root).parts)
    ]


def _walk(root: Path, without: frozenset[str]) -> Iterable[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _text_file(path: Path, root: Path) -> TextFile:
    try:
        status = path.stat()
        if not os.access(path, os.R_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise DataError(f"{path} cannot be read.", why=error.strerror or str(error)) from error
    kind: Literal["text", "json_lines"] = "json_lines" if path.suffix == ".jsonl" else "text"
    return TextFile(str(path), path.relative_to(root).as_posix(), kind, status.st_size, status.st_mtime_ns)


def _nothing(pattern: str) -> DataError:
    where = "this Python's library" if pattern.startswith(STDLIB) else f"the current folder, {Path.cwd()}"
    suffixes = " ".join("*" + suffix for suffix in FOLDER_SUFFIXES)
    return DataError(
        f"text = {pattern!r} matches no file.",
        why=f"relative paths start from {where}; a folder means its {suffixes}",
        fix="correct the path, or give a glob that matches your files",
    )
