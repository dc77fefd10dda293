"""Resume: verify and stage everything in host memory; change the training only when all ranks could."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import torch

from shardwise import ranks
from shardwise.checkpoint import rng
from shardwise.checkpoint.manifest import Damaged, Json, Manifest, TensorEntry
from shardwise.checkpoint.packing import Reference, references, unpack
from shardwise.checkpoint.reading import Wanted, read_file
from shardwise.checkpoint.regions import DTYPES, dtype_name, local, region_of, to_bytes
from shardwise.checkpoint.snapshot import Snapshot, Stateful, Subject, join, own_name, parameter_names
from shardwise.checkpoint.staging import HostBuffer
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.switch import Here, drawer
from shardwise.errors import CheckpointError
from shardwise.regions import Region, inside, overlap

# Of the bytes that a rank needs: what all ranks hold alike, as counters of steps, is little.
ALONE = 0.9


class Staged(NamedTuple):
    """A verified checkpoint: `values` in host memory go into `targets`, the training's tensors or new
    ones. `draws`: the saved rank whose random generators go on here, None where this rank keeps its own.
    """

    manifest: Manifest
    targets: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    draws: int | None

    def state_of_draws(self) -> Json:
        return None if self.draws is None else self.manifest.state_of("rng", self.draws)


def check_world(manifest: Manifest, folder: str, world: int) -> None:
    """Raises: CheckpointError where another number of ranks wrote it."""
    if manifest.world != world:
        raise CheckpointError(
            f"{folder} was saved by {manifest.world} ranks, and {world} would resume it.",
            why="another number of ranks would draw other random numbers and add up in another order",
            fix=f"start {manifest.world} ranks, or load it for any number with resume(strict_world=False)",
        )


class Names(msgspec.Struct, frozen=True):
    """What the training has, over all its ranks: weights, and of each optimizer the parameters of its groups."""

    weights: set[str]
    groups: dict[str, list[set[str]]]

    def __or__(self, other: "Names") -> "Names":
        nothing: set[str] = set()
        groups = {
            part: [a | b for a, b in zip_longest(self.groups.get(part, []), theirs, fillvalue=nothing)]
            for part, theirs in other.groups.items()
        }
        return Names(self.weights | other.weights, self.groups | groups)


def names_of(current: Snapshot) -> Names:
    """This rank's."""
    held = {name for name in (*current.shared, *current.aliases) if name.startswith("model/")}
    optimizers = {part: state for part, state in current.state.items() if part.split("/")[0] == "optimizer"}
    return Names(held, {part: [set(g["params"]) for g in state["groups"]] for part, state in optimizers.items()})


def stage(
    store: Store, folder: str, manifest: Manifest, subject: Subject, current: Snapshot, names: Names, here: Here,
    buffer: HostBuffer,
) -> Staged:  # fmt: skip
    """Reads what this rank needs, every byte against its digest, and changes nothing.

    `names`: those of all ranks together, which must be the ones that were saved.

    Each file is verified whole by one rank, and each chunk by every rank that uses it. Host memory: this
    rank's shards once, in `buffer`. Raises: Damaged; CheckpointError where it does not fit the training, naming the
    keys.
    """
    _check_parts(manifest, subject)
    entries = entries_of(manifest, subject.role)
    targets = _targets(manifest, entries, subject, current, names)
    staged = Staged(manifest, targets, {}, drawer(manifest, ranks.rank(), here))
    for reference in references(staged.state_of_draws()):
        targets[reference.name] = _new(entries, reference, None)
    wanted: dict[str, list[Wanted]] = {file.name: [] for file in manifest.files}
    for (name, target), memory in zip(targets.items(), _room(targets, buffer), strict=True):
        staged.values[name] = _want(entries[name], name, target, memory, wanted)
    mine = {file.name for index, file in enumerate(manifest.files) if index % ranks.world() == ranks.rank()}
    alone = _alone(wanted, mine)
    for file in manifest.files:
        read_file(store, folder, file, wanted[file.name], whole=file.name in mine, alone=alone)
    return staged


def _room(targets: Mapping[str, torch.Tensor], buffer: HostBuffer) -> list[torch.Tensor]:
    """Memory for this rank's region of each."""
    sizes = [region_of(name, target).numel * target.element_size() for name, target in targets.items()]
    return buffer.room(sizes, pinned=any(target.is_cuda for target in targets.values()))


def _alone(wanted: Mapping[str, Sequence[Wanted]], mine: Collection[str]) -> bool:
    """Whether this rank takes nearly all that it needs from the files that it verifies: then others do too, and no file
    is read by many, for whom the page cache would hold it.
    """
    sizes = {name: sum(one.chunk.bytes for one in chunks) for name, chunks in wanted.items()}
    return sum(sizes[name] for name in mine) >= ALONE * sum(sizes.values())


