"""From a factory to a module whose every number is known: built under the seed, or initialised afterwards."""

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.environment import process_identity
from shardwise.errors import ModelError
from shardwise.names import canonical
from shardwise.units import format_bytes

# What an integer holds that nothing has written. A bool has no value to spare: it starts False, unchecked.
_INTEGER_SENTINEL = {
    torch.uint8: 0xA5, torch.int8: -0x5B, torch.int16: -0x5A5B, torch.int32: -0x5A5A5A5B,
    torch.int64: -0x5A5A5A5A5A5A5A5B,
}  # fmt: skip
_NAMES_SHOWN = 8


def build(source: object, seed: int, *, memory_bytes: int | None = None) -> nn.Module:
    """The module that `source` is or makes, on CPU (or where the factory put it), every parameter finite.

    A factory runs under `seed`, and the caller's random state stands afterwards as before. Parameters and
    buffers that it left on the meta device get storage and are initialised by the root's `init_weights()`,
    else by `reset_parameters()` of each module that owns one. `memory_bytes` is what all ranks of this host
    may take together (default: what is available).

    Raises: ModelError for what is no module, does not fit in memory, or has a parameter or buffer that
    nothing initialises.
    """
    share = (available_bytes() if memory_bytes is None else memory_bytes) // process_identity().local_world
    if isinstance(source, nn.Module):
        module = source
    else:
        with seeded(seed), _refuse_above(share):
            module = _call(source)
    if any(tensor.is_meta for tensor in _tensors(module).values()):
        _require_memory(sum(_bytes(tensor) for tensor in _tensors(module).values() if tensor.is_meta), share)
        with seeded(seed):
            _materialize(module)
    _require_finite(module)
    return module


def load_factory(path: str) -> Callable[[], nn.Module]:
    """The function at `my.module:build`. Raises: ModelError where there is none."""
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise ModelError(f"model.factory = {path!r} names no function.", fix='write it as "my.module:build"')
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model.factory = {path!r} cannot be imported.",
            why=str(error),
            fix="start from the folder that holds the module, or install its package",
        ) from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        raise ModelError(
            f"model.factory: {module_name} has no function {attribute!r}.", fix='write "my.module:function"'
        )
    return factory


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's, numpy's and Python's global generators under `seed`; restored at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def available_bytes() -> int:
    """Memory that this host can still give, within this container's limit."""
    limits = [_meminfo("MemAvailable")]
    most, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if most.exists() and used.exists() and most.read_text().strip().isdigit():
        limits.append(int(most.read_text()) - int(used.read_text()))
    return min(limits)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ModelError(f"/proc/meminfo has no {key}.", fix="give memory_bytes")


def _call(factory: object) -> nn.Module:
    if not callable(factory):
        raise ModelError(
            f"model is {type(factory).__name__}, neither a module nor a function that makes one.",
            fix="model=build_model, a function without arguments that returns an nn.Module",
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ModelError(
            f"The model's factory wants arguments: {error}.", fix="model=lambda: build_model(...)"
        ) from None
    except ValueError:
        pass  # built-in callables have no signature to look at
    module = factory()
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"The model's factory returned {type(module).__name__}, not an nn.Module.",
            fix="return the module",
        )
    return module


@contextmanager
def _refuse_above(limit: int) -> Iterator[None]:
    """Counts parameters as modules register them, and refuses the first that no longer fits."""
    registered: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            registered.setdefault(module, {})[name] = _bytes(parameter)
            _require_memory(sum(sum(sizes.values()) for sizes in registered.values()), limit)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _require_memory(needed: int, share: int) -> None:
    if needed > share:
        raise ModelError(
            f"The model takes {format_bytes(needed)} of memory or more, a rank has {format_bytes(share)}.",
            why="each rank builds the whole module in host memory before it keeps its shards",
            fix="fewer ranks on a host (train.devices), a host with more memory, or a decoder of ours "
            "(model.preset, model.config), which is built shard by shard",
        )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, the unsaved ones too, each once, by canonical name."""
    return {canonical(name): tensor for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def _materialize(module: nn.Module) -> None:
    owners = _give_storage(module)
    if callable(getattr(module, "init_weights", None)):
        module.init_weights()
        how = f"{type(module).__name__}.init_weights() leaves it unset"
    else:
        # Children first, as constructors run: a parent's rule then has the last word.
        for owner in reversed(owners):
            reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
            if callable(reset):
                reset()
        how = "its module has no reset_parameters(), or one that leaves it unset"
    left = [name for name, tensor in _tensors(module).items() if _unset(tensor)]
    if left:
        more = f" and {len(left) - _NAMES_SHOWN} more" if len(left) > _NAMES_SHOWN else ""
        raise ModelError(
            f"Nothing initialises {', '.join(left[:_NAMES_SHOWN])}{more}.",
            why=f"it was built on the meta device, and {how}",
            fix="set it in init_weights() of the model, or build the model on CPU",
        )


@torch.no_grad()
def _give_storage(module: nn.Module) -> list[nn.Module]:
    """Replace meta tensors by marked ones on CPU, tied ones by one; which modules own any, parents first."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    owners: list[nn.Module] = []
    for owner in list(module.modules()):
        named = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        ]
        on_meta = [(name, tensor) for name, tensor in named if tensor.is_meta]
        for name, tensor in on_meta:
            if tensor not in made:
                made[tensor] = _marked(tensor)
            setattr(owner, name, made[tensor])
        if on_meta:
            owners.append(owner)
    return owners


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor like a meta one, filled with what `_unset` finds again."""
    made = torch.empty_like(tensor, device="cpu")
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    else:
        made.fill_(_INTEGER_SENTINEL.get(made.dtype, 0))
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _unset(tensor: torch.Tensor) -> bool:
    """A NaN left in a float; the sentinel left in an integer (of 8 bits: in all of it)."""
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype not in _INTEGER_SENTINEL:
        return False
    marked = tensor == _INTEGER_SENTINEL[tensor.dtype]
    return bool(marked.all() if tensor.element_size() == 1 else marked.any())


def _require_finite(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise ModelError(
                f"The parameter {canonical(name)} is not finite before the first step.",
                why="it was not initialised, or loaded from a run that had diverged",
                fix="initialise or load it again",
            )
