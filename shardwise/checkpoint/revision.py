"""The git revision of the code that trains, read from files: git need not be there, and is not run."""

import re
import sys
from pathlib import Path

_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_MOST_BYTES = 1 << 20


def revision(script: str | Path | None = None) -> str:
    """The commit that is checked out where the script lies (this process's own, by default): 40 or 64 hex digits.

    "" outside a repository, or where its files say something else. Changes that are not committed are not seen.
    Source: https://git-scm.com/docs/gitrepository-layout
    """
    given = script or getattr(sys.modules.get("__main__"), "__file__", None)
    if not given:
        return ""
    try:
        folder = _git_folder(Path(given).resolve().parent)
        return "" if folder is None else _head(folder)
    except (OSError, ValueError):
        return ""


def _git_folder(start: Path) -> Path | None:
    """The repository's own folder: `.git`, or what a `.git` file names, as in a worktree or submodule."""
    for folder in (start, *start.parents):
        found = folder / ".git"
        if found.is_dir():
            return found
        if found.is_file():
            return (folder / _read(found).removeprefix("gitdir:").strip()).resolve()
    return None


def _head(folder: Path) -> str:
    head = _read(folder / "HEAD").strip()
    name = head.removeprefix("ref:").strip()
    if name == head:
        return head if _HASH.fullmatch(head) else ""
    shared = folder / "commondir"
    for root in (folder, folder / _read(shared).strip()) if shared.is_file() else (folder,):
        reference = root / name
        if reference.is_file():
            found = _read(reference).strip()
            return found if _HASH.fullmatch(found) else ""
        packed = _packed(root / "packed-refs", name)
        if packed:
            return packed
    return ""


def _packed(path: Path, name: str) -> str:
    lines = _read(path).splitlines() if path.is_file() else []
    return next((line[: -len(name) - 1] for line in lines if line.endswith(f" {name}") and _HASH.match(line)), "")


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode()
