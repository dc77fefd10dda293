"""The least that a split adds to a step, whatever else is chosen: the search drops by it. No torch."""

from dataclasses import replace

import numpy as np

from shardwise.cost.calibration import TimeConstants, memory_constants, time_constants
from shardwise.cost.candidates import RECOMPUTE, Candidates
from shardwise.cost.compute import Floats, Pace
from shardwise.cost.data_time import Windows, data_seconds, offload_seconds, optimizer_seconds
from shardwise.cost.layer_time import Device
from shardwise.cost.micro_time import Inputs, micro_of, units
from shardwise.cost.probed import constants as with_measured
from shardwise.cost.step import Place, numbers_held
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster


def data_floor(
    workload: Workload, cluster: Cluster, candidates: Candidates, constants: TimeConstants | None = None
) -> Floats:
    """Of each plan, the part of `step` called data_parallel, were its schedule and all else of its core other ones.

    Fewer numbers take less time and longer arithmetic hides more: the fewest blocks of any rank are summed, beside the
    work of the most blocks with embedding and head, recomputed and not compiled.
    """
    known = with_measured(workload, cluster, constants or time_constants())
    windows = _longest(workload, cluster, candidates, known)
    inputs = Inputs.of(workload, cluster, candidates)
    none = np.zeros(1)
    shape, run = inputs.shape, replace(inputs.run, recompute=none)
    held = numbers_held(shape, run, _fewest(inputs))
    found = data_seconds(run, held, windows, inputs.fabric.sustained(known), known)
    return np.broadcast_to(found, len(candidates)).astype(np.float64)


def keeping_floor(
    workload: Workload, cluster: Cluster, candidates: Candidates, constants: TimeConstants | None = None
) -> Floats:
    """Of each plan, the parts of `step` called optimizer and offload, were all else of its core other ones.

    Both grow with the numbers held: those of the fewest blocks of any rank.
    """
    known = with_measured(workload, cluster, constants or time_constants())
    inputs = Inputs.of(workload, cluster, candidates)
    held = numbers_held(inputs.shape, inputs.run, _fewest(inputs))
    update = optimizer_seconds(inputs.run, held, Pace.of(inputs.rates, known), known)
    moved = offload_seconds(inputs.run, held, known)
    return np.broadcast_to(update + moved, len(candidates)).astype(np.float64)


def bytes_floor(cluster: Cluster, live: Floats) -> Floats:
    """Of a device with so many bytes of live tensors or more, the least upper end of `memory`'s interval."""
    known = memory_constants()
    on_gpu = cluster.device.kind == "gpu"
    reserved = live * (1 + known.reserved_share * on_gpu) + known.context_bytes * on_gpu
    return np.asarray(reserved * np.exp(known.interval_base))


def _fewest(inputs: Inputs) -> Place:
    """The blocks of the emptiest rank, without what stands at the ends."""
    none = np.zeros(1)
    return Place(np.floor(inputs.shape.layers / inputs.run.pp), none, none)


# What the arithmetic of a core follows from, but for its options.
ARITHMETIC = ("pp", "tp", "cp", "ep", "micro_batch", "accumulation")


def _longest(workload: Workload, cluster: Cluster, candidates: Candidates, known: TimeConstants) -> Windows:
    """The longest windows of each plan; once for those that differ in who holds what alone."""
    code = np.zeros(len(candidates), dtype=np.int64)
    for name in ARITHMETIC:
        column = getattr(candidates, name)
        code = code * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    few = candidates.where(first)
    with_split, without = (_windows(workload, cluster, few, split, known) for split in (True, False))
    return Windows(
        *(
            np.broadcast_to(np.maximum(getattr(with_split, name), getattr(without, name)), len(few))[place]
            for name in Windows.__annotations__
        )
    )


def _windows(
    workload: Workload, cluster: Cluster, candidates: Candidates, split: bool, known: TimeConstants
) -> Windows:
    """The longest arithmetic that collectives can run beside."""
    slowest = Candidates.of(
        **{
            **vars(candidates),
            "recompute": RECOMPUTE.index("full"),
            "compiled": False,
            "sequence_parallel": split,
        }
    )
    inputs = Inputs.of(workload, cluster, slowest)
    inputs = replace(inputs, fabric=inputs.fabric.sustained(known))
    run = inputs.run
    device = Device(Pace.of(inputs.rates, known), inputs.fabric, known)
    each = units(inputs, device, micro_of(inputs, known), known)
    rank = each.layer.times(np.ceil(inputs.shape.layers / run.pp)) + each.embedding + each.head
    work = rank.forward + rank.backward
    busy = np.maximum(work.seconds, work.kernels * known.kernel_seconds)
    return Windows(run.micro_batches * busy, rank.forward.seconds, rank.backward.seconds)
