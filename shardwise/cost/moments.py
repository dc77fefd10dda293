"""What a rank of a pipeline holds at each moment of a step at which memory can be highest. No torch.

Moments: the loss; in the backward of the last micro-batch's first, second and last block, the feed-forward's fullest
moment, its norm's and the block's end; the root's reduction; the optimizer's update. Between these, what is held rises
or falls steadily with the blocks that are done. It is the engine's own table (plan/zero.py) in bytes.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import activations, in_flight
from shardwise.cost.calibration import memory_constants
from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, SPLIT_BACKWARD, Candidates, Counts, Flags
from shardwise.cost.parameters import Numbers, Shards, Units, adapters
from shardwise.cost.workload import Stack, Workload

Floats = NDArray[np.float64]
Held = NDArray[np.float64]  # [category, n]
P = ParamSpec("P")
T = TypeVar("T")
CATEGORIES = (
    "parameters", "gradients", "states", "gathered", "activations", "logits", "communication", "temporaries",
)  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """One rank of each candidate's pipeline: its blocks and what stands beside them. Shapes: [n].

    flying: (stage, micro-batch) pairs at the fullest moment; blocks: of all its stages; stage_blocks: of one.
    kept, again, beside_ffn, beside_norm, ffn, late: bytes of one block (see activations.Kept), by the recompute chosen.
    """

    workload: Workload
    candidates: Candidates
    place: Counts
    first: Flags
    last: Flags
    flying: Floats
    blocks: Floats
    stage_blocks: Floats
    units: Units
    shards: Shards
    whole: Numbers
    block: Numbers
    trained: float
    tokens: Floats
    kept: Floats
    again: Floats
    beside_ffn: Floats
    beside_norm: Floats
    ffn: Floats
    late: Floats

    @classmethod
    def of(cls, workload: Workload, candidates: Candidates, place: Counts) -> Self:
        """Where blocks differ (with experts, without), activations are those of the mean, the unit the larger."""
        arch, c = workload.arch, candidates
        first, last = in_flight.holds_first(place), in_flight.holds_last(c, place)
        dense = in_flight.dense_layers_at(c, place, arch.num_layers, arch.dense_layers).astype(np.float64)
        blocks = in_flight.layers_at(c, place, arch.num_layers).astype(np.float64)
        blocks += np.where(last, arch.prediction_layers, 0)
        sparse = blocks - dense if arch.experts else np.zeros(len(c))
        dense = blocks - sparse
        units = Units.of(arch, c)
        whole = units.dense_block.times(dense) + units.moe_block.times(sparse)
        whole = whole + units.embedding.times(first) + units.norm.times(last)
        whole = whole + units.head.times(last & ~(first & arch.tied_embeddings))
        trained, added = _trained(workload)
        block = units.moe_block if arch.moe_layers else units.dense_block
        tokens = c.micro_batch * (workload.sequence_length / c.cp)
        share = np.divide(sparse, blocks, out=np.zeros(len(c)), where=blocks > 0)
        return cls(
            workload, c, place, first, last, in_flight.pairs_in_flight(c, place).astype(np.float64), blocks,
            blocks / np.where(c.pp > 1, c.stages_per_rank, 1), units, Shards.of(c),
            whole + Numbers(added * blocks, np.zeros(len(c))), block, trained, tokens,
            *_of_activations(workload, c, tokens, share),
        )  # fmt: skip

    @property
    def stack(self) -> Stack:
        return self.workload.stack


def _trained(workload: Workload) -> tuple[float, float]:
    """The share of parameters that trains, and the numbers that low-rank factors add to a block."""
    if workload.trainable.kind == "full":
        return 1.0, 0.0
    if workload.trainable.kind == "frozen":
        return workload.trainable.share, 0.0
    added = adapters(workload)
    return added * workload.arch.num_layers / (workload.arch.parameters() + added * workload.arch.num_layers), added


def _of_activations(workload: Workload, c: Candidates, tokens: Floats, share: Floats) -> tuple[Floats, ...]:
    """kept, again, beside_ffn, beside_norm, ffn, late of the mean block, in bytes."""
    saved = np.where(c.compiled, memory_constants().compiled_activations, 1.0)

    def of(sparse: bool) -> list[Floats]:
        one = activations.of_block(workload, sparse)
        return [
            np.choose(c.recompute, [widths.on_rank(c) for widths in one.kept]),
            np.choose(c.recompute, [widths.on_rank(c) for widths in one.again]),
            *(widths.on_rank(c) for widths in (one.beside_ffn, one.beside_norm, one.ffn, one.late)),
        ]

    found = of(False) if workload.arch.dense_layers else of(True)
    if workload.arch.dense_layers and workload.arch.moe_layers:
        found = [a * (1 - share) + b * share for a, b in zip(found, of(True), strict=True)]
    full = c.recompute == RECOMPUTE.index("full")
    return tuple(
        each * tokens * np.where(full if index == 0 else False, 1.0, saved) for index, each in enumerate(found)
    )


def _once(count: Callable[Concatenate[Rank, P], T]) -> Callable[Concatenate[Rank, P], T]:
    """The answer of a Rank is kept beside it: a dozen moments ask for the same numbers."""

    @functools.wraps(count)
    def kept(rank: Rank, /, *more: P.args, **named: P.kwargs) -> T:
        known, key = rank.__dict__, f"{count.__name__} {more}"
        if key not in known:
            known[key] = count(rank, *more, **named)
        found: T = known[key]
        return found

    return kept


def moments(rank: Rank) -> Iterator[Held]:
    """Bytes by category, [8, n], at each of them."""
    yield _loss(rank)
    last = np.maximum(rank.stage_blocks - 1, 0)
    for done in (np.zeros_like(last), np.minimum(last, 1), last):
        yield from _block_backward(rank, done)
    if np.isin(rank.candidates.schedule, SPLIT_BACKWARD).any():
        yield from _between_halves(rank)
    yield _root_backward(rank)
    yield _update(rank)


def _held(rank: Rank, **bytes_of: Floats) -> Held:
    """With what is at rest: parameters and states."""
    parameters, states = _at_rest(rank)
    found = np.zeros((len(CATEGORIES), len(rank.candidates)))
    for name, column in {"parameters": parameters, "states": states, **bytes_of}.items():
        found[CATEGORIES.index(name)] = column
    return found


@_once
def _at_rest(rank: Rank) -> tuple[Floats, Floats]:
    """Weights and masters; states. Offloaded, masters and states lie on the host; under zero 3 weights too."""
    stack, c, trainable = rank.stack, rank.candidates, rank.workload.trainable
    whole, share = rank.whole.whole, rank.whole.share(rank.shards)
    kept = np.where(c.zero == 0, whole, share)
    between = np.where(c.zero == 3, share, whole)
    here = c.offload == OFFLOAD.index("none")
    masters, weights = stack.masters * rank.trained * kept * here, stack.weights * rank.trained * between
    frozen = (1 - rank.trained) * trainable.base_bytes * between
    sharded = np.where((c.zero == 3) & ~here, 0.0, weights + frozen)
    return masters + sharded, stack.states * rank.trained * kept * here


@_once
def _accumulating(rank: Rank) -> Flags:
    """Whether backwards went before the fullest moment, so that gradients stand there."""
    c = rank.candidates
    pairs = c.accumulation * np.where(c.pp > 1, c.stages_per_rank, 1)
    return np.asarray(np.where(c.pp > 1, pairs > rank.flying, c.accumulation > 1))


@_once
def _for_good(rank: Rank) -> Flags:
    """Whether gradients have buffers that are never let go: all-reduced buckets, and those beside 16-bit weights."""
    c, stack = rank.candidates, rank.stack
    beside = stack.weights > 0 and stack.masters > 0
    return np.asarray(((c.zero == 0) & (c.data_parallel > 1)) | ((c.zero < 2) & beside))


@_once
def _gradients_between(rank: Rank) -> Floats:
    """What stands between micro-batches, in bytes: whole below zero 2, else the shares."""
    c, size = rank.candidates, rank.stack.gradients * rank.trained
    kept = np.where(c.zero < 2, rank.whole.whole, rank.whole.share(rank.shards)) * size
    stands = _for_good(rank) | _accumulating(rank)
    return np.asarray(np.where(stands, kept, 0.0) * _gradients_here(rank))


@_once
def _gradients_here(rank: Rank) -> Flags:
    """Offloaded, shares of gradients go to the host at once."""
    return np.asarray((rank.candidates.offload == OFFLOAD.index("none")) | (rank.candidates.zero < 2))


@_once
def _gathers(rank: Rank) -> Flags:
    """Whether a sharded module gathers its parameters: always under zero 3; below it, where nothing whole stays."""
    zero = rank.candidates.zero
    return np.asarray((zero == 3) | ((zero > 0) & (rank.stack.weights == 0)))


@_once
def _copies(rank: Rank) -> Flags:
    """Whether masters that are whole are cast for use, each micro-batch anew."""
    stack = rank.stack
    return np.asarray((rank.candidates.zero == 0) & (stack.weights == 0) & (stack.gathered < stack.masters))


@_once
def _root(rank: Rank) -> Numbers:
    """All that is not in a block: one unit, gathered whole."""
    units, tied = rank.units, rank.workload.arch.tied_embeddings
    head = units.head.times(rank.last & ~(rank.first & tied))
    return units.embedding.times(rank.first) + head + units.norm.times(rank.last)


@_once
def _late_root(rank: Rank) -> Numbers:
    """Of the root what is used behind the blocks."""
    return rank.units.head.times(rank.last) + rank.units.norm.times(rank.last)


def _block_bytes(rank: Rank) -> float:
    """Of a block's number, gathered. What is frozen in four bits crosses and stands in four: products make it whole one
    by one. Embedding and head are not quantised (torchtune's NF4 layers)."""
    if rank.workload.trainable.kind != "lora":
        return rank.stack.gathered
    return min(rank.stack.gathered, rank.workload.trainable.base_bytes)


@_once
def _gathered(rank: Rank, blocks_in_use: float) -> Floats:
    """Bytes of parameters made whole or cast. `blocks_in_use`: of a recomputed or a gathered block, 0 or 1."""
    size, zero = rank.stack.gathered, rank.candidates.zero
    # A block of fewer bits counts as so many numbers of the root's size.
    root, block = _root(rank).whole, rank.block.whole * (_block_bytes(rank) / size)
    every = rank.whole.whole
    at_once = np.where(zero == 3, root + blocks_in_use * block, every)
    none = rank.candidates.recompute == RECOMPUTE.index("none")
    # A copy of an embedding is not needed again; a recomputed block's is made again.
    flown = rank.flying * rank.stage_blocks * block
    # Under GPipe the copy of the head that each micro-batch made waits for its backward.
    heads = np.where(rank.candidates.schedule == SCHEDULES.index("gpipe"), rank.flying, 1.0)
    cast = np.where(none, flown, blocks_in_use * block) + heads * _late_root(rank).whole
    return size * (np.where(_gathers(rank), at_once, 0.0) + np.where(_copies(rank), cast, 0.0))


def _activations(rank: Rank, done: Floats | float) -> Floats:
    """Kept by all micro-batches in flight, when so many blocks of the one in backward are gone."""
    return np.maximum(rank.flying * rank.stage_blocks - done, 0.0) * rank.kept


@_once
def _hidden(rank: Rank) -> Floats:
    """The stream between two blocks."""
    c = rank.candidates
    size = activations.compute_bytes(rank.workload) * rank.workload.arch.hidden_size
    return np.asarray(rank.tokens * size / np.where(c.sequence_parallel, c.tp, 1))


@_once
def _messages(rank: Rank) -> Floats:
    """Hidden tensors and their gradients on the way between stages."""
    return np.asarray(np.where(rank.candidates.pp > 1, 4.0, 0.0) * _hidden(rank))


def _loss(rank: Rank) -> Held:
    """Behind the last forward of the fullest moment; with the head, at the fullest moment of the loss."""
    return _held(
        rank,
        gradients=_gradients_between(rank),
        gathered=_gathered(rank, 0.0),
        activations=_activations(rank, 0.0),
        logits=_logits(rank),
        communication=_messages(rank) + _still_reducing(rank),
        temporaries=_hidden(rank) * 2,
    )


@_once
def _still_reducing(rank: Rank) -> Floats:
    """Under zero 2 and 3 the buffer of the last block that the micro-batch before reduced is still there."""
    stays = (rank.candidates.zero >= 2) & _accumulating(rank)
    return np.where(stays, rank.stack.reduced * rank.trained * rank.block.whole, 0.0)


def _logits(rank: Rank) -> Floats:
    """Bytes a logit, by how the loss is computed, of all logits on this rank."""
    stack, known, c = rank.stack, memory_constants(), rank.candidates
    full = {"fused": known.logit_bytes_fused_kernels}.get(stack.kernels, known.logit_bytes)
    if stack.fused_loss:
        full = known.logit_bytes_fused_loss_kernels if stack.kernels == "fused" else known.logit_bytes_chunked
    each = np.where(c.compiled, np.minimum(full, known.logit_bytes_compiled), full)
    losses = 1 + rank.workload.arch.prediction_layers
    # Under GPipe the softmax of every micro-batch waits for its backward, and what the last norm keeps.
    waiting = np.where(c.schedule == SCHEDULES.index("gpipe"), rank.flying - 1, 0.0)
    softmaxes = (each + activations.FP32 * waiting) * losses * rank.workload.arch.vocab_size / c.tp
    norms = waiting * activations.of_norm(rank.workload).on_rank(c)
    return np.where(rank.last, (softmaxes + norms) * rank.tokens, 0.0)


def _between_halves(rank: Rank) -> Iterator[Held]:
    """At the end of a backward's first half, which leaves its graph standing, with those that wait for their second."""
    c, arch = rank.candidates, rank.workload.arch
    norm = activations.of_norm(rank.workload).on_rank(c)
    logits = activations.compute_bytes(rank.workload) * arch.vocab_size / c.tp
    head = np.where(rank.last, (norm + activations.of_late_norm(rank.workload) + logits) * rank.tokens, 0.0)
    for flying, waiting in in_flight.pairs_waiting(c, rank.place):
        yield _held(
            rank,
            gradients=_gradients_between(rank),
            gathered=_gathered(rank, 0.0),
            activations=flying * rank.stage_blocks * rank.kept,
            logits=_logits(rank) + waiting * head,
            communication=_messages(rank) + _still_reducing(rank),
            temporaries=waiting * rank.stage_blocks * rank.late + _hidden(rank),
        )


def _block_backward(rank: Rank, done: Floats) -> Iterator[Held]:
    """In a block's backward, `done` behind it being gone: at its feed-forward, at that one's norm, at its end."""
    ffn_part = rank.ffn
    work = rank.again
    third = rank.block.times(1 / 3)
    yield _backward(rank, done, _activations(rank, done), work + rank.beside_ffn, third)
    kept = np.where(rank.candidates.recompute == RECOMPUTE.index("none"), ffn_part, 0.0)
    again = np.maximum(work - np.where(rank.candidates.recompute > 0, ffn_part, 0.0), 0.0)
    two_thirds = rank.block.times(2 / 3)
    yield _backward(rank, done, _activations(rank, done) - kept, again + rank.beside_norm, two_thirds)
    yield _backward(rank, done, _activations(rank, done + 1), rank.beside_norm + _hidden(rank), rank.block)


def _backward(rank: Rank, done: Floats, kept: Floats, beside: Floats, current: Numbers) -> Held:
    """`current`: of the block in backward, the numbers whose gradients are made."""
    gradients, moving = _gradients(rank, done, current)
    return _held(
        rank, gradients=gradients, gathered=_gathered(rank, 1.0), activations=kept,
        communication=_messages(rank) + moving, temporaries=beside + _hidden(rank),
    )  # fmt: skip


def _gradients(rank: Rank, done: Floats, current: Numbers) -> tuple[Floats, Floats]:
    """Bytes of gradients, and of the buffers that gather the next block and reduce the one before."""
    stack, c = rank.stack, rank.candidates
    made = activations.compute_bytes(rank.workload) * rank.trained
    size, late = stack.gradients * rank.trained, _late_root(rank).whole
    reduces = (c.zero >= 2) | ((c.zero == 1) & (stack.weights == 0))
    done_numbers = rank.block.times(done)
    shares = np.where(_accumulating(rank), rank.whole.share(rank.shards), done_numbers.share(rank.shards))
    sharded = size * shares * _gradients_here(rank) + made * (late + current.whole)
    whole = np.where(
        _accumulating(rank) | _for_good(rank), size * rank.whole.whole,
        size * (done_numbers.whole + late + current.whole),
    ) if size else made * current.whole  # fmt: skip
    gathers_next = np.where(c.zero == 3, _block_bytes(rank) * rank.block.whole, 0.0)
    reduced = np.where((done > 0) & reduces, stack.reduced * rank.trained * rank.block.whole, 0.0)
    first_sharded = np.where((c.zero == 1) & reduces & _accumulating(rank), size * rank.whole.whole, sharded)
    gradients = np.where(reduces, first_sharded, whole)
    return gradients, np.where(reduces, reduced, 0.0) + np.where(_gathers(rank), gathers_next, 0.0)


def _root_backward(rank: Rank) -> Held:
    """Behind all blocks of the last micro-batch: the root's gradients, and the buffer that reduces them."""
    stack, c = rank.stack, rank.candidates
    made, size = activations.compute_bytes(rank.workload) * rank.trained, stack.gradients * rank.trained
    root = _root(rank).whole
    reduces = (c.zero >= 2) | ((c.zero == 1) & (stack.weights == 0))
    sharded = size * rank.whole.share(rank.shards) * _gradients_here(rank) + made * root
    cast = made * rank.units.embedding.whole * rank.first if made < size else 0.0
    gradients = np.where(reduces, sharded, size * rank.whole.whole)
    return _held(
        rank, gradients=gradients, gathered=np.where(_gathers(rank), stack.gathered * root, 0.0),
        communication=np.where(reduces, stack.reduced * rank.trained * root, 0.0) + _messages(rank),
        temporaries=_hidden(rank) + np.where(reduces, 0.0, cast),
    )  # fmt: skip


def _update(rank: Rank) -> Held:
    """In the optimizer's step."""
    size, c = rank.stack.gradients * rank.trained, rank.candidates
    whole, share = rank.whole.whole, rank.whole.share(rank.shards)
    gradients = size * np.where((c.zero == 0) | ((c.zero == 1) & _for_good(rank)), whole, share)
    return _held(rank, gradients=gradients * _gradients_here(rank), temporaries=stepping(rank))


def stepping(rank: Rank) -> Floats:
    """What the optimizer's step makes beside, where it runs on the device."""
    here = rank.candidates.offload == OFFLOAD.index("none")
    updated = np.where(rank.candidates.zero == 0, rank.whole.whole, rank.whole.share(rank.shards))
    return np.asarray(rank.stack.stepping * rank.trained * updated * here)
