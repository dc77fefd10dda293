"""Seconds of one layer, of the head and of the embedding for one micro-batch on one rank, by part. No torch."""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from shardwise.cost import compute
from shardwise.cost.calibration import TimeConstants
from shardwise.cost.candidates import Counts
from shardwise.cost.communication import Fabric, Group, collective, nodes_reached
from shardwise.cost.compute import Attention, Floats, Pace
from shardwise.cost.shape import Projection, Shape


@dataclass(frozen=True)
class Work:
    """Seconds by part, and how many kernels the host starts for them."""

    matmul: Floats
    attention: Floats
    memory_bound: Floats
    tensor_parallel: Floats
    context_parallel: Floats
    expert: Floats
    kernels: Floats

    @classmethod
    def none(cls) -> Self:
        return cls(*(np.zeros(1) for _ in fields(cls)))

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def times(self, factor: Floats | float) -> "Work":
        """That many of it."""
        return Work(*(getattr(self, f.name) * factor for f in fields(Work)))

    def at(self, place: Counts) -> "Work":
        """The rows there; what is alike in all stays one row."""
        each = (getattr(self, f.name) for f in fields(Work))
        return Work(*(one if len(one) == 1 else one[place] for one in each))

    @property
    def seconds(self) -> Floats:
        """On the device."""
        parts = (self.matmul, self.attention, self.memory_bound)
        return sum((*parts, self.tensor_parallel, self.context_parallel, self.expert), np.zeros(1))


@dataclass(frozen=True)
class Micro:
    """One micro-batch on one rank. tokens: those it holds; spread: tp where activations between products are split.

    learning: the share of weights that get gradients. tuned: attention by the vendor's kernels, as in engines that keep
    16-bit weights beside masters (Megatron-Core's Transformer Engine); torch's own is FlashAttention-2.
    """

    tokens: Floats
    micro_batch: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    spread: Floats
    passes: Floats
    kernels: Floats
    learning: Floats
    fused_attention: Floats
    fused_kernels: Floats
    tuned: Floats
    logit_bytes: Floats
    tensor: Group
    context: Group
    experts: Group


@dataclass(frozen=True)
class Passes:
    """A forward and the backward after it."""

    forward: Work
    backward: Work

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, factor: Floats | float) -> "Passes":
        return Passes(self.forward.times(factor), self.backward.times(factor))

    def at(self, place: Counts) -> "Passes":
        return Passes(self.forward.at(place), self.backward.at(place))


@dataclass(frozen=True)
class Device:
    """Where it runs."""

    pace: Pace
    fabric: Fabric
    known: TimeConstants


def dense_layer(shape: Shape, device: Device, micro: Micro) -> Passes:
    """A block with one feed-forward."""
    return attention_half(shape, device, micro) + _dense_half(shape, device, micro)


def moe_layer(shape: Shape, device: Device, micro: Micro) -> Passes:
    """A block with experts."""
    return attention_half(shape, device, micro) + _expert_half(shape, device, micro)


def projections(each: tuple[Projection, ...], device: Device, micro: Micro, tokens: Floats) -> tuple[Floats, Floats]:
    """Seconds forward and backward of products with these weights; backward to a weight where it learns."""
    forward, backward = np.zeros(1), np.zeros(1)
    for p in each:
        n = p.n / np.where(p.n_split > 0, micro.tp, 1.0)
        k = p.k / np.where(p.k_split > 0, micro.tp, 1.0)
        forward = forward + compute.matmul(device.pace, tokens, n, k, device.known)
        to_input = compute.matmul(device.pace, tokens, np.where(n > 0, k, 0), n, device.known)
        to_weight = compute.matmul(device.pace, n, np.where(n > 0, k, 0), tokens, device.known)
        backward = backward + to_input + micro.learning * to_weight
    return forward, backward


def pointwise(width: Floats, device: Device, micro: Micro) -> Floats:
    """Seconds of moving `width` numbers a token through memory, in as many passes as the engine needs."""
    return micro.passes * micro.tokens * width * device.pace.element_bytes * device.pace.byte


