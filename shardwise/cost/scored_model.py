"""The cost model as the score asks for it: seconds of a step, and bytes of the kind and rank that was measured."""

from shardwise.cost.candidates import Candidates
from shardwise.cost.memory import memory
from shardwise.cost.predicting import Interval
from shardwise.cost.published_engine import MeasuredRank, MemoryKind
from shardwise.cost.step import step
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster


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
    fullest = memory(workload, cluster, candidates)
    measured = fullest if rank == "fullest" else memory(workload, cluster, candidates, rank)
    held = measured.of_kind(kind)
    device = Interval(fullest.device, fullest.low, fullest.high)
    return Interval(held, held * measured.below, held * measured.above), device
