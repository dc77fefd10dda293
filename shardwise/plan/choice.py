"""A row of the space as what the engine obeys, and back. No torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, Candidates
from shardwise.plan.estimate import Estimate
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Decision
from shardwise.plan.space import DEFAULT_BUCKET, Table
from shardwise.units import MIB

# Seconds of a step that differ by a smaller share are the same: no prediction tells them apart.
ALIKE = 0.02

COMPILE = ("off", "blocks")
COLUMNS = tuple(field.name for field in fields(Candidates))


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that was searched: the decision, its estimate, and why the engine does not run it (none: it does)."""

    decision: Decision
    estimate: Estimate
    planned_only: tuple[str, ...] = ()


def decision(row: Mapping[str, Any], global_batch: int, precision: Any) -> Decision:
    """The Decision of one row with its split. Sequence parallel is told where it is left out of a tensor parallel."""
    one = {name: int(number) for name, number in row.items()}
    mesh = MeshShape(**{name: one[name] for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")})
    keys = {
        "mesh": msgspec.to_builtins(mesh),
        **{name: one[name] for name in ("zero", "micro_batch", "accumulation", "stages_per_rank")},
        "global_batch": global_batch,
        "precision": precision,
        "schedule": SCHEDULES[one["schedule"]],
        "recompute": RECOMPUTE[one["recompute"]],
        "offload": OFFLOAD[one["offload"]],
        "compile": COMPILE[one["compiled"]],
        "bucket_cap_mb": "default" if one["bucket_bytes"] == DEFAULT_BUCKET else one["bucket_bytes"] // MIB,
        "sequence_parallel": False if one["tp"] > 1 and not one["sequence_parallel"] else "auto",
    }
    return msgspec.convert(keys, Decision)


def row(decided: Decision, splits_sequence: bool) -> dict[str, int]:
    """The inverse. `splits_sequence`: what "auto" means for this model."""
    mesh = decided.mesh
    split = splits_sequence if decided.sequence_parallel == "auto" else decided.sequence_parallel
    return {
        **{name: getattr(mesh, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        **{name: getattr(decided, name) for name in ("zero", "micro_batch", "accumulation", "stages_per_rank")},
        "data_parallel": mesh.data_parallel,
        "schedule": SCHEDULES.index(decided.schedule),
        "recompute": RECOMPUTE.index(decided.recompute),
        "offload": OFFLOAD.index(decided.offload),
        "compiled": COMPILE.index(decided.compile),
        "sequence_parallel": int(mesh.tp > 1 and split),
        "bucket_bytes": DEFAULT_BUCKET if decided.bucket_cap_mb == "default" else decided.bucket_cap_mb * MIB,
    }


def table(rows: list[dict[str, int]]) -> Table:
    """Rows as columns."""
    return {name: np.array([one[name] for one in rows], dtype=np.int64) for name in (rows[0] if rows else ())}
