"""Seconds of summing gradients and gathering weights over data-parallel ranks, of the optimizer, of offload."""

from dataclasses import dataclass, replace

import numpy as np

from shardwise.cost.calibration import TimeConstants
from shardwise.cost.candidates import RECOMPUTE
from shardwise.cost.communication import Fabric, Group, collective
from shardwise.cost.compute import Floats, Pace
from shardwise.cost.run_numbers import Run

FULL = RECOMPUTE.index("full")
# Large weights of a dense block: queries, keys and values in one; out of attention; into and out of the feed-forward.
# ZeRO-3 without prefetching gathers each by itself. Source: DeepSpeed's runtime/zero/partitioned_param_coordinator.py.
WEIGHTS_OF_A_BLOCK = 4


@dataclass(frozen=True)
class Held:
    """Trained and frozen numbers of the slowest pipeline rank before ZeRO, outside and in experts; and its layers."""

    dense: Floats
    experts: Floats
    frozen: Floats
    frozen_experts: Floats
    layers: Floats


@dataclass(frozen=True)
class Windows:
    """Seconds of arithmetic that collectives can run beside: all micro-batches, one forward, and one backward."""

    all: Floats
    forward: Floats
    backward: Floats


def data_seconds(run: Run, held: Held, windows: Windows, fabric: Fabric, known: TimeConstants) -> Floats:
    """What data parallelism adds to a step: what arithmetic does not hide, and what it slows while it is hidden.

    ZeRO 0 sums gradients beside the last backward; 1 scatters them there and gathers weights beside the next forward;
    2 scatters beside every backward; 3 gathers beside every forward and backward as well, frozen weights too. Where
    nothing is fetched beside arithmetic, each product's weight is gathered as it is reached, by recompute once more.
    """
    dense = _traffic(run, held.dense, held.layers, run.shard * run.cp, run.tp, run.replicate, fabric, known)
    spread = np.maximum(1.0, run.shard * run.cp / run.ep)
    experts = _traffic(run, held.experts, held.layers, spread, run.tp * run.ep, run.replicate, fabric, known)
    reduce, gather = dense[0] + experts[0], dense[1] + experts[1]
    fixed = _frozen_gather(run, held, spread, fabric, known)
    m = run.micro_batches
    each = np.where(run.zero >= 2, m, 1.0)
    reducing = _exposed(reduce * each, np.where(run.zero >= 2, windows.backward * m, windows.backward), run, known)
    once = _exposed(gather, windows.forward, run, known)
    # Beside every pass: two gathers and a scatter share one window; the first gather and the last scatter stand alone.
    passes = 2 + (run.overlaps == 0) * (run.recompute == FULL)
    always = _exposed((passes * (gather + fixed) + reduce) * m, windows.all, run, known)
    always = always + (gather + fixed + reduce) / np.maximum(held.layers, 1.0) * (run.overlaps > 0)
    return np.select([run.zero == 0, run.zero < 3], [reducing, reducing + once], always)


def _frozen_gather(run: Run, held: Held, spread: Floats, fabric: Fabric, known: TimeConstants) -> Floats:
    """Seconds to gather once the weights that do not train, as wide as they are kept."""
    if not np.any(held.frozen > 0):
        return np.zeros(1)
    kept = replace(run, gathered=np.minimum(run.gathered, run.base_bytes))
    places = (run.shard * run.cp, run.tp), (spread, run.tp * run.ep)
    found = [
        _traffic(kept, numbers, held.layers, shard, stride, run.replicate, fabric, known)[1]
        for numbers, (shard, stride) in zip((held.frozen, held.frozen_experts), places, strict=True)
    ]
    return found[0] + found[1]


def _traffic(
    run: Run, numbers: Floats, layers: Floats, shard: Floats, stride: Floats, replicate: Floats, fabric: Fabric,
    known: TimeConstants,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Seconds to sum these gradients once, and to gather these weights once.

    Hybrid: a scatter within the shards, then a sum of what is left over the replicas (planners.md, section 3).
    """
    sharded = run.zero >= 1
    inner = Group.of(shard, stride, fabric)
    outer = Group.of(replicate, stride * shard, fabric)
    whole = Group.of(replicate * shard, stride, fabric)
    reduced, gathered = numbers * run.reduced, numbers * run.gathered
    blocks = layers * np.where(run.overlaps > 0, 1.0, WEIGHTS_OF_A_BLOCK)
    units = np.where(run.zero >= 3, blocks, np.ceil(reduced / run.bucket_bytes / 4))
    scatter = collective("reduce_scatter", reduced, inner, fabric, known, units)
    over = collective("all_reduce", reduced / shard, outer, fabric, known, units)
    summed = collective("all_reduce", reduced, whole, fabric, known, units)
    gather = collective("all_gather", gathered, inner, fabric, known, units)
    used = numbers > 0
    return np.where(used, np.where(sharded, scatter + over, summed), 0.0), np.where(used & sharded, gather, 0.0)


def _exposed(seconds: Floats, window: Floats, run: Run, known: TimeConstants) -> Floats:
    """What is not hidden in the window, and the slowing of both while it is (Galvatron's overlap coefficient)."""
    hidden = np.minimum(seconds, run.overlaps * known.overlap_window * window)
    return seconds - hidden * (1 - known.overlap_slowdown)


def waiting_seconds(work: Floats, nodes: Floats, known: TimeConstants) -> Floats:
    """Waiting at each step for the slowest of many nodes."""
    return known.straggling_per_doubling * np.log2(np.maximum(nodes, 1.0)) * work


def optimizer_seconds(run: Run, held: Held, pace: Pace, known: TimeConstants) -> Floats:
    """Reading gradients for their norm and the update, reading and writing masters and states, writing weights."""
    numbers = _owned(run, held)
    moved = 2 * run.gradients + 2 * (run.masters + run.states) + run.weights
    return np.where(run.offload > 0, 0.0, known.optimizer_passes * numbers * moved * pace.byte)


def _owned(run: Run, held: Held) -> Floats:
    return held.dense / run.shards + held.experts / np.maximum(1.0, run.shards / run.ep)


def offload_seconds(run: Run, held: Held, known: TimeConstants) -> Floats:
    """Gradients down and weights up the host's link, the update on the host; under nvme states from disk and back."""
    numbers = _owned(run, held)
    carried = numbers * (run.reduced + run.gathered) / known.host_link_bytes_per_second
    updated = numbers * (2 * (run.masters + run.states) + run.gradients) / known.host_memory_bytes_per_second
    stored = numbers * 2 * (run.masters + run.states) / known.disk_bytes_per_second
    return np.select(
        [run.offload == 0, run.offload == 1], [np.zeros_like(carried), carried + updated], carried + updated + stored
    )
