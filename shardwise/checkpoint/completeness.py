"""State that training could reach and no checkpoint keeps: found by looking through the Trainer's arguments.

The look is a walk over attributes, containers, closures, bound methods and partials. It runs no code of the user's: no
property, no __getattr__, no state_dict(). It goes no deeper than DEPTH, into no more than WIDTH items of a container,
and ends after MOST objects; globals of a script are not looked at.
"""

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn

from shardwise.errors import CheckpointError

DEPTH, WIDTH, MOST = 12, 256, 100_000
# Of a tensor, so many bytes at its beginning and at its end tell whether it has changed: an average changes all of it.
_SEEN_BYTES = 4096
_NUMPY = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_DRAWERS = (torch.Generator, random.Random, *_NUMPY)
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, np.ndarray, np.generic)
Value = TypeVar("Value")


class NotKept(NamedTuple):
    """An object of which a checkpoint keeps nothing, because the script makes it anew as it was."""

    value: Any


class Found(NamedTuple):
    """State that nobody registered. `path` is where it was found, as in `loss.teacher`."""

    path: str
    value: Any

    @property
    def kind(self) -> str:
        return f"{type(self.value).__module__}.{type(self.value).__qualname__}"


def not_kept(value: Value) -> NotKept:
    """Says in `state=` that an object needs no keeping: a frozen teacher, say, that the script loads at each start.

    Example: state={"teacher": sw.not_kept(teacher)}
    """
    return NotKept(value)


class Completeness:
    """Looks at what the arguments hold when training begins, and again at each save.

    What is trained, or says that it has state, is found at once. Modules without anything to train, and random
    generators, are state only if they change: a frozen teacher, the weights of the classes in a loss, or a dataset's
    generator that is sown anew for each sample are the same after a restart.
    """

    def __init__(self, arguments: Mapping[str, Any], modules: Iterable[nn.Module], registered: Iterable[Any]) -> None:
        """`modules` are kept: their parameters and buffers are, what else hangs on them is looked at. `registered`:
        objects that tell their state, or were said to need no keeping; all that they hold is theirs.
        """
        self._arguments, self._modules, self._registered = dict(arguments), list(modules), list(registered)
        self._told: set[str] = set()
        self._before = {one.path: (one.value, _print(one.value)) for one in self._look() if not _acts(one)}

    def found(self) -> list[Found]:
        """What nobody keeps and somebody should, nothing twice over all calls."""
        new = [one for one in self._look() if one.path not in self._told and (_acts(one) or self._changed(one))]
        self._told |= {one.path for one in new}
        return new

    def _look(self) -> list[Found]:
        held = {id(inner) for module in self._modules for inner in _modules_of(module)}
        weights = {id(tensor) for module in self._modules for tensor in _tensors(module)}
        theirs = {id(value) for _, value in _reach({"": self._registered}, weights, lambda path, value: False)}

        def ends(path: str, value: Any) -> bool:
            return id(value) not in held and _has_state(path, value)

        return [
            Found(path, value) for path, value in _reach(self._arguments, theirs | weights, ends) if ends(path, value)
        ]

    def _changed(self, one: Found) -> bool:
        value, before = self._before.get(one.path, (None, ()))
        if value is not one.value:
            return False  # It came since, or another took its place: made anew each time, as for each sample.
        now = _print(one.value)
        if isinstance(one.value, torch.Generator) and before[0] != now[0]:
            return False  # It was sown anew: its numbers follow from the seed that it was given.
        return now != before