# Bytes that a number moves to be read in eight bits, as it lies and transposed: written by the kernel before (2), or in
# passes of their own for the largest (2), the cast (3) and the transpose (2). Source: Transformer Engine's docs,
# fp8_primer; torchao's float8 README, which says the same of weights gathered in 16 bits.
FUSED_CAST_BYTES, CAST_BYTES = 2.0, 7.0
PRODUCTS_OF_AN_EXPERT = 2


def casts(width: Floats, device: Device, micro: Micro) -> Floats:
    """Seconds of making `width` numbers a token eight bits wide before they are multiplied; 0 without fp8."""
    each = np.where(micro.fused_kernels > 0, FUSED_CAST_BYTES, CAST_BYTES)
    return _eight_bits(each * micro.tokens * width, device)


def weight_casts(weights: tuple[Projection, ...], device: Device, micro: Micro) -> Floats:
    """The same of weights, once a micro-batch; kernels that fuse it keep them so between micro-batches."""
    numbers = sum((p.n * p.k for p in weights), np.zeros(1)) / micro.tp
    return _eight_bits(np.where(micro.fused_kernels > 0, 0.0, CAST_BYTES * numbers), device)


def _eight_bits(moved: Floats, device: Device) -> Floats:
    return device.pace.low_precision * device.known.cast_passes * moved * device.pace.byte


def attention_half(shape: Shape, device: Device, micro: Micro) -> Passes:
    """Norm, projections, attention, residual; its collectives of tensor and context parallelism."""
    forward, backward = projections(shape.attention, device, micro, micro.tokens)
    a = Attention(
        heads=shape.heads / micro.tp, key_dim=shape.key_dim, value_dim=shape.value_dim, rows=micro.tokens,
        attended=shape.attended, whole=shape.sequence, fused=micro.fused_attention,
        tuned=micro.tuned,
    )  # fmt: skip
    look = compute.attention_forward(device.pace, a, device.known)
    look_back = compute.attention_backward(device.pace, a, device.known)
    # Each half: a norm reads and writes, a residual reads twice and writes; positions turn queries and keys.
    width = (shape.norms + 3) * shape.hidden / micro.spread
    width = width + (2 * shape.head_width + shape.key_value_width) / micro.tp
    cast = casts(shape.hidden / micro.spread + shape.head_width / micro.tp, device, micro)
    weights = weight_casts(shape.attention, device, micro)
    moved = pointwise(width, device, micro)
    kernels = micro.kernels / 2
    tensor, near = _tensor(shape, device, micro), _context(shape, device, micro)
    exposed, exposed_back = np.maximum(0.0, near - look), np.maximum(0.0, 2 * near - look_back)
    none = np.zeros(1)
    return Passes(
        Work(forward, look, moved + cast + weights, tensor, exposed, none, kernels),
        Work(backward, look_back, 2 * (moved + cast), tensor, exposed_back, none, 2 * kernels),
    )


def _tensor(shape: Shape, device: Device, micro: Micro) -> Floats:
    """One reduction of a half's output; with sequence parallelism a gather and a scatter, as many bytes."""
    moved = micro.tokens * shape.hidden * device.pace.element_bytes
    whole = collective("all_reduce", moved, micro.tensor, device.fabric, device.known)
    if device.fabric.probed and np.any(micro.spread > 1):
        # Measured, the two differ from the one: gloo's scatter is a reduction of the whole.
        gather = collective("all_gather", moved, micro.tensor, device.fabric, device.known)
        scatter = collective("reduce_scatter", moved, micro.tensor, device.fabric, device.known)
        whole = np.where(micro.spread > 1, gather + scatter, whole)
    return (1 - device.known.tensor_hidden) * whole


def _context(shape: Shape, device: Device, micro: Micro) -> Floats:
    """Keys and values of all other positions, beside attention."""
    moved = micro.tokens * micro.cp * shape.key_value_width / micro.tp * device.pace.element_bytes
    return collective("all_gather", moved, micro.context, device.fabric, device.known)


