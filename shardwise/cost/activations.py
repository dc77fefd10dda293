"""What a block keeps from its forward to its backward, tensor by tensor, in bytes a token; and what backward adds.

Source: the tensors that autograd saves, read from torch's and Megatron-LM's modules; sums agree with Korthikanti et
al., arXiv 2205.05198, section 4. No torch.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.candidates import Candidates
from shardwise.cost.workload import Workload
from shardwise.inputs.arch import Experts

Floats = NDArray[np.float64]
# split: over the ranks of tensor parallelism. positions: over them too, where sequence parallel is on. whole: on each.
Over = Literal["split", "positions", "whole"]
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
FP32 = 4
INDEX = 8


class Saved(NamedTuple):
    """A tensor that backward needs. size: bytes a token. none, selective, full: whether that recompute keeps it.

    for_weights: nothing needs it but the gradient of the weight that it is multiplied with.
    """

    name: str
    size: float
    over: Over
    none: bool = True
    selective: bool = True
    full: bool = False
    for_weights: bool = False


class Widths(NamedTuple):
    """Bytes a token by how they are divided."""

    split: float
    positions: float
    whole: float

    def on_rank(self, candidates: Candidates) -> Floats:
        """Bytes a token on one rank. Shapes: [n]."""
        tp = candidates.tp
        shared = np.where(candidates.sequence_parallel, tp, 1)
        return np.asarray(self.split / tp + self.positions / shared + self.whole, dtype=np.float64)


class Kept(NamedTuple):
    """Of one block: kept by each recompute (none, selective, full); made again by it; and added while backward runs.

    beside_ffn: at the fullest moment of the feed-forward's backward. beside_norm: of a norm's.
    ffn: of what is kept or made again, that the feed-forward has let go when its norm's backward runs.
    inner: of that, what experts have let go when the gradients of all their weights are there. beside_sent: added then.
    beside_returned: added when what experts gave goes back.
    late: gradients of what each weight gave, which wait where the weights' half of a backward comes later.
    """

    kept: tuple[Widths, Widths, Widths]
    again: tuple[Widths, Widths, Widths]
    beside_ffn: Widths
    beside_norm: Widths
    ffn: Widths
    inner: Widths
    beside_sent: Widths
    beside_returned: Widths
    late: Widths


@functools.lru_cache(maxsize=256)
def of_block(workload: Workload, sparse: bool) -> Kept:
    """One block, with experts or without."""
    attention, ffn = list(_attention(workload)), list(_experts(workload) if sparse else _dense(workload))
    saved = _needed(workload, [*attention, *ffn])
    modes = ("none", "selective", "full")
    kept = tuple(_sum(one for one in saved if getattr(one, mode)) for mode in modes)
    again = tuple(_made_again(saved, mode) for mode in modes)
    let_go = {one.name for one in ffn if one.none and not one.name.startswith("residual")}
    behind = [one for one in saved if one.name in let_go]
    inner = _sum(one for one in behind if one.name not in STANDS_UNTIL_SENT)
    beside = _beside_ffn(workload, sparse), _beside_norm(workload)
    rows = _beside_sent(workload), _beside_returned(workload)
    return Kept(kept, again, *beside, _sum(behind), inner, *rows, _late(workload, sparse))  # type: ignore[arg-type]


def _made_again(saved: list[Saved], mode: str) -> Widths:
    """Less the results of products that were kept in place of what follows from them: they go when they are read."""
    if mode == "none":
        return Widths(0, 0, 0)
    read = [one._replace(size=-one.size) for one in saved if getattr(one, mode) and not one.none and not one.full]
    return _sum([one for one in saved if one.none and not getattr(one, mode)] + read)


# What an expert's last product in a backward still reads, and what the router keeps for behind it.
STANDS_UNTIL_SENT = (
    "scaled before feed-forward", "root before feed-forward", "normed before feed-forward", "router", "router logits",
    "place of rows", "sent to experts",
)  # fmt: skip


def of_norm(workload: Workload) -> Widths:
    """What one norm keeps without recompute, its input and its result with it."""
    return _sum(_norm(workload, "head"))


def tables(workload: Workload) -> float:
    """Bytes a position of the cosines and sines that each block of this engine casts for itself, and keeps."""
    size, stack = compute_bytes(workload), workload.stack
    return float(2 * workload.arch.head_dim * size) if stack.ours and size < stack.masters else 0.0


def compute_bytes(workload: Workload) -> int:
    """Of one number of an activation."""
    return COMPUTE_BYTES[workload.precision]


def saved_tensors(workload: Workload, sparse: bool) -> tuple[Saved, ...]:
    """All of them, as they are counted."""
    ffn = _experts(workload) if sparse else _dense(workload)
    return tuple(_needed(workload, [*_attention(workload), *ffn]))


def _sum(saved: Iterator[Saved] | list[Saved]) -> Widths:
    found = {"split": 0.0, "positions": 0.0, "whole": 0.0}
    for one in saved:
        found[one.over] += one.size
    return Widths(**found)


def _needed(workload: Workload, saved: list[Saved]) -> list[Saved]:
    """Without what only the gradients of weights that are not trained would need."""
    trainable = workload.trainable
    if workload.precision == "fp8" and workload.stack.kernels == "fused":
        # Transformer Engine keeps what a product read in the eight bits in which it read it.
        saved = [one._replace(size=one.size / 2) if one.for_weights else one for one in saved]
    if trainable.kind != "lora":
        return saved
    targets = {name for target in trainable.targets for name in TARGETS.get(target, (target,))}
    return [one for one in saved if not one.for_weights or one.name in targets]


# Which input a factor of LoRA reads, by the projection that it stands beside.
TARGETS = {
    **dict.fromkeys(("query", "key", "value", "q_proj", "k_proj", "v_proj", "qkv"), ("normed before attention",)),
    **dict.fromkeys(("gate", "up", "gate_proj", "up_proj", "w1", "w3"), ("normed before feed-forward",)),
    **dict.fromkeys(("down", "down_proj", "w2"), ("into down",)),
}


def _norm(workload: Workload, place: str) -> Iterator[Saved]:
    """The residual stream that goes in, its inverse root, and the result, which products read."""
    width, size, kernels = workload.arch.hidden_size, compute_bytes(workload), workload.stack.kernels
    composed, keeps = kernels == "composed", workload.stack.selective != "products"
    first = place == "attention"
    # Composed norms compute in fp32: a copy of what goes in, and the normalised one before its scale. The copy stands
    # in place of the input, which nothing else keeps but recompute of the block.
    copied = composed and first and size < FP32
    yield Saved(f"residual before {place}", width * (FP32 if composed and not first else size), "positions",
                none=not copied, selective=not keeps if copied else first or keeps, full=first)  # fmt: skip
    if composed:
        if copied:
            yield Saved("residual in fp32", width * FP32, "positions", selective=keeps)
        yield Saved(f"scaled before {place}", width * FP32, "positions", selective=keeps)
    yield Saved(f"root before {place}", FP32, "positions", selective=keeps)
    gathered: Over = "positions" if kernels == "fused" else "whole"
    yield Saved(f"normed before {place}", width * size, gathered, selective=keeps, for_weights=True)


def _attention(workload: Workload) -> Iterator[Saved]:
    arch, size, keeps = workload.arch, compute_bytes(workload), workload.stack.selective != "products"
    query, value = arch.num_heads * arch.key_head_dim, arch.num_heads * arch.value_head_dim
    latent = arch.latent
    key = query if latent else arch.num_kv_heads * arch.head_dim
    values = value if latent else arch.num_kv_heads * arch.head_dim
    yield from _norm(workload, "attention")
    if latent:
        ranks = latent.query_rank + latent.key_value_rank
        yield Saved("latents", size * (ranks + latent.rope_head_dim), "positions")
        yield Saved("normed latents", size * ranks, "positions", selective=keeps, for_weights=True)
    if arch.qk_norm:
        yield from _norms_of_heads(workload, query + key, arch.num_heads + arch.num_kv_heads)
    # What products gave is kept before its norm, and made into these anew.
    yield Saved("queries and keys", size * (query + key), "split", selective=keeps or not arch.qk_norm)
    yield Saved("values", size * values, "split")
    yield Saved("attention", size * value, "split")
    yield Saved("log of sums", FP32 * arch.num_heads, "split", selective=True)
    if not workload.stack.fused_attention:
        # The softmax; with dropout its mask and its result too. Source: Korthikanti et al., section 4.1.
        each = size + (1 + size if arch.dropout else 0)
        yield Saved("scores", each * arch.num_heads * workload.sequence_length, "split", selective=False)
    if not keeps:
        yield Saved("attention projected", size * arch.hidden_size, "whole", none=False)
    yield from _after(workload, "attention")


def _norms_of_heads(workload: Workload, width: int, heads: int) -> Iterator[Saved]:
    """Composed as the block's norms are: in fp32, what goes in, its inverse root, and it before its scale."""
    size, keeps = compute_bytes(workload), workload.stack.selective != "products"
    composed = workload.stack.kernels == "composed"
    if not composed or size >= FP32 or not keeps:
        # Products' results are kept as they are.
        yield Saved("queries and keys before their norm", size * width, "split", none=not composed or size >= FP32)
    if composed:
        if size < FP32:
            yield Saved("queries and keys in fp32", FP32 * width, "split", selective=keeps)
        yield Saved("queries and keys before their scale", max(size, FP32) * width, "split", selective=keeps)
        yield Saved("roots of queries and keys", max(size, FP32) * heads, "split", selective=keeps)