def apply(staged: Staged, subject: Subject) -> None:
    """Puts the staged state into the training: data position first, since data may refuse it and then nothing is
    changed; weights, optimizers, `state=`; and RNG last.
    """
    fetch = staged.targets.__getitem__
    if subject.data is not None:
        subject.data.load_state_dict(unpack(_state(staged.manifest, "data"), fetch))
    with torch.no_grad():
        for name, target in staged.targets.items():
            local(target).copy_(staged.values[name])
    for name, optimizer in subject.optimizers.items():
        _apply_optimizer(_state(staged.manifest, join("optimizer", name)), optimizer, subject, fetch)
    for name in subject.state:
        _apply_state(name, unpack(_state(staged.manifest, join("state", name)), fetch), subject)
    drawn = staged.state_of_draws()
    if drawn is not None:
        rng.restore(unpack(drawn, fetch))


def _state(manifest: Manifest, part: str) -> Json:
    return manifest.state_of(part, ranks.rank())


def _check_parts(manifest: Manifest, subject: Subject) -> None:
    """Both ways: what is saved and nobody takes, and what is there and was not saved."""
    asked = {join("optimizer", name) for name in subject.optimizers} | {join("state", name) for name in subject.state}
    asked |= {"data"} if subject.data is not None else set()
    saved = manifest.parts() - {"rng"}
    single = sorted(set(manifest.state_by_rank) - {"rng"})
    if single and manifest.world != ranks.world():
        raise CheckpointError(
            f"{_some(single)} was saved by {manifest.world} ranks, each for itself; {ranks.world()} resume.",
            why="what differs between ranks has no meaning for another number of them",
            fix=f"start {manifest.world} ranks; keep in state= and data= only what is the same on all ranks",
        )
    _refuse_difference("parts", saved, asked, fix="give the Checkpointer the same optimizer=, data= and state=")


def _targets(
    manifest: Manifest, entries: Mapping[str, TensorEntry], subject: Subject, current: Snapshot, names: Names
) -> dict[str, torch.Tensor]:
    """A tensor to fill for each that this rank loads: the training's own where it has one, else a new one."""
    targets = _weight_targets(entries, current, names)
    for name, optimizer in subject.optimizers.items():
        part = join("optimizer", name)
        packed = _state(manifest, part)
        # Where the ranks' optimizers could not be put together, each rank's is compared with its own.
        groups = names.groups[part] if part in manifest.state else names_of(current).groups[part]
        _check_optimizer(part, packed, current.state[part], groups)
        targets |= _optimizer_targets(packed, optimizer, subject, entries, current)
    for name, value in subject.state.items():
        for reference in references(_state(manifest, join("state", name))):
            known = current.shared.get(reference.name)
            fresh = isinstance(value, Stateful) or known is None
            targets[reference.name] = _new(entries, reference, known) if fresh or known is None else known
    for name, target in targets.items():
        _check_shape(entries[name], name, target)
    return targets


def _weight_targets(entries: Mapping[str, TensorEntry], current: Snapshot, names: Names) -> dict[str, torch.Tensor]:
    targets = {name: tensor for name, tensor in current.shared.items() if name.startswith("model/")}
    saved = {name for name in entries if name.startswith("model/")}
    _refuse_difference("weights", saved, names.weights, fix="build the model that was saved")
    for name, first in current.aliases.items():
        if entries[name].name != entries[first].name:
            raise CheckpointError(
                f"{name!r} and {first!r} are one weight here, and were saved as two.",
                why="only one of them could be loaded",
                fix="build the model that was saved, with these two not tied",
            )
    return targets


def _check_optimizer(part: str, saved: Json, current: Json, groups: Sequence[set[str]]) -> None:
    fix = "build the optimizer that was saved, with its groups in the same order"
    if saved["kind"] != current["kind"]:
        raise CheckpointError(f"The {part} is a {current['kind']}, and a {saved['kind']} was saved.", fix=fix)
    if len(saved["groups"]) != len(current["groups"]):
        raise CheckpointError(
            f"The {part} has {len(current['groups'])} groups, and {len(saved['groups'])} were saved.", fix=fix
        )
    for index, (old, new) in enumerate(zip(saved["groups"], current["groups"], strict=True)):
        what = f"{part} group {index}"
        _refuse_difference(f"{what} parameters", set(old["params"]), groups[index], fix=fix)
        _refuse_difference(f"{what} settings", set(old["settings"]), set(new["settings"]), fix=fix)


def _optimizer_targets(
    packed: Json,
    optimizer: torch.optim.Optimizer,
    subject: Subject,
    entries: Mapping[str, TensorEntry],
    current: Snapshot,
) -> dict[str, torch.Tensor]:
    """An optimizer that made no step yet has no state: it is made like its parameter where the shapes
    agree.
    """
    parameters = _parameters(optimizer, subject)
    targets = {}
    for name in packed["state"].keys() & parameters.keys():
        for reference in references(packed["state"][name]):
            known = current.shared.get(reference.name)
            targets[reference.name] = (
                known if known is not None else _new(entries, reference, parameters[name].detach())
            )
    for reference in references([group["settings"] for group in packed["groups"]]):
        known = current.shared.get(reference.name)
        targets[reference.name] = known if known is not None else _new(entries, reference, None)
    return targets


