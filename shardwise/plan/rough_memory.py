"""What a rank holds by the rule of thumb: weights, gradients, states, activations; before any cost model. No torch."""

import math
from typing import Literal

import msgspec

from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Cluster, Precision
from shardwise.inputs.recipe import OptimizerSpec
from shardwise.plan import schedules
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Decision, Plan

Zero = Literal[0, 1, 2, 3]

# The driver, the context and the allocator's fragments take their part of a device.
USABLE_SHARE = 0.95
# A Python process with torch, before any parameter.
PROCESS_BYTES = 512 * 2**20
ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


class Bytes(msgspec.Struct, frozen=True):
    """Bytes of one parameter between steps: weight and gradient, and the optimizer's states."""

    weight: int
    gradient: int
    states: int

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.states


def bytes_per_parameter(precision: Precision, optimizer: OptimizerSpec) -> Bytes:
    """fp32 or mixed: 4 + 4, and 8 for AdamW's two moments (16 in all); fp64 the double.

    Mixed precision keeps fp32 masters and gradients; its 2-byte copies live for the time of a block.
    """
    size = 8 if precision == "fp64" else 4
    moments = {"adamw": 2, "adam": 2, "sgd": 1 if optimizer.momentum else 0}[optimizer.name]
    return Bytes(weight=size, gradient=size, states=size * moments)


def activation_bytes_per_sample(arch: Arch, sequence_length: int, precision: Precision) -> int:
    """Activations of one sample kept for backward by the whole model, without recompute, and its logits twice."""
    blocks = arch.num_layers * block_activation_bytes(arch, sequence_length, precision, "none")
    return blocks + _logits_bytes(arch, sequence_length, precision)


def block_activation_bytes(arch: Arch, sequence_length: int, precision: Precision, recompute: str) -> int:
    """What one block keeps of one sample from its forward to its backward.

    none: 34 * s * h bytes in 2-byte precision (Korthikanti et al. 2022), without the attention matrix, which a fused
    kernel does not keep. selective: what the matrices and the attention give, and the block's input. full: the input.
    Of experts each token's own, and what is sent to them and comes back, stand beside.
    """
    size = ACTIVATION_BYTES[precision]
    most = 17 * arch.hidden_size + _of_experts(arch)
    if recompute == "none":
        return size * sequence_length * most
    if recompute == "full":
        return size * sequence_length * arch.hidden_size
    attention = 2 * arch.num_heads * arch.head_dim + 2 * arch.num_kv_heads * arch.head_dim
    ffn = (2 if arch.gated_ffn else 1) * (0 if arch.moe_layers else arch.ffn_size)
    kept = min(most, attention + ffn + 3 * arch.hidden_size + _of_experts(arch))
    return size * sequence_length * kept


def _of_experts(arch: Arch) -> int:
    """Numbers a token: four widths of each of its experts, and of the shared ones; its rows there and back."""
    if arch.experts is None or not arch.moe_layers:
        return 0
    experts = arch.experts
    return experts.per_token * (4 * experts.ffn_size + 2 * arch.hidden_size) + 4 * experts.shared_ffn_size


def _logits_bytes(arch: Arch, sequence_length: int, precision: Precision) -> int:
    return 2 * max(ACTIVATION_BYTES[precision], 4) * sequence_length * arch.vocab_size


def activation_bytes(plan: Plan, recompute: str | None = None) -> int | None:
    """Activations of the fullest rank: of each micro-batch in flight on each of its stages; None without an Arch.

    `recompute` in place of the plan's. One block more than a recomputed one keeps is alive in its backward.
    """
    if plan.arch is None or not plan.recipe.data.length_is_known:
        return None
    decision = plan.decision
    one = activations_of_one(plan.arch, plan.recipe.data.sequence_length, decision, recompute or decision.recompute)
    return decision.micro_batch * one


def activations_of_one(arch: Arch, length: int, decision: Decision, recompute: str) -> int:
    """Of the fullest rank, were a micro-batch one sample."""
    precision, pp, tp = decision.precision, decision.mesh.pp, decision.mesh.tp
    block = block_activation_bytes(arch, length, precision, recompute)
    working = 0 if recompute == "none" else block_activation_bytes(arch, length, precision, "none")
    per_stage = _blocks_of_a_stage(decision, arch.num_layers)
    flights = _in_flight(decision)
    logits = _logits_bytes(arch, length, precision)
    holds_head = schedules.rank_of_stage(decision.schedule, pp * decision.stages_per_rank - 1, pp)
    ranks = [
        flight * per_stage[rank] * block + working + (logits if rank == holds_head else 0)
        for rank, flight in enumerate(flights)
    ]
    return max(ranks) // tp