def _after(workload: Workload, place: str) -> Iterator[Saved]:
    arch, size = workload.arch, compute_bytes(workload)
    if arch.dropout:
        yield Saved(
            f"dropout after {place}", arch.hidden_size, "positions", selective=workload.stack.selective != "products"
        )
    if arch.norms_per_block == 4:
        yield Saved(f"{place} before its norm", size * arch.hidden_size, "positions")


def _gate(workload: Workload, width: float, prefix: str = "") -> Iterator[Saved]:
    """What an activation function and a gate keep of a width of numbers a token."""
    size, keeps = compute_bytes(workload), workload.stack.selective != "products"
    halves = 2 if workload.arch.gated_ffn else 1
    yield Saved(f"{prefix}gate and up", size * halves * width, "split")
    if workload.arch.gated_ffn and workload.stack.kernels != "fused":
        yield Saved(f"{prefix}activated", size * width, "split", selective=keeps)
    yield Saved(f"{prefix}into down", size * width, "split", selective=keeps, for_weights=True)


def _dense(workload: Workload) -> Iterator[Saved]:
    arch, size = workload.arch, compute_bytes(workload)
    yield from _norm(workload, "feed-forward")
    yield from _gate(workload, arch.ffn_size)
    if workload.stack.selective == "products":
        yield Saved("feed-forward projected", size * arch.hidden_size, "whole", none=False)
    yield from _after(workload, "feed-forward")