def _new(entries: Mapping[str, TensorEntry], reference: Reference, like: torch.Tensor | None) -> torch.Tensor:
    """An empty tensor for a saved one: split like `like` where it has that shape, else whole."""
    entry = entries.get(reference.name)
    if entry is None:
        raise Damaged(f"The manifest names {reference.name!r} and does not hold it.")
    dtype = DTYPES[entry.dtype]
    if like is not None and tuple(like.shape) == entry.shape:
        return torch.empty_like(like, dtype=dtype)
    device = "cpu" if reference.device == "cpu" else like.device if like is not None else ranks.device_kind()
    return torch.empty(entry.shape, dtype=dtype, device=device)


def _check_shape(entry: TensorEntry, name: str, target: torch.Tensor) -> None:
    shape, dtype = tuple(target.shape), dtype_name(name, target)
    if (entry.shape, entry.dtype) != (shape, dtype):
        raise CheckpointError(
            f"{name!r} is {dtype} {list(shape)}, and {entry.dtype} {list(entry.shape)} was saved.",
            why="a tensor is loaded into one of the same shape and dtype, never converted or cut",
            fix="build the model and optimizer that were saved, in the same precision",
        )


def entries_of(manifest: Manifest, role: str) -> dict[str, TensorEntry]:
    """The saved tensors as this rank sees them: its own where it kept one, tied names as what they name."""
    stored = {entry.name: entry for entry in manifest.tensors}
    seen = {name: stored.get(own_name(role, name), entry) for name, entry in stored.items()}
    return seen | {alias: seen[name] for alias, name in manifest.aliases.items()}


def _want(
    entry: TensorEntry, name: str, target: torch.Tensor, memory: torch.Tensor, wanted: dict[str, list[Wanted]]
) -> torch.Tensor:
    """This rank's region of a tensor, in `memory`; what fills it, from chunks that overlap it, goes to `wanted`."""
    region = region_of(name, target)
    value, filled = memory.view(DTYPES[entry.dtype]).view(region.shape), 0
    for chunk in entry.chunks:
        held = Region(chunk.offsets, chunk.shape)
        shared = overlap(region, held)
        if shared is None:
            continue
        if chunk.file not in wanted or chunk.bytes != value.element_size() * held.numel:
            raise Damaged(f"{name!r} is not in {chunk.file} as the manifest says.")
        if held == region:
            one = Wanted(chunk, partial(to_bytes, value), lambda _: None)
        else:
            one = Wanted(chunk, partial(_memory, chunk.bytes), partial(_cut, value, region, shared, held))
        wanted[chunk.file].append(one)
        filled += shared.numel
    if filled != region.numel:
        raise Damaged(f"{name!r} is not whole: {filled} of {region.numel} values are there.")
    return value


def _memory(size: int) -> memoryview:
    return memoryview(bytearray(size))


def _cut(value: torch.Tensor, region: Region, shared: Region, held: Region, data: memoryview) -> None:
    """Of a chunk's bytes what the region holds of them, into its place."""
    chunk = torch.frombuffer(data, dtype=value.dtype).reshape(held.shape)
    value[inside(shared, region)] = chunk[inside(shared, held)]


def _parameters(optimizer: torch.optim.Optimizer, subject: Subject) -> dict[str, torch.Tensor]:
    names = parameter_names(subject)
    return {names[id(item)]: item for group in optimizer.param_groups for item in group["params"]}


def _apply_optimizer(
    packed: Json, optimizer: torch.optim.Optimizer, subject: Subject, fetch: Callable[[str], torch.Tensor]
) -> None:
    parameters = _parameters(optimizer, subject)
    for saved, group in zip(packed["groups"], optimizer.param_groups, strict=True):
        group.update(unpack(saved["settings"], fetch))
    optimizer.state.clear()
    for name, state in packed["state"].items():
        if name in parameters:  # The others are other ranks'.
            optimizer.state[parameters[name]] = unpack(state, fetch)


def _apply_state(name: str, value: Any, subject: Subject) -> None:
    """Through load_state_dict, in place for a list or dict, else by putting the value into `state`."""
    held = subject.state[name]
    if isinstance(held, Stateful):
        held.load_state_dict(value)
    elif isinstance(held, dict) and isinstance(value, dict):
        held.clear()
        held.update(value)
    elif isinstance(held, list) and isinstance(value, list):
        held[:] = value
    else:
        subject.state[name] = value


def _refuse_difference(what: str, saved: set[str], asked: set[str], *, fix: str) -> None:
    missing, extra = sorted(asked - saved), sorted(saved - asked)
    if missing or extra:
        lines = [f"not in the checkpoint: {_some(missing)}"] if missing else []
        lines += [f"only in the checkpoint: {_some(extra)}"] if extra else []
        raise CheckpointError(f"The checkpoint does not fit: its {what} differ.", why="; ".join(lines), fix=fix)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
