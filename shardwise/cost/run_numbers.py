"""Candidates and what an engine holds, as floating numbers of one length that broadcast. No torch."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from shardwise.cost.candidates import Candidates
from shardwise.cost.compute import Floats, numbers
from shardwise.cost.workload import Trainable, Workload


@dataclass(frozen=True)
class Run:
    """Degrees and choices of each plan; bytes a parameter of the stack.

    learning: the share of weights that get gradients; trained: of parameters, among them LoRA's factors.
    """

    pp: Floats
    replicate: Floats
    shard: Floats
    cp: Floats
    tp: Floats
    ep: Floats
    zero: Floats
    micro_batch: Floats
    micro_batches: Floats
    schedule: Floats
    stages_per_rank: Floats
    recompute: Floats
    offload: Floats
    sequence_parallel: Floats
    compiled: Floats
    bucket_bytes: Floats
    weights: Floats
    masters: Floats
    gathered: Floats
    gradients: Floats
    reduced: Floats
    states: Floats
    fused_attention: Floats
    fused_loss: Floats
    overlaps: Floats
    fused_kernels: Floats
    deterministic: Floats
    learning: Floats
    trained: Floats
    base_bytes: Floats

    @classmethod
    def of(cls, workload: Workload, plans: Candidates) -> Self:
        """One row a plan."""
        stack = workload.stack
        learning, trained = _learning(workload.trainable, workload)
        chosen = {
            "pp": plans.pp, "replicate": plans.dp_replicate, "shard": plans.dp_shard, "cp": plans.cp, "tp": plans.tp,
            "ep": plans.ep, "zero": plans.zero, "micro_batch": plans.micro_batch,
            "micro_batches": plans.accumulation, "schedule": plans.schedule,
            "stages_per_rank": plans.stages_per_rank, "recompute": plans.recompute, "offload": plans.offload,
            "sequence_parallel": plans.sequence_parallel, "compiled": plans.compiled,
            "bucket_bytes": plans.bucket_bytes,
        }  # fmt: skip
        held = {
            "weights": stack.weights, "masters": stack.masters, "gathered": stack.gathered,
            "gradients": stack.gradients, "reduced": stack.reduced, "states": stack.states,
            "fused_attention": stack.fused_attention, "fused_loss": stack.fused_loss, "overlaps": stack.overlap,
            "fused_kernels": stack.kernels == "fused", "deterministic": stack.deterministic,
            "learning": learning, "trained": trained, "base_bytes": workload.trainable.base_bytes,
        }  # fmt: skip
        return cls(
            **{name: np.asarray(column, dtype=np.float64) for name, column in chosen.items()},
            **{name: numbers(value) for name, value in held.items()},
        )

    @property
    def data_ranks(self) -> Floats:
        """Ranks that read different samples or positions: over them gradients are summed."""
        return self.replicate * self.shard * self.cp

    @property
    def shards(self) -> Floats:
        """Ranks that states are sharded over; 1 without ZeRO."""
        return np.where(self.zero >= 1, self.shard * self.cp, 1.0)


def _learning(trainable: Trainable, workload: Workload) -> tuple[float, float]:
    """Of weights that get a gradient; and of parameters that the optimizer updates.

    LoRA: no weight's own gradient; a factor pair of `rank` on a [h, h] weight is 2 rank / h of it.
    """
    if trainable.kind == "full":
        return 1.0, 1.0
    if trainable.kind == "frozen":
        return trainable.share, trainable.share
    pairs = 2 * trainable.rank / workload.arch.hidden_size
    targets = max(1, len(trainable.targets))
    return 0.0, min(1.0, pairs * targets / 7)
