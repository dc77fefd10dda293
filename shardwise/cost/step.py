"""What a step takes: seconds by part that sum to it, for many plans at once. No torch.

The parts are those of the slowest pipeline rank over all its micro-batches; `bubble` is what it waits for the others.
Sources: the formulas of Megatron-LM (arXiv 2104.04473), zero bubble (arXiv 2401.10241) and ZeRO (arXiv 1910.02054);
each constant's own in calibration.toml.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardwise.cost.bubble import bubble
from shardwise.cost.calibration import TimeConstants, time_constants
from shardwise.cost.candidates import Candidates, in_a_v
from shardwise.cost.communication import Group, collective
from shardwise.cost.compute import Floats, Pace
from shardwise.cost.data_time import Held, Windows, data_seconds, offload_seconds, optimizer_seconds, waiting_seconds
from shardwise.cost.layer_time import Device, Micro, Work
from shardwise.cost.micro_time import Inputs, Units, micro_of, units
from shardwise.cost.probed import constants as with_measured
from shardwise.cost.run_numbers import Run
from shardwise.cost.shape import Shape
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster

# Parts that links and networks set.
COMMUNICATION = ("tensor_parallel", "context_parallel", "expert", "data_parallel", "pipeline_transfers")


@dataclass(frozen=True)
class Step:
    """Seconds by part, a row a plan. Utilisation: FLOPs that the training needs over the dense peak; nan without one.

    They are Arch.flops_per_token, less the products that would give frozen weights a gradient.

    low and high: of seconds; four of five measurements are between them.
    """

    parts: dict[str, Floats]
    tokens_per_second_per_gpu: Floats
    mfu: Floats
    low: Floats
    high: Floats

    @property
    def seconds(self) -> Floats:
        """Of the whole step."""
        return total(self.parts)


def total(parts: dict[str, Floats]) -> Floats:
    """Their sum."""
    return np.asarray(sum(parts.values(), np.zeros(1)))


def step(
    workload: Workload,
    cluster: Cluster,
    candidates: Candidates,
    constants: TimeConstants | None = None,
) -> Step:
    """The time of one step of each plan.

    Raises: RecipeError where the device's peak or bandwidth is not known.
    """
    known = with_measured(workload, cluster, constants or time_constants())
    inputs = Inputs.of(workload, cluster, candidates)
    parts = {
        name: np.broadcast_to(part, len(candidates)).astype(np.float64) for name, part in seconds(inputs, known).items()
    }
    whole = total(parts)
    width = np.broadcast_to(spread(inputs, parts, known), whole.shape)
    rate = workload.tokens / (whole * candidates.world)
    peak = _dense_peak(workload, cluster)
    return Step(
        parts=parts,
        tokens_per_second_per_gpu=rate,
        mfu=rate * _needed_flops_per_token(workload, inputs.run) / peak,
        low=whole * np.exp(-width),
        high=whole * np.exp(width),
    )


def _needed_flops_per_token(workload: Workload, run: Run) -> float:
    """Of three products of each weight (forward, gradient of the input, of the weight) the last where it learns."""
    frozen = 1 - float(run.learning[0])
    return workload.arch.flops_per_token(workload.sequence_length) - 2 * workload.arch.matmul_parameters() * frozen


def _dense_peak(workload: Workload, cluster: Cluster) -> float:
    if workload.precision == "fp8":
        return cluster.device.dense_fp8_flops_per_second or np.nan
    return cluster.device.peak_flops_per_second(workload.precision) or np.nan


def seconds(inputs: Inputs, known: TimeConstants) -> dict[str, Floats]:
    """The parts of a step."""
    shape, run = inputs.shape, inputs.run
    inputs = replace(inputs, fabric=inputs.fabric.sustained(known))
    device = Device(Pace.of(inputs.rates, known), inputs.fabric, known)
    micro = micro_of(inputs, known)
    each = units(inputs, device, micro, known)
    place = _slowest(shape, run, each)
    rank = each.layer.times(place.layers) + each.embedding.times(place.embedding) + each.head.times(place.head)
    work = rank.forward + rank.backward
    starting = work.kernels * known.kernel_seconds / inputs.rates.host
    # A GPU works while its host starts the next kernels; a core does one after the other.
    host = np.where(inputs.rates.serial > 0, starting, np.maximum(0.0, starting - work.seconds))
    busy = work.seconds + host
    m = run.micro_batches
    held = numbers_held(shape, run, place)
    windows = Windows(m * busy, rank.forward.seconds, rank.backward.seconds)
    data = data_seconds(run, held, windows, inputs.fabric, known)
    nodes = run.pp * run.data_ranks * run.tp / inputs.fabric.per_node
    return {
        "matmul": m * work.matmul,
        "attention": m * work.attention,
        "memory_bound": m * work.memory_bound,
        "tensor_parallel": m * work.tensor_parallel,
        "context_parallel": m * work.context_parallel,
        "expert": m * work.expert,
        "host": m * host + known.step_seconds,
        "bubble": _bubble(shape, run, each, work, busy),
        "pipeline_transfers": _transfers(inputs, micro, known),
        "data_parallel": data,
        "waiting": waiting_seconds(m * busy, nodes, known),
        "optimizer": optimizer_seconds(run, held, device.pace, known),
        "offload": offload_seconds(run, held, known),
    }


class Place(NamedTuple):
    """What the slowest rank of a pipeline has: layers, and the embedding and the head or not."""

    layers: Floats
    embedding: Floats
    head: Floats


def _slowest(shape: Shape, run: Run, each: Units) -> Place:
    """The first rank, with a layer more where they do not divide, or the last with the head; all when alone."""
    layer, top, bottom = (each.seconds(unit) for unit in (each.layer, each.head, each.embedding))
    stages = run.pp * run.stages_per_rank
    fewest = np.floor(shape.layers / stages)
    longer = shape.layers - fewest * stages
    first = fewest * run.stages_per_rank + np.ceil(longer / run.pp)
    last = fewest * run.stages_per_rank + np.floor(longer / run.pp)
    alone = run.pp == 1
    # In a V the first rank holds the last stage too.
    folded = in_a_v(run.schedule) & ~alone
    at_end = (last * layer + top > first * layer + bottom) & ~folded
    one = np.ones(1)
    return Place(
        layers=np.where(alone, shape.layers, np.where(at_end, last, first)),
        embedding=np.where(alone | ~at_end, one, 0.0),
        head=np.where(alone | at_end | folded, one, 0.0),
    )


def _bubble(shape: Shape, run: Run, each: Units, work: Work, busy: Floats) -> Floats:
    """Seconds that the slowest rank waits while the pipeline fills and empties: with what the others take."""
    whole = shape.layers * each.seconds(each.layer) + each.seconds(each.embedding) + each.seconds(each.head)
    others = np.where(run.pp > 1, (whole / work.seconds - 1) / np.maximum(run.pp - 1, 1.0), 1.0)
    counts = (column.astype(np.int64) for column in (run.schedule, run.pp, run.stages_per_rank, run.micro_batches))
    return np.asarray(busy * np.clip(others, 0.0, 1.0) * bubble(*counts))


def _transfers(inputs: Inputs, micro: Micro, known: TimeConstants) -> Floats:
    """Hidden states to the next stage and their gradients back, split over tensor parallel ranks where they are."""
    run, shape = inputs.run, inputs.shape
    stride = run.tp * run.data_ranks
    moved = micro.tokens * shape.hidden / micro.spread * inputs.rates.element_bytes
    group = Group.of(run.pp, stride, inputs.fabric)
    one = collective("send", moved, group, inputs.fabric, known)
    hidden = np.where(run.stages_per_rank > 1, known.transfers_hidden_interleaved, known.transfers_hidden)
    each = run.micro_batches * run.stages_per_rank * (1 - hidden) + (run.pp - 1)
    return np.asarray(2 * each * one)


def numbers_held(shape: Shape, run: Run, place: Place) -> Held:
    """Numbers that a rank with such a place holds, those that it trains and the others."""
    share = np.where(shape.layers > 0, shape.moe_layers / shape.layers, 0.0)
    block = (1 - share) * shape.dense_parameters + share * shape.moe_parameters
    ends = place.embedding * shape.embedding_parameters + place.head * shape.head_parameters
    experts = place.layers * share * shape.experts * shape.expert_parameters / (run.ep * run.tp)
    dense, frozen = (place.layers * block + ends) / run.tp, 1 - run.trained
    return Held(run.trained * dense, run.trained * experts, frozen * dense, frozen * experts, place.layers)


def spread(inputs: Inputs, parts: dict[str, Floats], known: TimeConstants) -> Floats:
    """Half the width of the 80 % interval of the logarithm of the seconds: causes add up as squares."""
    whole = total(parts)
    run = inputs.run
    world = run.pp * run.data_ranks * run.tp
    blind = (world > inputs.fabric.per_node) & (inputs.network_known == 0)
    talk = sum((parts[name] for name in COMMUNICATION), np.zeros(1)) / whole
    variance = (
        known.interval_base**2
        + (talk * known.interval_communication) ** 2
        + blind * known.interval_network**2
        + (parts["host"] / whole * known.interval_host) ** 2
        + (inputs.shape.moe_layers > 0) * known.interval_experts**2
        + (inputs.rates.serial > 0) * known.interval_cores**2
    )
    return np.asarray(np.sqrt(variance))
