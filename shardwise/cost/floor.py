"""The least that data parallelism adds to a step, whatever else is chosen: the search drops by it. No torch."""

from dataclasses import replace

import numpy as np

from shardwise.cost.calibration import TimeConstants, time_constants
from shardwise.cost.candidates import RECOMPUTE, Candidates
from shardwise.cost.compute import Floats, Pace
from shardwise.cost.data_time import Windows, data_seconds
from shardwise.cost.layer_time import Device
from shardwise.cost.probed import constants as with_measured
from shardwise.cost.step import Inputs, Place, _held, _micro, _units
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
    with_split, without = (_windows(workload, cluster, candidates, split, known) for split in (True, False))
    windows = Windows(
        *(np.maximum(getattr(with_split, name), getattr(without, name)) for name in Windows.__annotations__)
    )
    inputs = Inputs.of(workload, cluster, candidates)
    none = np.zeros(1)
    shape, run = inputs.shape, replace(inputs.run, recompute=none)
    least = Place(np.floor(shape.layers / run.pp), none, none)
    found = data_seconds(run, _held(shape, run, least), windows, inputs.fabric.sustained(known), known)
    return np.broadcast_to(found, len(candidates)).astype(np.float64)


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
    each = _units(inputs.shape, device, _micro(inputs, known), run)
    rank = each.layer.times(np.ceil(inputs.shape.layers / run.pp)) + each.embedding + each.head
    work = rank.forward + rank.backward
    busy = np.maximum(work.seconds, work.kernels * known.kernel_seconds)
    return Windows(run.micro_batches * busy, rank.forward.seconds, rank.backward.seconds)