def _blocks_of_a_stage(decision: Decision, layers: int) -> list[int]:
    """By pipeline rank: the blocks of its largest stage."""
    pp, sizes = decision.mesh.pp, decision.stage_blocks
    if sizes == "even":
        return [math.ceil(layers / (pp * decision.stages_per_rank))] * pp
    largest = [0] * pp
    for stage, size in enumerate(sizes):
        rank = schedules.rank_of_stage(decision.schedule, stage, pp)
        largest[rank] = max(largest[rank], size)
    return largest


def _in_flight(decision: Decision) -> tuple[int, ...]:
    """By pipeline rank: the most (stage, micro-batch) pairs alive at one time. At most 8 rounds are looked at."""
    pp, per_rank = decision.mesh.pp, decision.stages_per_rank
    micros = decision.accumulation if decision.schedule == "gpipe" else min(decision.accumulation, 8 * pp)
    if pp == 1 or decision.schedule == "none" or schedules.requires(decision.schedule, pp, per_rank, micros):
        return (per_rank,) * pp
    tables = schedules.actions(decision.schedule, pp, per_rank, micros)
    return tuple(schedules.most_in_flight(table) for table in tables)


def usable_bytes(cluster: Cluster, ranks: int) -> int:
    """Memory that one rank may use: its device's, or its share of the host's on CPU cores."""
    if cluster.kind == "gpu":
        return int(cluster.smallest_device.hbm_bytes * USABLE_SHARE)
    host = cluster.node.host_memory_bytes or cluster.device.hbm_bytes * cluster.node.devices
    on_a_host = max(1, ranks // cluster.nodes)
    return max(0, int(host * USABLE_SHARE) // on_a_host - PROCESS_BYTES)


def bytes_at_rest(plan: Plan) -> int | None:
    """Weights, gradients and optimizer states of one rank between steps; None where the size is not known."""
    if plan.arch is None:
        return None
    per_parameter = bytes_per_parameter(plan.decision.precision, plan.recipe.optimizer)
    return states_of_a_rank(plan.arch, per_parameter, plan.decision)


def states_of_a_rank(shape: Arch | int | None, per_parameter: Bytes, decision: Decision) -> int:
    """Of the fullest rank."""
    held = parameters_of_a_rank(
        shape, decision.mesh, decision.schedule, decision.stages_per_rank, decision.stage_blocks
    )
    return states_of(held, per_parameter, decision.mesh, decision.zero)


def states_of(parameters: int, per_parameter: Bytes, mesh: MeshShape, zero: Zero) -> int:
    """What a rank keeps of so many parameters between steps, with what their sharding leaves it."""
    weight = per_parameter.weight / (mesh.dp_shard if zero >= 3 else 1)
    gradient = per_parameter.gradient / (mesh.dp_shard if zero >= 2 else 1)
    states = per_parameter.states / (mesh.dp_shard if zero >= 1 else 1)
    return math.ceil(parameters * (weight + gradient + states))


def parameters_of_a_rank(
    shape: Arch | int | None, mesh: MeshShape, schedule: str, stages_per_rank: int = 1, sizes: schedules.Sizes = "even"
) -> int:
    """Of the rank that holds most, before any sharding over data-parallel ranks.

    Stages may be uneven; the first holds the embedding, the last the norm and the head (a tied one as a copy). Tensor
    parallel splits matrices, by the vocabulary too, and leaves norms whole. Of a mere number: an even part.
    """
    pp, tp = mesh.pp, mesh.tp
    if shape is None or isinstance(shape, int):
        return math.ceil((shape or 0) / (pp * tp))
    hidden, stages = shape.hidden_size, pp * stages_per_rank
    if schedules.cannot_share(shape.num_layers, stages, sizes):  # check refuses it: there is no such rank
        return math.ceil(shape.parameters() / tp)
    vocabulary = math.ceil(shape.vocab_size / tp) * hidden
    ffn = shape.ffn_parameters() // shape.ffn_size * math.ceil(shape.ffn_size / tp)
    block = shape.attention_parameters() // tp + ffn + shape.norm_parameters()
    sparse = (shape.moe_block_parameters() - shape.norm_parameters()) // tp + shape.norm_parameters()
    held = [0] * pp
    for stage, blocks in enumerate(schedules.stage_blocks(shape.num_layers, stages, sizes)):
        whole = sum(block if layer < shape.dense_layers else sparse for layer in blocks)
        held[schedules.rank_of_stage(schedule, stage, pp)] += whole
    last = schedules.rank_of_stage(schedule, stages - 1, pp)
    held[0] += vocabulary
    held[last] += hidden + (0 if last == 0 and shape.tied_embeddings else vocabulary)
    return max(held)
