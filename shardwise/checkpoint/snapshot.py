"""What a training has to keep, by canonical name: weights, optimizer, `state=`, data position, RNG."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import rng
from shardwise.checkpoint.files import Content
from shardwise.checkpoint.layout import Region, spread, whole
from shardwise.checkpoint.manifest import Json, digest_of
from shardwise.checkpoint.packing import pack
from shardwise.checkpoint.regions import dtype_name, placed, to_bytes
from shardwise.errors import CheckpointError
from shardwise.names import canonical


@runtime_checkable
class Stateful(Protocol):
    """Anything that tells its state and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Subject:
    """What is kept. A single module or optimizer has the name "". `role` keys what belongs to this rank
    alone.
    """

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    data: Stateful | None
    state: MutableMapping[str, Any]
    role: str


class Weights(NamedTuple):
    """Parameters and persistent buffers by name; a tied one once, its other names as aliases of the first."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]


@dataclass
class Snapshot:
    """References, not copies. `shared` tensors are logical ones that all ranks hold or share; `own` this
    rank's. `buffers` are those of `shared` that a rank may have changed by itself.
    """

    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Json] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    role: str = ""

    def buffers_digest(self) -> str:
        """Differs between ranks whose buffers differ, as running means do where nothing synchronises them."""
        return digest_of(b"".join(to_bytes(self.shared[name]) for name in self.buffers))

    def keep_own_buffers(self) -> None:
        for name in self.buffers:
            self.own[own_name(self.role, name)] = self.shared[name]


def own_name(role: str, name: str) -> str:
    """What a rank's own tensor is called; `name` is the one that rank 0 holds."""
    return join("own", role, name)


def by_name(given: Any, kind: type) -> dict[str, Any]:
    """A mapping as it is, and a single object under the name ""."""
    if given is None:
        return {}
    return {"": given} if isinstance(given, kind) else dict(given)


def weights(modules: Mapping[str, nn.Module]) -> Weights:
    """Named `model/<canonical>`, or `model/<module>/<canonical>` where there are several modules.

    Raises: CheckpointError where two tensors get one name, or a module keeps something that is not a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _named(modules):
        known = first.setdefault(id(tensor), name)
        if tensors.get(name, tensor) is not tensor:
            raise CheckpointError(
                f"Two tensors are called {name!r} once wrappers are taken off.",
                fix="rename the submodule that is called module",
            )
        if known == name:
            tensors[name] = tensor
        else:
            aliases[name] = known
    return Weights(tensors, aliases)


def snapshot(subject: Subject) -> Snapshot:
    """Everything to be kept.

    Raises: CheckpointError naming what cannot be kept.
    """
    result = Snapshot(role=subject.role)
    result.shared, result.aliases = weights(subject.modules)
    result.buffers = [name for name, tensor in result.shared.items() if _is_buffer(tensor)]
    for name, optimizer in subject.optimizers.items():
        part = join("optimizer", name)
        result.state[part] = _pack_optimizer(subject, part, optimizer, result.shared)
    for name, value in subject.state.items():
        result.state[join("state", name)] = pack_state(name, value, result.shared)
    if subject.data is not None:
        result.state["data"] = _pack_data(subject.data)
    result.state["rng"] = pack(rng.capture(), join("rng", subject.role), result.own)
    # What cannot be written is an error on every rank and before a byte is, whoever would write it.
    for name, tensor in result.shared.items():
        dtype_name(name, tensor)
    return result


def contents(kept: Snapshot, *, rank: int, world: int) -> list[Content]:
    """What this rank writes: its shards, its own tensors, and its part of what several ranks hold alike.

    Replicas are spread by bytes, in the same way on every rank, without asking the others. Buffers are rank
    0's.
    """
    alike = {name: tensor for name, tensor in kept.shared.items() if name not in set(kept.buffers)}
    where = {name: placed(name, tensor, rank=rank, world=world) for name, tensor in alike.items()}
    mine = []
    for replicas in sorted({place.replicas for place in where.values()}):
        names = sorted(name for name, place in where.items() if place.replicas == replicas)
        owners = spread([kept.shared[name].numel() * kept.shared[name].element_size() for name in names], replicas)
        mine += [name for name, owner in zip(names, owners, strict=True) if where[name].replica == owner]
    shares = [_content(name, kept.shared[name], where[name].region) for name in mine]
    own = {**kept.own, **({name: kept.shared[name] for name in kept.buffers} if rank == 0 else {})}
    wholes = [_content(name, tensor, whole(tensor.shape)) for name, tensor in own.items()]
    # An empty shard has no bytes; a tensor that is empty as a whole must still be in the manifest.
    return [content for content in shares + wholes if content.region.numel or 0 in content.shape]


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Canonical names by the parameter's identity, without the `model/`."""
    return {id(tensor): name.removeprefix("model/") for name, tensor in reversed(list(_named(modules)))}


def join(*pieces: str) -> str:
    return "/".join(piece for piece in pieces if piece)


def pack_state(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Json:
    """A value of `state=`: what its state_dict gives, or the value itself."""
    value = value.state_dict() if isinstance(value, Stateful) else value
    return pack(value, join("state", name), tensors)


def _is_buffer(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter | DTensor)


def _named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for module_name, module in modules.items():
        # state_dict, not named_parameters: it leaves out buffers that are not persistent, and FSDP2 returns
        # to its shards for it.
        for name, tensor in module.state_dict(keep_vars=True).items():
            full = join("model", module_name, canonical(name))
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"{full!r} is a {type(tensor).__name__}, which cannot be saved.",
                    why="a module's weights are its parameters and persistent buffers",
                    fix="give it through state= instead of get_extra_state()",
                )
            yield full, tensor


def _pack_optimizer(
    subject: Subject, part: str, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> Json:
    names = parameter_names(subject.modules)
    groups, state = [], {}
    for index, group in enumerate(optimizer.param_groups):
        owned = [_name_of(parameter, names, part, index) for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": owned, "settings": pack(settings, join(part, "groups", str(index)), tensors)})
        for name, parameter in zip(owned, group["params"], strict=True):
            if parameter in optimizer.state:
                entries = optimizer.state[parameter]
                _refuse_unsplit(part, name, parameter, entries)
                state[name] = pack(dict(entries), join(part, "state", name), tensors)
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str], part: str, group: int) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"A parameter of shape {tuple(parameter.shape)} in group {group} of the {part} has no name.",
            why="it belongs to none of the modules that the Checkpointer was given",
            fix='give its module too, as in module={"model": model, "other": other}',
        )
    return names[id(parameter)]


def _refuse_unsplit(part: str, name: str, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
    """A plain tensor that goes with a sharded parameter could be this rank's alone, and nothing says so."""
    if placed(name, parameter, rank=0, world=1).region.shape == tuple(parameter.shape):
        return
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
            raise CheckpointError(
                f"{join(part, 'state', name, str(key))!r} is a plain tensor, and {name!r} is sharded.",
                why="whether it is a shard or a whole is not known, and a wrong guess would lose state",
                fix="use an optimizer whose state is made with zeros_like of the parameter",
            )


def _pack_data(data: Stateful) -> Json:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(data.state_dict(), "data", tensors)
    if tensors:
        raise CheckpointError(
            f"{min(tensors)!r} is a tensor, which a data position cannot hold.", fix="give it as numbers"
        )
    return packed


def _content(name: str, tensor: torch.Tensor, region: Region) -> Content:
    return Content(name, dtype_name(name, tensor), tuple(tensor.shape), region, partial(to_bytes, tensor))
