"""What a training has to keep, by canonical name: weights, optimizer, `state=`, data position, RNG."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import rng
from shardwise.checkpoint.files import Content
from shardwise.checkpoint.layout import Alike, Ranks, alike, shares
from shardwise.checkpoint.manifest import Json, digest_of
from shardwise.checkpoint.packing import pack
from shardwise.checkpoint.regions import dtype_name, holders_of, region_of, to_bytes
from shardwise.errors import CheckpointError
from shardwise.names import canonical
from shardwise.regions import Region, whole


@runtime_checkable
class Stateful(Protocol):
    """Anything that tells its state and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Subject:
    """What is kept. A single module or optimizer has the name "". `role` keys what belongs to this rank
    alone. `copies`: each name here of a weight that another rank keeps under the name it is given here.
    `world`: how many ranks there are. `holders`: of a module by name, the ranks that hold it alike; left out, all.
    """

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    data: Stateful | None
    state: MutableMapping[str, Any]
    role: str
    copies: Mapping[str, str] = field(default_factory=dict)
    world: int = 1
    holders: Mapping[str, Ranks] = field(default_factory=dict)


class Weights(NamedTuple):
    """Parameters and persistent buffers by name; a tied one once, its other names as aliases of the first.

    `copies`: the names whose first holder is another rank, which writes them; this one reads them.
    `modules`: which module each is of.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    copies: set[str]
    modules: dict[str, str]


@dataclass
class Snapshot:
    """References, nothing is copied. `shared` tensors are logical ones that several ranks may hold or share;
    `own` this rank's. Of `shared`, `apart` are those that a rank may have changed by itself, and `copies` those
    that another rank writes. `holders`: of each other one, the ranks that hold its module.
    """

    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, Json] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    holders: dict[str, Ranks] = field(default_factory=dict)
    role: str = ""

    def layout(self) -> "Layout":
        """Where what this rank holds lies, and who holds it too: worked out, nobody is asked."""
        names = sorted(self.shared.keys() - self.apart - self.copies)
        known: dict[Any, Ranks] = {}
        holders = {name: holders_of(self.shared[name], self.holders[name], known) for name in names}
        return Layout({name: region_of(name, self.shared[name]) for name in names}, holders)

    def digests(self) -> dict[str, str]:
        """Of what may differ between ranks, as running means do where nothing synchronises them."""
        return {name: digest_of(to_bytes(self.shared[name])) for name in sorted(self.apart)}


class Layout(NamedTuple):
    """Regions that this rank holds as others do or may, and the ranks that hold the same region, by name."""

    regions: dict[str, Region]
    holders: dict[str, Ranks]

    def alike(self) -> tuple[Alike, ...]:
        return alike(self.regions, self.holders)


class Part(NamedTuple):
    """What is to be written of a tensor, and this rank's values of it, which training goes on to change."""

    content: Content
    values: torch.Tensor


def own_name(role: str, name: str) -> str:
    """What a rank's own tensor is called; `name` is that of the first rank that holds one."""
    return join("own", role, name)


def by_name(given: Any, kind: type) -> dict[str, Any]:
    """A mapping as it is, and a single object under the name ""."""
    if given is None:
        return {}
    return {"": given} if isinstance(given, kind) else dict(given)


