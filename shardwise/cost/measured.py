"""The cost model as the score asks for it: seconds of a step, and bytes of the kind and rank that was measured."""

import importlib.util

from shardwise.cost.candidates import Candidates
from shardwise.cost.predicting import Interval
from shardwise.cost.published_engine import MeasuredRank, MemoryKind
from shardwise.cost.step import step
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster


def memory_is_modelled() -> bool:
    """Whether this version predicts memory; where it does not, the score says so and has no rows of it."""
    return importlib.util.find_spec("shardwise.cost.memory") is not None


def time_model(workload: Workload, cluster: Cluster, candidates: Candidates) -> Interval:
    """Seconds of a step. Raises: ShardwiseError where the model refuses the workload."""
    found = step(workload, cluster, candidates)
    return Interval(found.seconds, found.low, found.high)


def memory_model(
    workload: Workload, cluster: Cluster, candidates: Candidates, kind: MemoryKind, rank: MeasuredRank
) -> tuple[Interval, Interval]:
    """Bytes as they were measured, and of the whole device on its fullest rank.

    Raises: ShardwiseError where the model refuses the workload.
    """
    if not memory_is_modelled():
        return Interval.absent(len(candidates)), Interval.absent(len(candidates))
    from shardwise.cost.memory import memory

    fullest = memory(workload, cluster, candidates)
    measured = fullest if rank == "fullest" else memory(workload, cluster, candidates, rank)
    held = measured.of_kind(kind)
    device = Interval(fullest.device, fullest.low, fullest.high)
    return Interval(held, held * measured.below, held * measured.above), device
