"""Seconds of one micro-batch on one rank, by unit: a mean layer, the embedding, the head. No torch."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from shardwise.cost.calibration import TimeConstants
from shardwise.cost.candidates import RECOMPUTE, Candidates, Counts
from shardwise.cost.communication import Fabric, Group
from shardwise.cost.compute import Floats, Rates, numbers
from shardwise.cost.layer_time import Device, Micro, Passes, Work, dense_layer, embedding, head, moe_layer
from shardwise.cost.probed import speeds
from shardwise.cost.run_numbers import Run
from shardwise.cost.shape import Shape
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster

# Deterministic algorithms of torch fill every tensor before it is written: a kernel more for each, and its bytes, which
# are two of the five that a norm (one of two) and a residual (one of three) move.
# Source: docs.pytorch.org, torch.utils.deterministic.fill_uninitialized_memory.
WRITTEN_SHARE = 0.4
FULL, SELECTIVE = RECOMPUTE.index("full"), RECOMPUTE.index("selective")


@dataclass(frozen=True)
class Inputs:
    """All that a step's time follows from, as numbers that broadcast: one row, or a row each."""

    shape: Shape
    rates: Rates
    fabric: Fabric
    run: Run
    network_known: Floats

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, plans: Candidates) -> Self:
        """Raises: RecipeError where the device's peak or bandwidth is not known."""
        rates = Rates.of(cluster.device, workload.precision, cluster.measured)
        if cluster.kind == "cpu" and np.any(plans.world != cluster.devices):
            rates = rates.on(*speeds(cluster, plans.world))
        return cls(
            shape=Shape.of(workload.arch, workload.sequence_length),
            rates=rates,
            fabric=Fabric.of(cluster),
            run=Run.of(workload, plans),
            network_known=numbers(cluster.node.network is not None),
        )


def micro_of(inputs: Inputs, known: TimeConstants) -> Micro:
    """One micro-batch on one rank, as the layers' seconds are asked for."""
    shape, run, fabric = inputs.shape, inputs.run, inputs.fabric
    eager = np.where(run.fused_kernels > 0, known.pointwise_passes_fused, known.pointwise_passes)
    passes = np.where(run.compiled > 0, known.pointwise_passes_compiled, eager)
    kernels = known.kernels_per_layer * np.where(run.compiled > 0, known.kernels_compiled, 1.0)
    return Micro(
        tokens=run.micro_batch * shape.sequence / run.cp,
        micro_batch=run.micro_batch,
        tp=run.tp,
        cp=run.cp,
        ep=run.ep,
        spread=np.where(run.sequence_parallel > 0, run.tp, 1.0),
        passes=passes * (1 + WRITTEN_SHARE * run.deterministic),
        kernels=kernels * (1 + run.deterministic) + known.kernels_per_collective * (run.tp > 1),
        learning=run.learning,
        fused_attention=run.fused_attention,
        fused_kernels=run.fused_kernels,
        tuned=np.where((run.weights > 0) & (run.masters > 0), 1.0, 0.0),
        logit_bytes=np.where(run.fused_loss > 0, 4.0, 12.0),
        tensor=Group.of(run.tp, np.ones(1), fabric),
        context=Group.of(run.cp, run.tp, fabric),
        experts=Group.of(run.ep, np.ones(1), fabric),
    )


# What the seconds of a micro-batch follow from, but for recompute, with one model on one kind of device.
FOLLOWS_FROM = ("micro_batch", "tp", "cp", "ep", "sequence_parallel", "compiled")
# With fewer rows, telling them apart takes longer than it spares.
LEAST_ROWS = 64


class Units(NamedTuple):
    """One micro-batch through a mean layer, through the embedding, and through the head with any prediction layers."""

    layer: Passes
    embedding: Passes
    head: Passes

    def seconds(self, unit: Passes) -> Floats:
        return unit.forward.seconds + unit.backward.seconds


class _Kinds(NamedTuple):
    """A layer with one feed-forward, one with experts (None: there is none), the embedding, the head; no recompute."""

    dense: Passes
    sparse: Passes | None
    embedding: Passes
    head: Passes

    def at(self, place: Counts) -> "_Kinds":
        """The rows there."""
        return _Kinds(*(None if one is None else one.at(place) for one in self))  # type: ignore[arg-type]


def units(inputs: Inputs, device: Device, micro: Micro, known: TimeConstants) -> Units:
    """A micro-batch's seconds by unit; what plans agree in is worked out once."""
    run, rows = inputs.run, len(inputs.run.tp)
    if rows <= LEAST_ROWS or any(len(one) > 1 for one in (inputs.shape.hidden, inputs.rates.memory)):
        return _together(inputs.shape, _kinds(inputs.shape, device, micro), run)
    code = np.zeros(rows, dtype=np.int64)
    for name in FOLLOWS_FROM:
        column = getattr(run, name).astype(np.int64)
        code = code * (int(column.max()) + 1) + column
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    few = replace(inputs, run=replace(run, **{name: getattr(run, name)[first] for name in FOLLOWS_FROM}))
    found = _kinds(inputs.shape, device, micro_of(few, known))
    return _together(inputs.shape, found if len(first) == 1 else found.at(place), run)


def _kinds(shape: Shape, device: Device, micro: Micro) -> _Kinds:
    sparse = moe_layer(shape, device, micro) if np.any(shape.moe_layers > 0) else None
    return _Kinds(
        dense_layer(shape, device, micro), sparse, embedding(shape, device, micro), head(shape, device, micro)
    )


def _together(shape: Shape, each: _Kinds, run: Run) -> Units:
    """Layers with experts and without weigh by how many there are; a prediction layer is as the last ones are."""
    dense = _recomputed(each.dense, run)
    layer, last = dense, dense
    if each.sparse is not None:
        sparse = _recomputed(each.sparse, run)
        share = shape.moe_layers / shape.layers
        layer = dense.times(1 - share) + sparse.times(share)
        has = np.where(shape.moe_layers > 0, 1.0, 0.0)
        last = dense.times(1 - has) + sparse.times(has)
    more = last.times(shape.prediction_layers) + each.head.times(shape.prediction_layers)
    return Units(layer, each.embedding, each.head + more)


def _recomputed(layer: Passes, run: Run) -> Passes:
    """Full: the forward once more, with its collectives. Selective: norms, activations and the scores of attention."""
    full, some = np.where(run.recompute == FULL, 1.0, 0.0), np.where(run.recompute == SELECTIVE, 1.0, 0.0)
    f = layer.forward
    none = np.zeros(1)
    light = Work(none, f.attention * (1 - run.fused_attention), f.memory_bound, none, none, none, f.kernels / 2)
    return Passes(f, layer.backward + f.times(full) + light.times(some))
