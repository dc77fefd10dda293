"""Canonical parameter names: the same under every wrapper, so that a checkpoint or a seed can key on them; and which
names of a module stand for a weight that is another rank's, and which ranks hold a module alike."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

# What DDP, torch.compile and activation checkpointing insert in front of a module's own name.
_INSERTED_ANYWHERE = ("_orig_mod", "_checkpoint_wrapped_module")
_INSERTED_IN_FRONT = "module"
_aliases: WeakKeyDictionary[Any, Mapping[str, str]] = WeakKeyDictionary()
_holders: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def keep_aliases(module: object, aliases: Mapping[str, str]) -> None:
    """Remember of a module that a pipeline has cut which names here are of a weight whose first name, given with it,
    lies on another rank: tied weights have a copy on several stages."""
    _aliases[module] = MappingProxyType(dict(aliases))


def aliases_of(module: object) -> Mapping[str, str]:
    """As `keep_aliases` was told; of any other module there are none."""
    return _aliases.get(module, MappingProxyType({}))


def keep_holders(module: object, ranks: Sequence[int]) -> None:
    """Remember of a module that a pipeline has cut which ranks hold the same part of it as this one."""
    _holders[module] = tuple(ranks)


def holders_of(module: object) -> tuple[int, ...] | None:
    """As `keep_holders` was told, in order; None of any other module: then all ranks hold it."""
    return _holders.get(module)


def canonical(name: str) -> str:
    """`name` without what wrappers add: `_orig_mod.` and its like anywhere, DDP's `module.` in front.

    A submodule of the user's that is called `module` keeps its name unless it leads. Idempotent.
    """
    *path, last = name.split(".")
    path = [part for part in path if part not in _INSERTED_ANYWHERE]
    while path and path[0] == _INSERTED_IN_FRONT:
        path = path[1:]
    return ".".join((*path, last))
