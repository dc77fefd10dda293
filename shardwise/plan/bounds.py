"""What a plan costs at the very least: bytes and seconds that no choice left open can go below. No torch.

The search drops by them what cannot be best, so each must truly be a bound of the cost model's own answer; a property
test holds the search against the whole space written out.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.bubble import bubble
from shardwise.cost.workload import Workload
from shardwise.inputs.arch import Arch
from shardwise.plan.space import Table

Reals = NDArray[np.float64]

# Parts of a step that a rank computes by itself or with those that it shares samples, positions or experts with.
COMPUTED = ("matmul", "attention", "memory_bound", "tensor_parallel", "context_parallel", "expert")
# Parts that depend on who holds what; all others are a shape's own, whatever its split.
OF_THE_SPLIT = ("data_parallel", "optimizer", "offload")


# Bytes that a shape's samples take, whatever its split.
OF_THE_BATCH = ("activations", "logits")


class HasParts(Protocol):
    """Seconds of a step, or bytes of the fullest rank, by part."""

    @property
    def parts(self) -> dict[str, Reals]: ...


def expert_parameters(arch: Arch) -> int:
    """Of all experts of all layers: what expert parallel shares out."""
    if arch.experts is None:
        return 0
    blocks = arch.moe_layers + (arch.prediction_layers if arch.moe_layers else 0)
    return blocks * arch.experts.count * arch.expert_parameters()


def states_floor(workload: Workload, table: Table) -> Reals:
    """Bytes of weights, gradients and optimizer states that the fullest rank holds at least, when a step ends.

    The fullest holds no less than the mean of a pipeline's ranks. Offload takes all of it to the host; of LoRA the
    factors are left out. Source of who shards what: plan/zero.py, at the end of a backward.
    """
    spread = expert_parameters(workload.arch)
    part, ranks = table["pp"] * table["tp"], table["dp_shard"] * table["cp"]
    dense, experts = (workload.arch.parameters() - spread) / part, spread / part
    # Experts lie over ep of the ranks that states are sharded over: sharded, both divide by all of them.
    return _states(workload, table, dense + experts / table["ep"], (dense + experts) / ranks)


def least_states(workload: Workload, table: Table) -> Reals:
    """Of any rank, the emptiest too, beside its samples: of its fewest blocks, or of their attention with experts.

    Gradients are left out: they are not there yet where most samples are.
    """
    arch = workload.arch
    block = arch.attention_parameters() + (arch.ffn_parameters() if arch.experts is None else 0)
    blocks = arch.num_layers // (table["pp"] * table["stages_per_rank"]) * table["stages_per_rank"]
    held = blocks * block / table["tp"]
    return _states(workload, table, held, held / (table["dp_shard"] * table["cp"]), gradients=False)


def _states(workload: Workload, table: Table, whole: Reals, sharded: Reals, gradients: bool = True) -> Reals:
    """Bytes of so many parameters, whole and as what is left of them where they are sharded."""
    stack, trainable = workload.stack, workload.trainable
    share = {"full": 1.0, "frozen": trainable.share, "lora": 0.0}[trainable.kind]
    bytes_each = share * (stack.weights + stack.masters + stack.states + (stack.gradients if gradients else 0))
    bytes_each += (1 - share) * trainable.base_bytes
    # Some engines shard less under zero 1 and 2; none shards more.
    held = bytes_each * np.where(table["zero"] >= 1, sharded, whole)
    return np.asarray(np.where(table["offload"] == 0, held, 0.0))


def mean_rank(table: Table) -> Table:
    """Each core with its whole model on every rank: what a rank of a pipeline does on average is one part in pp."""
    ones = np.ones_like(table["pp"])
    kept = ("tp", "cp", "ep", "micro_batch", "accumulation", "recompute", "compiled", "sequence_parallel")
    return {**{name: table[name] for name in kept}, "pp": ones, "dp_replicate": table["data_parallel"]}


def least_split(table: Table) -> Table:
    """Each pipeline with all states sharded and on disk: what is left beside its samples is as little as can be."""
    ranks = table["data_parallel"]
    return {**table, "dp_shard": ranks, "zero": np.where(ranks > 1, 3, 0), "offload": np.full_like(ranks, 2)}


def samples_floor(memory: HasParts) -> Reals:
    """Bytes that no split takes away. `memory`: of `least_split`."""
    return _sum([memory.parts[part] for part in OF_THE_BATCH if part in memory.parts])


def compute_floor(table: Table, whole_model: HasParts) -> Reals:
    """Seconds of a core's own arithmetic, whatever its pipeline and split. `whole_model`: step of `mean_rank(table)`.

    The slowest rank takes no less than the mean.
    """
    return _sum([whole_model.parts[part] for part in COMPUTED if part in whole_model.parts]) / table["pp"]


def pipeline_floor(table: Table, computed: Reals) -> Reals:
    """`computed` with the waiting that the schedule brings. `table` has pipelines; `computed` is of its rows."""
    waiting = bubble(table["schedule"], table["pp"], table["stages_per_rank"], table["accumulation"])
    return np.asarray(computed * (1 + waiting / table["accumulation"]))


def without_split(step: HasParts) -> Reals:
    """Seconds of all that does not depend on who holds what, so that every split of these pipelines takes longer."""
    return _sum([seconds for part, seconds in step.parts.items() if part not in OF_THE_SPLIT])


def _sum(parts: list[Reals]) -> Reals:
    return np.asarray(np.sum(parts, axis=0), dtype=np.float64)