def _experts(workload: Workload) -> Iterator[Saved]:
    """Each token goes to `per_token` experts, as many times as a copy; ranks of a tensor group send their own part."""
    arch, size, keeps = workload.arch, compute_bytes(workload), workload.stack.selective != "products"
    experts = arch.experts
    per_token = experts.per_token if experts else 0
    width = experts.ffn_size if experts else 0
    yield from _norm(workload, "feed-forward")
    if experts and workload.stack.ours:
        yield from _our_router(workload, experts)
    else:
        yield Saved("router", 2 * FP32 * (experts.count if experts else 0), "positions", selective=keeps)
    yield Saved("sent to experts", size * per_token * arch.hidden_size, "split", selective=keeps, for_weights=True)
    yield from _gate(workload, per_token * width, "experts' ")
    yield Saved("back from experts", size * per_token * arch.hidden_size, "split")
    if experts and experts.shared_ffn_size:
        yield from _gate(workload, experts.shared_ffn_size, "shared ")
        # Behind a gate it is multiplied with that.
        if experts.shared_gate or not keeps:
            yield Saved("shared projected", size * arch.hidden_size, "whole", none=experts.shared_gate)
    yield from _after(workload, "feed-forward")


def _our_router(workload: Workload, experts: Experts) -> Iterator[Saved]:
    """In fp32 or more: scores, those of the chosen experts, their sum and weights; which they are; the rows' orders."""
    size, keeps, each = max(FP32, compute_bytes(workload)), workload.stack.selective != "products", experts.per_token
    weights = size * (2 * each + 1 if experts.renormalised else each if experts.scale == 1 else 2 * each)
    yield Saved("router", size * experts.count + weights + INDEX * each, "positions", selective=keeps)
    if not keeps:
        yield Saved("router logits", size * experts.count, "positions", none=False)
    yield Saved("place of rows", INDEX * each, "positions", selective=keeps)
    yield Saved("order of rows", INDEX * each, "positions", selective=keeps)


def _beside_sent(workload: Workload) -> Widths:
    """Beside what experts were sent: gradients of it, by way of the gate and of up; of the gate; of the stream."""
    arch, size, experts = workload.arch, compute_bytes(workload), workload.arch.experts
    if experts is None:
        return Widths(0.0, 0.0, 0.0)
    rows = experts.per_token * ((2 if arch.gated_ffn else 1) * arch.hidden_size + experts.ffn_size)
    return Widths(size * rows, _streams(workload, experts), 0.0)


