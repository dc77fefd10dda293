"""Save: every rank writes its file, the digests are gathered, rank 0 writes the manifest: that is the
commit.
"""

import errno
import platform
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shardwise import ranks
from shardwise.checkpoint.files import write_file
from shardwise.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Json,
    Machine,
    Manifest,
    Record,
    TensorEntry,
    digest_of,
    fault_of,
    seal,
)
from shardwise.checkpoint.packing import references
from shardwise.checkpoint.regions import region_of, to_bytes
from shardwise.checkpoint.retention import delete_folder
from shardwise.checkpoint.snapshot import Holding, Snapshot, contents
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.regions import Region

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ACCESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


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


class Trouble(Record, frozen=True):
    """Why a rank could not do its part."""

    rank: int
    what: str
    why: str
    fix: str


class Report(Record, frozen=True):
    """How a phase of a save went on one rank."""

    holding: Holding = Holding()
    share: Share | None = None
    trouble: Trouble | None = None


class Header(Record, frozen=True):
    """What rank 0 knows of a checkpoint before its tensors."""

    step: int
    created: float
    why: str
    lineage: str
    plan_digest: str
    decision: Json
    samples: int | None


def commit(store: Store, folder: str, header: Header, take: Callable[[], Snapshot]) -> int:
    """Writes and commits a checkpoint, and returns its bytes over all ranks. Nothing is kept of one that
    fails.

    Host memory: one tensor at a time beyond what the training holds. Collective: three gathers of JSON.
    Raises: CheckpointError, the same on every rank, naming the first rank that failed.
    """
    kept = Snapshot()

    def look() -> Report:
        nonlocal kept
        kept = take()
        return Report(holding=kept.holding())

    ready = _agreed(header.step, _attempt(store, look))
    holdings = [report.holding for report in ready]
    written = _gathered(_attempt(store, lambda: Report(share=write_share(store, folder, kept, holdings))))
    end = _finish(store, folder, header, written) if ranks.is_main() else Report()
    _agreed(header.step, end)
    return sum(report.share.file.bytes for report in written if report.share)


def write_share(store: Store, folder: str, kept: Snapshot, holdings: Sequence[Holding]) -> Share:
    """Writes this rank's file, and looks at its copies of what others write."""
    mine = contents(kept, holdings, rank=ranks.rank())
    written = write_file(store, folder, f"rank-{ranks.rank():05d}.safetensors", mine)
    return Share(
        file=written.file,
        tensors=written.tensors,
        aliases=kept.aliases,
        state=kept.state,
        copies=tuple(_copy(name, kept.shared[name]) for name in sorted(kept.copies)),
    )


def _copy(name: str, tensor: torch.Tensor) -> Copy:
    region = region_of(name, tensor)
    return Copy(name, region.offsets, region.shape, digest_of(to_bytes(tensor)))


def assemble(header: Header, shares: Sequence[Share]) -> Manifest:
    """The manifest of what all ranks wrote. State that is the same everywhere is kept once."""
    entries: dict[str, TensorEntry] = {}
    for entry in (entry for share in shares for entry in share.tensors):
        known = entries.get(entry.name)
        if known is not None:
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"Ranks disagree on {entry.name!r}: {known.shape} and {entry.shape}.")
            entry = msgspec.structs.replace(known, chunks=known.chunks + entry.chunks)
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
    )


def machine() -> Machine:
    return Machine(
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
        torch_threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def new_session() -> str:
    """A name that no other attempt has, the same on all ranks. Collective."""
    return str(ranks.broadcast_json(secrets.token_hex(4)))


def trouble_of(error: Exception, store: Store) -> Trouble:
    """An error as a value that crosses ranks, with the fix that its cause suggests."""
    if isinstance(error, CheckpointError):
        return Trouble(ranks.rank(), error.what, error.why, error.fix)
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_SPACE:
        fix = f"free space under {store}, or keep fewer with checkpoint.keep"
    elif number in _NO_ACCESS:
        fix = f"let this user write under {store}, or choose another run folder"
    else:
        fix = "what was committed before is kept: start again to go on from there"
    return Trouble(ranks.rank(), f"{type(error).__name__} while it wrote.", str(error), fix)


def _gathered(report: Report) -> list[Report]:
    """Collective."""
    return [msgspec.convert(raw, Report) for raw in ranks.gather_json(msgspec.to_builtins(report))]


def _agreed(step: int, report: Report) -> list[Report]:
    """Every rank's report. Collective. Raises: CheckpointError on all ranks where one is in trouble."""
    reports = _gathered(report)
    for trouble in (report.trouble for report in reports):
        if trouble is not None:
            what = f"The checkpoint of step {step} was not saved: rank {trouble.rank}: {trouble.what}"
            raise CheckpointError(what, why=trouble.why, fix=trouble.fix)
    return reports


def _attempt(store: Store, act: Callable[[], Report]) -> Report:
    """A rank that fails must still come to the gather, or the others would wait for it."""
    try:
        return act()
    except Exception as error:
        return Report(trouble=trouble_of(error, store))


def _finish(store: Store, folder: str, header: Header, reports: Sequence[Report]) -> Report:
    """On rank 0: the manifest, or the removal of what was written."""
    troubles = [report.trouble for report in reports if report.trouble]
    end = (
        Report(trouble=troubles[0])
        if troubles
        else _attempt(store, lambda: _write_manifest(store, folder, header, reports))
    )
    if end.trouble is not None:
        # The cause stands in the report; what cannot be removed now is torn, and goes after the next commit.
        _attempt(store, lambda: _removed(store, folder))
    return end


def _removed(store: Store, folder: str) -> Report:
    delete_folder(store, folder)
    return Report()


def _write_manifest(store: Store, folder: str, header: Header, reports: Sequence[Report]) -> Report:
    manifest = assemble(header, [report.share for report in reports if report.share])
    check_whole(manifest)
    check_copies(manifest, [report.share.copies if report.share else () for report in reports])
    store.write(f"{folder}/{MANIFEST}", [seal(manifest)])
    return Report()


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