def _dense_half(shape: Shape, device: Device, micro: Micro) -> Passes:
    forward, backward = projections(shape.feed_forward, device, micro, micro.tokens)
    inner = (2 + shape.gated) * shape.ffn_width / micro.tp
    moved = pointwise((shape.norms + 3) * shape.hidden / micro.spread + inner, device, micro)
    cast = casts(shape.hidden / micro.spread + shape.ffn_width / micro.tp, device, micro)
    weights = weight_casts(shape.feed_forward, device, micro)
    tensor, none, kernels = _tensor(shape, device, micro), np.zeros(1), micro.kernels / 2
    return Passes(
        Work(forward, none, moved + cast + weights, tensor, none, none, kernels),
        Work(backward, none, 2 * (moved + cast), tensor, none, none, 2 * kernels),
    )


def _expert_half(shape: Shape, device: Device, micro: Micro) -> Passes:
    """Router, dispatch, experts, combination, and the shared experts.

    Each rank of a tensor group sends its own part of the tokens; each rank holds experts / ep of them, and the host
    starts products for each (Transformer Engine's GroupedLinear loops over experts).
    """
    known, pace = device.known, device.pace
    shared, shared_back = projections(shape.shared, device, micro, micro.tokens)
    sent = micro.tokens / micro.tp * shape.experts_per_token
    held = np.maximum(shape.experts / micro.ep, 1.0)
    rows = known.expert_imbalance * sent * micro.tp / held / micro.tp
    up = (1 + shape.gated) * shape.expert_width
    forward = _experts(pace, held, rows, up, shape, known)
    to_weight = compute.grouped_matmul(pace, held, up, shape.hidden, rows, known)
    to_weight = to_weight + compute.grouped_matmul(pace, held, shape.hidden, shape.expert_width, rows, known)
    moved = sent * shape.hidden * pace.element_bytes
    crossing = moved * nodes_reached(shape.experts_per_token, micro.experts)
    travel = 2 * collective("all_to_all", crossing, micro.experts, device.fabric, known) * (1 - known.expert_hidden)
    permuted = 2 * known.permute_passes * moved * pace.byte
    inner = (2 + shape.gated) * (shape.expert_width * shape.experts_per_token) / micro.tp
    narrow = pointwise((shape.norms + 3) * shape.hidden / micro.spread + inner, device, micro)
    width = (shape.hidden + shape.expert_width) * shape.experts_per_token / micro.tp
    weights = weight_casts(shape.shared, device, micro)
    memory, none = narrow + casts(width, device, micro) + permuted, np.zeros(1)
    kernels = micro.kernels * known.kernels_per_moe_layer + PRODUCTS_OF_AN_EXPERT * held
    tensor = _tensor(shape, device, micro)
    return Passes(
        Work(shared + forward, none, memory + weights, tensor, none, travel, kernels),
        Work(shared_back + forward + micro.learning * to_weight, none, 2 * memory, tensor, none, travel, 2 * kernels),
    )


def _experts(pace: Pace, held: Floats, rows: Floats, up: Floats, shape: Shape, known: TimeConstants) -> Floats:
    first = compute.grouped_matmul(pace, held, rows, up, shape.hidden, known)
    return first + compute.grouped_matmul(pace, held, rows, shape.hidden, shape.expert_width, known)


def head(shape: Shape, device: Device, micro: Micro) -> Passes:
    """The projection to the vocabulary in 16 bits, and the loss over it."""
    columns, tokens, known = shape.vocab / micro.tp, micro.tokens, device.known
    forward = compute.matmul(device.pace, tokens, columns, shape.hidden, known, half=True)
    to_input = compute.matmul(device.pace, tokens, shape.hidden, columns, known, half=True)
    to_weight = compute.matmul(device.pace, columns, shape.hidden, tokens, known, half=True)
    loss = known.logit_passes * micro.logit_bytes * tokens * columns * device.pace.byte
    tensor, none = _tensor(shape, device, micro), np.zeros(1)
    return Passes(
        Work(forward, none, loss, none, none, none, micro.kernels),
        Work(to_input + micro.learning * to_weight, none, loss, tensor, none, none, micro.kernels),
    )


def embedding(shape: Shape, device: Device, micro: Micro) -> Passes:
    """A lookup, and adding its gradients up."""
    moved, none = pointwise(2 * shape.hidden / micro.spread, device, micro), np.zeros(1)
    tensor = _tensor(shape, device, micro)
    return Passes(
        Work(none, none, moved, tensor, none, none, micro.kernels / 4),
        Work(none, none, 2 * moved, none, none, none, micro.kernels / 4),
    )
