"""Two checkpoints beside each other: one root, or which tensors, values and settings differ. No torch."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.files import ITEM_BYTES
from shardwise.checkpoint.manifest import Json, Manifest, TensorEntry, read_chunk, read_manifest
from shardwise.checkpoint.root import in_root
from shardwise.checkpoint.store import Store
from shardwise.regions import Region, inside, whole

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_INTEGERS = {
    "I64": np.int64, "U64": np.uint64, "I32": np.int32, "U32": np.uint32, "I16": np.int16, "U16": np.uint16,
    "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class TensorDifference(msgspec.Struct, frozen=True):
    """A tensor that is not the same. `values` that differ of `numel`; the largest difference, None where there is no
    number for it: an eight-bit float, or a value that is not finite. `what`: where shapes, dtypes or names differ.
    """

    name: str
    what: str = ""
    values: int = 0
    numel: int = 0
    largest: float | None = None


class Change(msgspec.Struct, frozen=True):
    """A value of JSON by its path; "absent" where one has none."""

    path: str
    before: str
    after: str


class Difference(msgspec.Struct, frozen=True):
    """Of two checkpoints. `same`: one root, or, without roots, nothing found that differs."""

    same: bool
    roots: tuple[str, str]
    steps: tuple[int, int]
    tensors: tuple[TensorDifference, ...] = ()
    state: tuple[Change, ...] = ()
    settings: tuple[Change, ...] = ()


def compare(before: tuple[Store, str], after: tuple[Store, str]) -> Difference:
    """Reads what differs by its sum, each chunk against its digest. Host memory: the largest tensor twice.

    Only what a root holds is compared as state; plan, recipe and machine are settings. Raises: Damaged, OSError,
    FileNotFoundError where one is not committed.
    """
    old, new = read_manifest(*before), read_manifest(*after)
    tensors = _tensors((*before, old), (*after, new))
    state = changes(_state(old), _state(new))
    same = old.root == new.root if old.root and new.root else not tensors and not state
    settings = changes(_settings(old), _settings(new))
    return Difference(same, (old.root, new.root), (old.step, new.step), tuple(tensors), state, settings)


def values_of(store: Store, folder: str, entry: TensorEntry) -> npt.NDArray[Any]:
    """A logical tensor out of its chunks, as bits: unsigned integers of its width. Raises: Damaged."""
    bits = _BITS[ITEM_BYTES[entry.dtype]]
    found = np.zeros(entry.shape, dtype=bits)
    for chunk in entry.chunks:
        region = Region(chunk.offsets, chunk.shape)
        data = np.frombuffer(read_chunk(store, folder, chunk), dtype=bits)
        found[inside(region, whole(entry.shape))] = data.reshape(chunk.shape)
    return found


def changes(before: Json, after: Json) -> tuple[Change, ...]:
    """The leaves that differ, by path."""
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    paths = dict.fromkeys([*old, *new])
    return tuple(
        Change(path, old.get(path, "absent"), new.get(path, "absent"))
        for path in sorted(paths)
        if old.get(path) != new.get(path)
    )


def _tensors(before: tuple[Store, str, Manifest], after: tuple[Store, str, Manifest]) -> list[TensorDifference]:
    old = {entry.name: entry for entry in before[2].tensors if in_root(entry.name)}
    new = {entry.name: entry for entry in after[2].tensors if in_root(entry.name)}
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            found.append(TensorDifference(name, "only in the first"))
        elif name not in old:
            found.append(TensorDifference(name, "only in the second"))
        elif (old[name].dtype, old[name].shape) != (new[name].dtype, new[name].shape):
            said = [f"{entry.dtype} {list(entry.shape)}" for entry in (old[name], new[name])]
            found.append(TensorDifference(name, f"{said[0]} and {said[1]}"))
        elif not old[name].sum or old[name].sum != new[name].sum:
            difference = _values(name, old[name], values_of(*before[:2], old[name]), values_of(*after[:2], new[name]))
            found += [difference] if difference.values else []
    return found


def _values(name: str, entry: TensorEntry, old: npt.NDArray[Any], new: npt.NDArray[Any]) -> TensorDifference:
    differs = old != new
    count = int(differs.sum())
    largest = _largest(entry.dtype, old[differs], new[differs]) if count else 0.0
    return TensorDifference(name, "", count, int(old.size), largest)


def _largest(dtype: str, old: npt.NDArray[Any], new: npt.NDArray[Any]) -> float | None:
    if dtype in _INTEGERS:
        pairs = zip(old.view(_INTEGERS[dtype]).tolist(), new.view(_INTEGERS[dtype]).tolist(), strict=True)
        return float(max(abs(a - b) for a, b in pairs))
    if dtype == "BF16":
        old, new = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (old, new))
    elif dtype in _FLOATS:
        old, new = old.view(_FLOATS[dtype]), new.view(_FLOATS[dtype])
    else:
        return None
    if not (np.isfinite(old).all() and np.isfinite(new).all()):
        return None
    return float(np.abs(old.astype(np.float64) - new.astype(np.float64)).max())


def _state(manifest: Manifest) -> Json:
    parts = {part: value for part, value in manifest.state.items() if in_root(part)}
    return {"step": manifest.step, **parts}


def _settings(manifest: Manifest) -> Json:
    plan = manifest.plan if isinstance(manifest.plan, Mapping) else {"decision": manifest.decision}
    return {
        "plan": {key: plan.get(key) for key in ("recipe", "decision")},
        "world": manifest.world,
        "machine": msgspec.to_builtins(manifest.machine),
    }


def _leaves(value: Json, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and any(isinstance(item, dict | list) for item in value):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return [(path, msgspec.json.encode(value).decode())]
    return [leaf for where, item in items for leaf in _leaves(item, where)]
