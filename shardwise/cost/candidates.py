"""Candidates: many plans at once, a NumPy array a choice and a row a plan. No torch."""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

# An index into these stands in the arrays.
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev")
# Of these, the ones whose first rank holds the last stage too.
V_SHAPED = (SCHEDULES.index("zbv"), SCHEDULES.index("dualpipev"))
# And those whose backward comes in two halves, the weights' later.
SPLIT_BACKWARD = tuple(SCHEDULES.index(name) for name in ("interleaved-zb", "zbv", "dualpipev"))
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "cpu", "nvme")


def in_a_v(schedule: NDArray[Any]) -> Flags:
    """Whether the first rank holds the last stage too. (np.isin takes five times as long.)"""
    return np.asarray((schedule == V_SHAPED[0]) | (schedule == V_SHAPED[1]))


@dataclass(frozen=True)
class Candidates:
    """Arrays of one length [n]. Meanings are those of plan.Decision and its MeshShape.

    ep divides dp_shard x cp (experts are spread over ranks that hold different samples or positions).
    micro_batch in samples; accumulation: micro-batches a step; stages_per_rank: 1 without interleaving.
    """

    pp: Counts
    dp_replicate: Counts
    dp_shard: Counts
    cp: Counts
    tp: Counts
    ep: Counts
    zero: Counts
    micro_batch: Counts
    accumulation: Counts
    schedule: Counts
    stages_per_rank: Counts
    recompute: Counts
    offload: Counts
    sequence_parallel: Flags
    compiled: Flags
    bucket_bytes: Counts

    @classmethod
    def of(cls, **columns: Any) -> Self:
        """Columns broadcast against each other; absent ones are 1, index 0 or false, buckets 25 MiB.

        Raises: TypeError for an unknown column.
        """
        names = [field.name for field in fields(cls)]
        unknown = [name for name in columns if name not in names]
        if unknown:
            raise TypeError(f"unknown columns {unknown}; they are {names}")
        whole = {**dict.fromkeys(names, 1), **dict.fromkeys(("zero", "schedule", "recompute", "offload"), 0)}
        whole |= {"sequence_parallel": False, "compiled": False, "bucket_bytes": 25 * 2**20, **columns}
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(whole[name])) for name in names))
        kinds = {name: np.bool_ if name in ("sequence_parallel", "compiled") else np.int64 for name in names}
        return cls(**{name: array.astype(kinds[name]) for name, array in zip(names, arrays, strict=True)})

    def __len__(self) -> int:
        return len(self.pp)

    def where(self, keep: Flags | Counts) -> Self:
        """The rows that a mask or indices choose."""
        return type(self)(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})

    @property
    def data_parallel(self) -> Counts:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Counts:
        """Ranks."""
        return self.pp * self.data_parallel * self.cp * self.tp

    @property
    def stages(self) -> Counts:
        """Stages of the pipeline."""
        return self.pp * self.stages_per_rank
