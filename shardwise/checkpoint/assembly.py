"""What all ranks wrote becomes one manifest, once it is seen to be the whole state, each value once."""

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shardwise.checkpoint.manifest import FileEntry, Json, Machine, Manifest, Record, TensorEntry, fault_of
from shardwise.checkpoint.packing import references
from shardwise.checkpoint.revision import revision
from shardwise.checkpoint.root import added, root_of
from shardwise.errors import CheckpointError
from shardwise.regions import Region

_LIBRARIES = ("shardwise", "torch", "numpy", "safetensors", "msgspec", "xxhash")


class Header(Record, frozen=True):
    """What rank 0 knows of a checkpoint before its tensors."""

    step: int
    created: float
    why: str
    lineage: str
    plan_digest: str
    decision: Json
    samples: int | None
    plan: Json = None


class Copy(Record, frozen=True):
    """This rank's region of a tensor that another rank writes, and the digest that its bytes should have there."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


class Share(Record, frozen=True):
    """What one rank wrote. `copies`: what it holds beside that, of tied weights."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    state: dict[str, Json]
    copies: tuple[Copy, ...] = ()


def assemble(header: Header, shares: Sequence[Share]) -> Manifest:
    """The manifest of what all ranks wrote. State that is the same everywhere is kept once."""
    entries: dict[str, TensorEntry] = {}
    for entry in (entry for share in shares for entry in share.tensors):
        known = entries.get(entry.name)
        if known is not None:
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"Ranks disagree on {entry.name!r}: {known.shape} and {entry.shape}.")
            both = added([known.sum, entry.sum])
            entry = msgspec.structs.replace(known, chunks=known.chunks + entry.chunks, sum=both)
        entries[entry.name] = entry
    alike, by_rank = _divide([share.state for share in shares])
    return Manifest(
        **msgspec.structs.asdict(header),
        world=len(shares),
        machine=machine(),
        files=tuple(share.file for share in shares),
        tensors=tuple(entries[name] for name in sorted(entries)),
        aliases={name: target for share in shares for name, target in share.aliases.items()},
        state=alike,
        state_by_rank=by_rank,
        root=root_of(header.step, entries.values(), alike),
    )


def machine() -> Machine:
    return Machine(
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
        },
        torch_threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        revision=revision(),
    )


def _version(name: str) -> str:
    """ "" where it is no installed package, as Shardwise itself is where it runs from its source folder."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_whole(manifest: Manifest) -> None:
    """Raises: CheckpointError naming the tensor and region that was written twice, or not at all."""
    faults = {entry.name: fault for entry in manifest.tensors if (fault := fault_of(entry))}
    named = {*manifest.aliases.values()}
    for packed in (*manifest.state.values(), *manifest.state_by_rank.values()):
        named |= {reference.name for reference in references(list(packed) if isinstance(packed, tuple) else packed)}
    faults |= dict.fromkeys(sorted(named - {entry.name for entry in manifest.tensors}), "it was written by no rank")
    if faults:
        name, fault = next(iter(faults.items()))
        raise CheckpointError(
            f"{len(faults)} of {len(manifest.tensors)} tensors are not written once and whole: {name!r}: {fault}.",
            why="the ranks' shards do not add up to the logical tensor",
            fix="shard every module over a mesh that all its ranks share",
        )


def check_copies(manifest: Manifest, copies: Sequence[Sequence[Copy]]) -> None:
    """Raises: CheckpointError naming a tied weight, or its optimizer state, that a rank holds with other bits."""
    written = {
        (entry.name, chunk.offsets, chunk.shape): chunk.digest for entry in manifest.tensors for chunk in entry.chunks
    }
    for rank, held in enumerate(copies):
        for copy in held:
            region = Region(copy.offsets, copy.shape)
            if region.numel and written.get((copy.name, *region), copy.digest) != copy.digest:
                raise CheckpointError(
                    f"The copies of the tied weight behind {copy.name!r} differ: {region} on rank {rank} and where it "
                    "is written from.",
                    why="both must get the same updates, or the model is no longer the one that was described",
                    fix="put every name of a tied weight into an optimizer group of the same settings, and change "
                    "weights on all ranks that hold them",
                )


def union_of(states: Sequence[Json]) -> Json:
    """One optimizer out of what the ranks say of theirs: every rank may hold other parameters, under equal groups.

    None where their kinds, groups or settings differ, or two say otherwise of one parameter: then each rank keeps its
    own, and only the same ranks can resume it.
    """
    first = states[0]
    if any(state is None or _frame(state) != _frame(first) for state in states):
        return None
    groups: list[Json] = []
    entries: dict[str, Json] = {}
    for index, group in enumerate(first["groups"]):
        names = [name for state in states for name in state["groups"][index]["params"]]
        groups.append({"params": list(dict.fromkeys(names)), "settings": group["settings"]})
    named = [name for group in groups for name in group["params"]]
    if len(set(named)) < len(named):
        return None
    for name, entry in (pair for state in states for pair in state["state"].items()):
        if entries.setdefault(name, entry) != entry:
            return None
    return {"kind": first["kind"], "groups": groups, "state": entries}


def _frame(state: Json) -> Json:
    return [state["kind"], [group["settings"] for group in state["groups"]]]


def _divide(states: Sequence[dict[str, Json]]) -> tuple[dict[str, Json], dict[str, tuple[Json, ...]]]:
    alike: dict[str, Json] = {}
    by_rank: dict[str, tuple[Json, ...]] = {}
    for part in sorted({part for state in states for part in state}):
        values: tuple[Any, ...] = tuple(state.get(part) for state in states)
        union = union_of(values) if part.split("/")[0] == "optimizer" else None
        if union is not None:
            alike[part] = union
        elif len({msgspec.json.encode(value) for value in values}) == 1 and part != "rng":
            alike[part] = values[0]
        else:
            by_rank[part] = values
    return alike, by_rank
