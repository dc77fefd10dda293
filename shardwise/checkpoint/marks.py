"""What is known of a checkpoint after its commit, in small keys beside it: a committed folder itself never changes.

.pinned-<folder>       never deleted by retention; why, and since when
.evaluated-<folder>    the loss and metrics that its weights gave
.passed-over-<folder>  not to be resumed from, though it is whole; why, and since when
.failed-<folder>       attempts that went on from it, failed, and had committed nothing
"""

import contextlib
import math
import time
from typing import Literal, TypeVar

import msgspec

from shardwise.checkpoint.store import Store

PINNED, EVALUATED, PASSED_OVER, FAILED = ".pinned-", ".evaluated-", ".passed-over-", ".failed-"
# Where so many attempts failed from a checkpoint, and had committed nothing, an older one is taken, if there is one.
FRUITLESS_LIMIT = 3
_KINDS = (PINNED, EVALUATED, PASSED_OVER, FAILED)


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pin, or why a checkpoint is passed over. `since` in unix seconds."""

    why: str
    since: float
    schema_version: Literal[1] = 1


class Scores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an evaluation of a checkpoint's weights gave, by name."""

    values: dict[str, float]
    schema_version: Literal[1] = 1


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attempts that failed from a checkpoint, by names that no other attempt has."""

    attempts: tuple[str, ...]
    schema_version: Literal[1] = 1


Mark = TypeVar("Mark", Said, Scores, Tried)


def pin(store: Store, folder: str, why: str = "asked", *, now: float | None = None) -> bool:
    """Keeps a checkpoint from retention; False where it went before the pin was there. Raises: OSError."""
    _write(store, PINNED + folder, Said(why, time.time() if now is None else now))
    # Whoever deletes looks for a pin, then deletes the manifest first: what is still committed now stays.
    if any(key.endswith("/manifest.json") for key in store.list(f"{folder}/")):
        return True
    store.delete(PINNED + folder)
    return False


def unpin(store: Store, folder: str) -> None:
    """Raises: OSError."""
    store.delete(PINNED + folder)


def pass_over(store: Store, folder: str, why: str, *, now: float | None = None) -> None:
    """Resume takes another from now on, and retention does not count it. Raises: OSError."""
    _write(store, PASSED_OVER + folder, Said(why, time.time() if now is None else now))


def evaluated(store: Store, folder: str, values: dict[str, float]) -> None:
    """What is not finite is left out: it is nobody's best, and JSON has no number for it. Raises: OSError."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    _write(store, EVALUATED + folder, Scores(finite))


def pinned(store: Store) -> dict[str, Said]:
    """By folder; a pin that cannot be read is a pin all the same. Raises: OSError."""
    return _read_all(store, PINNED, Said, Said("its pin cannot be read", 0.0))


def passed_over(store: Store) -> dict[str, Said]:
    """By folder. Raises: OSError."""
    return _read_all(store, PASSED_OVER, Said)


def scores(store: Store) -> dict[str, Scores]:
    """By folder. Raises: OSError."""
    return _read_all(store, EVALUATED, Scores)


def failed(store: Store, folder: str, attempt: str) -> None:
    """Said by any rank of an attempt, as often as it likes; of two attempts at once, which one store never has, the
    later word would count alone. Raises: OSError.
    """
    known = _read_all(store, FAILED, Tried).get(folder, Tried(()))
    if attempt not in known.attempts:
        _write(store, FAILED + folder, Tried((*known.attempts, attempt)))


def failures(store: Store) -> dict[str, int]:
    """How many attempts failed, by the folder that they went on from. Raises: OSError."""
    return {folder: len(tried.attempts) for folder, tried in _read_all(store, FAILED, Tried).items()}


def marked(keys: list[str]) -> dict[str, list[str]]:
    """Of all keys of a store those that are marks, by their folder."""
    found: dict[str, list[str]] = {}
    for key in keys:
        kind = next((kind for kind in _KINDS if key.startswith(kind)), None)
        if kind is not None and "/" not in key:
            found.setdefault(key.removeprefix(kind), []).append(key)
    return found


def _write(store: Store, key: str, value: Said | Scores | Tried) -> None:
    store.write(key, [msgspec.json.encode(value)])


def _read_all(store: Store, prefix: str, kind: type[Mark], unreadable: Mark | None = None) -> dict[str, Mark]:
    found = {}
    for key in store.list(prefix):
        mark = unreadable
        with contextlib.suppress(msgspec.DecodeError, FileNotFoundError):
            mark = msgspec.json.decode(store.read(key), type=kind)
        if mark is not None:
            found[key.removeprefix(prefix)] = mark
    return found