def weights(modules: Mapping[str, nn.Module], copies: Mapping[str, str]) -> Weights:
    """Named `model/<canonical>`, or `model/<module>/<canonical>` where there are several modules.

    Raises: CheckpointError where two tensors get one name, or a module keeps something that is not a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    homes: dict[str, str] = {}
    elsewhere = {join("model", name): join("model", target) for name, target in copies.items()}
    for module, name, tensor in _named(modules):
        known = first.setdefault(id(tensor), elsewhere.get(name, name))
        if tensors.setdefault(known, tensor) is not tensor or (name in tensors and known != name):
            raise CheckpointError(
                f"Two tensors are called {name!r} once wrappers are taken off.",
                fix="rename the submodule that is called module",
            )
        homes.setdefault(known, module)
        if known != name:
            aliases[name] = known
    return Weights(tensors, aliases, {known for known in first.values() if known in elsewhere.values()}, homes)


def snapshot(subject: Subject) -> Snapshot:
    """Everything to be kept.

    Raises: CheckpointError naming what cannot be kept.
    """
    result = Snapshot(role=subject.role)
    result.shared, result.aliases, result.copies, modules = weights(subject.modules, subject.copies)
    everyone = tuple(range(subject.world))
    result.holders = {name: subject.holders.get(modules[name], everyone) for name in result.shared}
    result.apart = {name for name, tensor in result.shared.items() if _is_buffer(tensor)}
    for name, optimizer in subject.optimizers.items():
        part = join("optimizer", name)
        result.state[part] = _pack_optimizer(subject, part, optimizer, result)
    for name, value in subject.state.items():
        result.state[join("state", name)] = pack_state(name, value, result.shared)
    for name, tensor in result.shared.items():
        if name.startswith("state/"):
            result.holders[name] = everyone
            result.apart |= set() if isinstance(tensor, DTensor) else {name}
    if subject.data is not None:
        result.state["data"] = _pack_data(subject.data)
    result.state["rng"] = pack(rng.capture(), join("rng", subject.role), result.own)
    # What cannot be written is an error on every rank and before a byte is, whoever would write it.
    for name, tensor in result.shared.items():
        dtype_name(name, tensor)
    return result


def parts(
    kept: Snapshot, layout: Layout, digests: Sequence[Mapping[str, str]], *, rank: int
) -> tuple[list[Part], list[Part]]:
    """What this rank writes: its shards, its own tensors, and its part of what several ranks hold alike; and its
    copies of what another rank writes. `digests` by rank.

    Of what differs between ranks the first holder's is the shared one, and each that differs is its rank's own.
    """
    regions, holders = dict(layout.regions), dict(layout.holders)
    wholes = dict(kept.own)
    for name in sorted(kept.apart):
        held = [(other, each[name]) for other, each in enumerate(digests) if name in each]
        if digests[rank][name] == held[0][1]:
            regions[name] = whole(kept.shared[name].shape)
            holders[name] = tuple(other for other, digest in held if digest == held[0][1])
        else:
            wholes[own_name(kept.role, name)] = kept.shared[name]
    sizes = {name: region.numel * kept.shared[name].element_size() for name, region in regions.items()}
    found = [_part(name, kept.shared[name], regions[name]) for name in sorted(shares(sizes, holders, rank))]
    found += [_part(name, tensor, whole(tensor.shape)) for name, tensor in wholes.items()]
    copies = [_part(name, kept.shared[name], region_of(name, kept.shared[name])) for name in sorted(kept.copies)]
    # An empty shard has no bytes; a tensor that is empty as a whole must still be in the manifest.
    return [part for part in found if part.content.region.numel or 0 in part.content.shape], copies


def parameter_names(subject: Subject) -> dict[int, str]:
    """Canonical names by the parameter's identity, without the `model/`: of a copy, its first holder's name."""
    named = {id(tensor): name.removeprefix("model/") for _, name, tensor in reversed(list(_named(subject.modules)))}
    return {identity: subject.copies.get(name, name) for identity, name in named.items()}


def join(*pieces: str) -> str:
    return "/".join(piece for piece in pieces if piece)


def pack_state(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Json:
    """A value of `state=`: what its state_dict gives, or the value itself."""
    value = value.state_dict() if isinstance(value, Stateful) else value
    return pack(value, join("state", name), tensors)


def _is_buffer(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter | DTensor)


def _named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Module, canonical name, tensor."""
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
            yield module_name, full, tensor


def _pack_optimizer(subject: Subject, part: str, optimizer: torch.optim.Optimizer, kept: Snapshot) -> Json:
    names = parameter_names(subject)
    groups, state = [], {}
    for index, group in enumerate(optimizer.param_groups):
        owned = [_name_of(parameter, names, part, index) for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key != "params"}
        before = set(kept.shared)
        groups.append({"params": owned, "settings": pack(settings, join(part, "groups", str(index)), kept.shared)})
        kept.apart |= kept.shared.keys() - before  # All ranks have the groups, whatever parameters are in them.
        for name, parameter in zip(owned, group["params"], strict=True):
            if parameter in optimizer.state:
                entries, before = optimizer.state[parameter], set(kept.shared)
                _refuse_unsplit(part, name, parameter, entries)
                state[name] = pack(dict(entries), join(part, "state", name), kept.shared)
                made = kept.shared.keys() - before
                kept.holders |= dict.fromkeys(made, kept.holders[join("model", name)])
                if join("model", name) in kept.copies:
                    kept.copies |= made
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
    if region_of(name, parameter).shape == tuple(parameter.shape):
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


def _part(name: str, tensor: torch.Tensor, region: Region) -> Part:
    content = Content(name, dtype_name(name, tensor), tuple(tensor.shape), region, partial(to_bytes, tensor))
    return Part(content, tensor)
