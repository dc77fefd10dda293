"""State as JSON and named tensors, and back: nothing is pickled, and a value that is neither is an error.

JSON knows no tuples, no NaN and no keys but strings. They are spelled as objects with one key that begins
with $: {"$tuple": [...]}, {"$float": "nan"}, {"$dict": [[key, value], ...], "kind": "OrderedDict"}, and a
tensor as {"$tensor": name, "device": "cpu"}.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.manifest import Json
from shardwise.errors import CheckpointError

_KINDS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


class Reference(NamedTuple):
    """A tensor that packed state names, and the kind of device it was on."""

    name: str
    device: str


def pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    """`value` as JSON; its tensors go into `tensors`, named by where they stand, as they are (not copied).

    Raises: CheckpointError naming the key of anything that is neither a tensor, nor JSON, nor a tuple or
    dict of them.
    """
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise CheckpointError(f"Two tensors of the state are called {path!r}.", fix="rename one of the keys")
        tensors[path] = value
        return {"$tensor": path, "device": value.device.type}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple):
        items = [pack(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in _KINDS.values():
        return _pack_dict(value, path, tensors)
    raise CheckpointError(
        f"{path!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved.",
        why="a checkpoint holds tensors and JSON values (numbers, text, lists, dicts), and never a pickle",
        fix="leave it out of state_dict(), or give it as tensors and JSON values",
    )


def unpack(packed: Json, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `pack`; `fetch` gives a tensor by its name."""
    if isinstance(packed, list):
        return [unpack(item, fetch) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "$tensor" in packed:
        return fetch(packed["$tensor"])
    if "$tuple" in packed:
        return tuple(unpack(item, fetch) for item in packed["$tuple"])
    if "$float" in packed:
        return float(packed["$float"])
    if "$dict" in packed:
        items = [(unpack(key, fetch), unpack(item, fetch)) for key, item in packed["$dict"]]
        return _KINDS[packed["kind"]](dict(items))
    return {key: unpack(item, fetch) for key, item in packed.items()}


def references(packed: Json) -> Iterator[Reference]:
    """The tensors that packed state names."""
    if isinstance(packed, dict) and "$tensor" in packed:
        yield Reference(packed["$tensor"], packed["device"])
    elif isinstance(packed, dict):
        for item in packed.values():
            yield from references(item)
    elif isinstance(packed, list):
        for item in packed:
            yield from references(item)


def _pack_dict(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Json:
    packed = [(key, pack(item, f"{path}/{key}", tensors)) for key, item in value.items()]
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key, _ in packed):
        return dict(packed)
    pairs = [[pack(key, f"{path} (a key)", {}), item] for key, item in packed]
    return {"$dict": pairs, "kind": type(value).__name__}
