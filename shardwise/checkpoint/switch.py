"""A run that goes on under another plan or on another number of ranks: what holds then, and who draws what. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shardwise.checkpoint.manifest import Json, Machine, Manifest
from shardwise.checkpoint.packing import references
from shardwise.plan.mesh import MeshShape

SAME_LOSSES = "the same losses within the bound, not the same bits"


class Here(NamedTuple):
    """Who resumes. `decision`: of the plan, None without one."""

    world: int
    decision: Json
    machine: Machine


def told(manifest: Manifest, here: Here) -> tuple[str, ...]:
    """What a person should know of a resume that is not the same again; () where it is, to the bit."""
    lines = []
    if manifest.world != here.world:
        lines.append(f"resumed on {_ranks(here.world)} what {manifest.world} saved: {SAME_LOSSES}")
        lines.append(_draws(manifest, here))
    changes = _changes(manifest.decision, here.decision) if manifest.decision and here.decision else []
    if changes:
        note = "" if manifest.world != here.world else f": {SAME_LOSSES}"
        lines.append(f"the plan was {', '.join(changes)}{note}")
    before, now = manifest.machine, here.machine
    lines += [
        f"{name} was {before.versions[name] or 'unknown'} when it was saved, is {version or 'unknown'}"
        for name, version in now.versions.items()
        if before.versions.get(name, version) != version
    ]
    for what, old, new in (
        ("torch's threads", before.torch_threads, now.torch_threads),
        ("the CPU's instructions", before.cpu_capability, now.cpu_capability),
        ("the code's revision", before.revision, now.revision),
    ):
        if old and new and old != new:
            lines.append(f"{what} changed from {old} to {new} since it was saved")
    return tuple(lines)


def drawer(manifest: Manifest, rank: int, here: Here) -> int | None:
    """The rank whose random generators this one goes on with; None where it keeps those that it was started with.

    Where all saved ranks were to draw the same numbers next, as in a Trainer, every rank does. Else the same place of
    the mesh goes on (the same rank, where no mesh is known), and a place that was not there begins anew.
    """
    if "rng" not in manifest.parts():
        return None
    if all_drew_alike(manifest):
        return 0
    saved, now = _mesh(manifest.decision), _mesh(here.decision)
    if saved is None or now is None or (saved.world, now.world) != (manifest.world, here.world):
        return rank if rank < manifest.world else None
    coord = now.coord(rank)
    there = all(value < degree for value, degree in zip(coord, saved.degrees, strict=True))
    return saved.rank(coord) if there else None


def all_drew_alike(manifest: Manifest) -> bool:
    """Whether the ranks' generators stood at the same place when they were saved."""
    if "rng" in manifest.state:
        return True
    digests = {entry.name: [chunk.digest for chunk in entry.chunks] for entry in manifest.tensors}
    seen = {msgspec.json.encode(_by_content(packed, digests)) for packed in manifest.state_by_rank.get("rng", ())}
    return len(seen) == 1


def _by_content(packed: Json, digests: dict[str, list[str]]) -> Json:
    """Packed state with digests in the place of names, which are a rank's own."""
    if isinstance(packed, dict) and "$tensor" in packed:
        return [digests.get(reference.name, reference.name) for reference in references(packed)]
    if isinstance(packed, dict):
        return {key: _by_content(item, digests) for key, item in packed.items()}
    return [_by_content(item, digests) for item in packed] if isinstance(packed, list) else packed


def _draws(manifest: Manifest, here: Here) -> str:
    own = "transforms draw by sample, as on any number of ranks; dropout by rank and micro-batch, so other masks; "
    if "rng" not in manifest.parts():
        return f"{own}no generators were saved"
    if all_drew_alike(manifest):
        return f"{own}the global generators stood alike on all ranks, and every rank goes on there"
    kept = [rank for rank in range(here.world) if drawer(manifest, rank, here) is None]
    new = f", and {_some(kept)} begin with those of this start" if kept else ""
    return f"{own}the global generators go on where the same place of the mesh was{new}"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`zero 3 -> 0`, of what a decision says."""
    old, new = _flat(before), _flat(now)
    return [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{path}{key}.") if isinstance(item, dict) else {f"{path}{key}": item}
    return found


def _mesh(decision: Json) -> MeshShape | None:
    raw = decision.get("mesh") if isinstance(decision, dict) else None
    try:
        return None if raw is None else msgspec.convert(raw, MeshShape)
    except msgspec.ValidationError:
        return None


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _some(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