def split_declared(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """What is to be kept of `state=`, and the objects that it says need no keeping."""
    kept = {name: value for name, value in state.items() if not isinstance(value, NotKept)}
    return kept, [value.value for value in state.values() if isinstance(value, NotKept)]


def refuse(found: Iterable[tuple[str, str]]) -> None:
    """Raises: CheckpointError naming each by its path and kind, where there is any."""
    every = sorted(set(found))
    if not every:
        return
    shown = "; ".join(f"{path} is a {kind}" for path, kind in every[:6])
    more = f"; and {len(every) - 6} more" if len(every) > 6 else ""
    name = every[0][0].rsplit(".", 1)[-1].split("[", 1)[0] or "name"
    raise CheckpointError(
        f"A checkpoint would not hold all of the state: {shown}{more}.",
        why="it has state, training can reach it, and nothing registers it: a resumed run would begin with it anew",
        fix=f'state={{"{name}": obj}}, an object with state_dict and load_state_dict; or, where the script makes it '
        f'anew just as it was, state={{"{name}": sw.not_kept(obj)}}',
    )


def _reach(
    roots: Mapping[str, Any], known: Iterable[int], ends: Callable[[str, Any], bool]
) -> Iterator[tuple[str, Any]]:
    """Every object once, with the shortest path to it; nothing that is known, and nothing behind what ends a path."""
    queue = deque((name, value, 0) for name, value in roots.items())
    seen, kept = set(known), list[Any]()
    while queue and len(kept) < MOST:
        path, value, depth = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)  # An id is one object's only while that lives.
        yield path, value
        if depth < DEPTH and not ends(path, value):
            queue.extend((f"{path}{step}", item, depth + 1) for step, item in _inside(value))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and how it is reached from there."""
    if isinstance(value, torch.Tensor | torch.Generator | torch.optim.Optimizer | types.CodeType):
        return
    if isinstance(value, dict):
        yield from ((_key(key), item) for key, item in _some(dict.items(value)))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", item) for index, item in enumerate(_some(_plain_iterator(value))))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, nn.Module):
        own = vars(value)
        yield from ((f".{name}", item) for name, item in own["_modules"].items())
        yield from ((f".{name}", item) for name, item in own.items() if not _of_torch_modules(name))
    elif _is_looked_into(type(value)):
        yield from ((f".{name}", item) for name, item in _attributes(value))


def _of_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # Not bound yet.
    yield from (("", item) for item in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Of the instance and its slots; no property is asked."""
    with contextlib.suppress(AttributeError):
        yield from _some(list(object.__getattribute__(value, "__dict__").items()))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(value)
                except AttributeError:
                    continue


def _has_state(path: str, value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(True for _ in _tensors(value))
    if isinstance(value, (torch.optim.Optimizer, nn.Parameter, *_DRAWERS)):
        return True
    kind = type(value)
    if _ours(kind) or not _tells_state(kind):
        return False
    # What a Stream reads tells its place by itself.
    return not (path.split(".")[0] in ("data", "valid") and hasattr(kind, "__iter__"))


def _acts(found: Found) -> bool:
    """Whether it is state whether or not it has changed yet."""
    if isinstance(found.value, nn.Module):
        return any(tensor.requires_grad for tensor in _tensors(found.value))
    return not isinstance(found.value, _DRAWERS)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and persistent buffers, from where torch keeps them: state_dict may be the user's."""
    for one in _modules_of(module):
        own = vars(one)
        passing = own["_non_persistent_buffers_set"]
        yield from (tensor for tensor in own["_parameters"].values() if tensor is not None)
        yield from (t for name, t in own["_buffers"].items() if t is not None and name not in passing)


def _modules_of(module: nn.Module) -> Iterator[nn.Module]:
    waiting, seen = [module], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [inner for inner in vars(one)["_modules"].values() if inner is not None]


def _print(value: Any) -> tuple[Any, ...]:
    """What tells whether it has changed; of a torch generator its seed first."""
    if isinstance(value, torch.Generator):
        return value.initial_seed(), xxhash.xxh3_64_intdigest(value.get_state().numpy().data)
    if isinstance(value, random.Random):
        return (random.Random.getstate(value),)
    if isinstance(value, np.random.RandomState):
        return (repr(value.get_state()),)
    if isinstance(value, _NUMPY):
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        return (repr(bits.state),)
    return tuple(_ends(tensor) for tensor in _tensors(value))


def _ends(tensor: torch.Tensor) -> int:
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    if local.is_meta:
        return 0
    flat, count = local.reshape(-1), max(1, _SEEN_BYTES // local.element_size())
    ends = torch.cat([flat[:count], flat[-count:]]).cpu()
    return xxhash.xxh3_64_intdigest(ends.view(torch.uint8).numpy().data)


def _tells_state(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def _ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "shardwise"


def _is_looked_into(kind: type) -> bool:
    """Objects of scripts and of data libraries; ours hold the user's only where they are data; torch's hold its own."""
    top = kind.__module__.split(".")[0]
    if _ours(kind):
        return kind.__module__.startswith("shardwise.data")
    return top not in ("torch", "builtins", "threading", "_thread") or kind.__module__.startswith("torch.utils.data")


def _of_torch_modules(name: str) -> bool:
    """Attributes that torch gives every module: hooks, and what is looked at otherwise."""
    return name in _MODULE_ATTRIBUTES or name.endswith("_hooks")


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _key(key: Any) -> str:
    """Of a dict, in a path; a key of the user's own kind is not asked how it is written."""
    return f"[{key!r}]" if type(key) in (str, int) else "[...]"


def _plain_iterator(value: Any) -> Iterator[Any]:
    """As the kind itself has it, whatever a subclass does."""
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
    (kind,) = [kind for kind in kinds if isinstance(value, kind)]
    iterator: Iterator[Any] = kind.__iter__(value)
    return iterator


def _some(items: Iterable[Any]) -> Iterator[Any]:
    return (item for item, _ in zip(items, range(WIDTH), strict=False))