def _beside_returned(workload: Workload) -> Widths:
    """Each row's gradient beside the stream's in fp32 or more; or, before, one of a token's rows and its product."""
    arch, size, experts = workload.arch, compute_bytes(workload), workload.arch.experts
    if experts is None:
        return Widths(0.0, 0.0, 0.0)
    wide = FP32 if size < FP32 else 0
    most = max(wide + size * experts.per_token, wide + size + max(size, FP32))
    return Widths(most * arch.hidden_size - size * _shared_gone(workload, experts), _streams(workload, experts), 0.0)


def _shared_gone(workload: Workload, experts: Experts) -> int:
    """Numbers a token that a shared expert kept and has let go: it goes back before the others."""
    inner = experts.shared_ffn_size * (halves_kept(workload) + 1)
    return inner + (workload.arch.hidden_size if experts.shared_gate else 0)


def _streams(workload: Workload, experts: Experts) -> float:
    """Bytes a token of the stream's gradient, and of that which a shared expert has left for what it was given."""
    return float(compute_bytes(workload) * workload.arch.hidden_size * (2 if experts.shared_ffn_size else 1))


def _beside_experts(workload: Workload, experts: Experts) -> Widths:
    """In this engine, behind the projection down: what came back and what it read is gone, gradients of gate and up are
    there.
    """
    arch, size = workload.arch, compute_bytes(workload)
    rows, width = experts.per_token * arch.hidden_size, experts.per_token * experts.ffn_size
    ways = 2 if arch.gated_ffn else 1
    gone = _shared_gone(workload, experts)
    return Widths(size * (ways * width - rows - gone), _streams(workload, experts), 0.0)


def halves_kept(workload: Workload) -> int:
    """Widths that a gate keeps, but for what goes into the projection down."""
    if not workload.arch.gated_ffn:
        return 1
    return 2 if workload.stack.kernels == "fused" else 3


def _beside_ffn(workload: Workload, sparse: bool) -> Widths:
    """Gradients of gate and product while what they were made of is still there, and of the stream."""
    arch, size = workload.arch, compute_bytes(workload)
    experts = arch.experts
    if sparse and experts and workload.stack.ours:
        return _beside_experts(workload, experts)
    width = experts.per_token * experts.ffn_size + experts.shared_ffn_size if sparse and experts else arch.ffn_size
    sent = experts.per_token * arch.hidden_size if sparse and experts else 0
    # The gradient of the product takes the place of the product itself.
    return Widths(size * ((2 if arch.gated_ffn else 1) * width + sent), size * arch.hidden_size, 0.0)


def _beside_norm(workload: Workload) -> Widths:
    """Composed: five fp32 tensors at once; else gradients of what went in and came out."""
    width = workload.arch.hidden_size
    if workload.stack.kernels == "composed":
        return Widths(0.0, (5 * FP32 + compute_bytes(workload)) * width, 0.0)
    return Widths(0.0, 2 * compute_bytes(workload) * width, 0.0)


def of_late_norm(workload: Workload) -> float:
    """Bytes a token of the gradient of what one norm's weight gave: composed, that product is in fp32."""
    size = FP32 if workload.stack.kernels == "composed" else compute_bytes(workload)
    return float(size * workload.arch.hidden_size)


def _late(workload: Workload, sparse: bool) -> Widths:
    """Read from torch's split backward: it keeps the gradients of the nodes in which a weight meets the samples."""
    arch, size = workload.arch, compute_bytes(workload)
    halves, experts = 2 if arch.gated_ffn else 1, arch.experts if sparse else None
    query = arch.num_heads * arch.key_head_dim
    keys = query if arch.latent else arch.num_kv_heads * arch.head_dim
    values = arch.num_heads * arch.value_head_dim if arch.latent else arch.num_kv_heads * arch.head_dim
    latents = arch.latent.query_rank + arch.latent.key_value_rank + arch.latent.rope_head_dim if arch.latent else 0
    inner = halves * arch.ffn_size
    sent = router = 0
    if experts is not None:
        inner = halves * (experts.per_token * experts.ffn_size + experts.shared_ffn_size)
        sent, router = experts.per_token * arch.hidden_size, FP32 * experts.count
    return Widths(
        split=size * (query + keys + values + inner + sent),
        positions=2 * of_late_norm(workload) + size * latents + router,
        whole=size * 2 * arch.hidden_size,
    )
