"""One rank of a world that is not there: a process group that answers at once, tensors without data.

What a program learns from other ranks or from a tensor's value has to be made up. The rules, and why they are honest:

- every rank says what this one says (`ranks.gather_json`): names and layouts, which a right program gives alike on
  every rank; that their collectives match is checked afterwards, sequence against sequence;
- a number read from a tensor is one (true), and two tensors that are compared are equal: counts are then above zero and
  losses finite, the path of a sound step;
- a hidden tensor that comes from another stage has the shape that the rank which sends it gave it in its own dry run,
  or (in an interleaved schedule, where that rank comes later) that of this rank's own; sizes are compared afterwards.

Modules are built and wrapped on meta with real meshes; tensors without data come in where they get their storage.
"""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise import ranks
from shardwise.errors import BadInput
from shardwise.parallel.pipeline import Shape
from shardwise.torch_private import OperatorMode, fake_store, forget_layouts, without_data
from shardwise.verify.live_bytes import Watch


class FakeWorld:
    """`with FakeWorld(rank, world) as fake:` wrap modules on meta, give them storage, then `fake.begin()`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.mode: Any = without_data()
        self.watch = Watch(number_for=one)
        self._modes: list[Any] = []
        self._pretended: Any = ranks.pretended()

    def __enter__(self) -> "FakeWorld":
        """Raises: BadInput in a process that is part of a real group."""
        if dist.is_initialized():
            raise BadInput(
                "A dry run needs a process without a process group.",
                why="it takes the place of the group",
                fix="run shardwise verify by itself, not under torchrun",
            )
        self._pretended.__enter__()
        forget_layouts()
        if self.world > 1:
            dist.init_process_group("fake", rank=self.rank, world_size=self.world, store=fake_store())
        self._push(Placing(self.mode))
        return self

    def begin(self, _module: Any = None) -> None:
        """From here on every new tensor is without data, and is counted. Given as `initialize`: after the storage."""
        self._pop_all()
        self._push(self.mode)
        self._push(self.watch)

    def __exit__(self, *_error: object) -> None:
        self._pop_all()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_layouts()
        self._pretended.__exit__(None, None, None)

    def _push(self, mode: Any) -> None:
        mode.__enter__()
        self._modes.append(mode)

    def _pop_all(self) -> None:
        while self._modes:
            self._modes.pop().__exit__(None, None, None)


class Placing(OperatorMode):
    """Storage for what is on meta is without data; everything else stays real, the meshes too."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if operator is torch.ops.aten.empty_like.default and args[0].is_meta and kwargs.get("device") is not None:
            with self.mode:
                return torch.empty_strided(
                    args[0].shape, args[0].stride(), dtype=args[0].dtype, device=kwargs["device"]
                )
        return operator(*args, **kwargs)


def one(tensor: torch.Tensor) -> float | int | bool:
    """The value of every number that is read."""
    if tensor.is_floating_point():
        return 1.0
    return True if tensor.dtype is torch.bool else 1


class KnownShapes(dict[Hashable, Shape]):
    """A pipeline's shapes of hidden tensors as they are after the first step: none crosses any more.

    `everywhere`: what the ranks before this one gave, kept from rank to rank. A stage whose sender comes later (in an
    interleaved schedule) takes what this rank gives for a batch of the same shapes.
    """

    def __init__(self, everywhere: dict[Hashable, Shape]) -> None:
        super().__init__()
        self.everywhere = everywhere

    def get(self, key: Any, default: Any = None) -> Any:
        """`key`: the receiving stage, the mode, the batch's shapes."""
        found = super().get(key) or self.everywhere.get(key)
        alike = (shape for other, shape in self.everywhere.items() if other[1:] == key[1:])  # type: ignore[index]
        return found or next(alike, default)

    def setdefault(self, key: Any, shape: Any = None) -> Any:
        """What this rank gave before, or the same again; never `shape` itself, which would be news to the receiver."""
        self.everywhere[key] = shape
        return Shape(*super().setdefault(key, shape))
