"""The cost model as the score asks for it: seconds of a step, and bytes of the kind and rank that was measured."""

import importlib.util

import numpy as np

from shardwise.cost.candidates import Candidates
from shardwise.cost.predicting import Floats, Interval
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
    """Bytes as they were measured, and of the whole device.

    The model tells the fullest rank: what was measured on the first or last rank of a pipeline has no prediction.
    Raises: ShardwiseError where the model refuses the workload.
    """
    if not memory_is_modelled():
        return Interval.absent(len(candidates)), Interval.absent(len(candidates))
    from shardwise.cost.memory import memory

    found = memory(workload, cluster, candidates)
    device = Interval(found.device, found.low, found.high)
    bytes_of: dict[MemoryKind, Floats] = {
        "allocated": found.logical,
        "reserved": found.logical + found.allocator,
        "device": found.device,
    }
    other_rank = (rank != "fullest") & (candidates.pp > 1)
    held = np.where(other_rank, np.nan, bytes_of[kind])
    return Interval(held, held * device.low / device.value, held * device.high / device.value), device
