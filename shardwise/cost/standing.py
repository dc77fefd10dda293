"""One rank of each candidate's pipeline, and what it holds whatever moment of a step it is: at rest, gradients between
micro-batches, parameters made whole or cast, activations in flight. It is plan/zero.py's table in bytes. No torch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import activations, in_flight
from shardwise.cost.calibration import memory_constants
from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, Candidates, Counts, Flags
from shardwise.cost.parameters import Numbers, Shards, Units, adapters
from shardwise.cost.workload import Stack, Workload

Floats = NDArray[np.float64]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """One rank of each candidate's pipeline: its blocks and what stands beside them. Shapes: [n].

    flying: (stage, micro-batch) pairs at the fullest moment; blocks: of all its stages; stage_blocks: of one; sparse:
    how many of all have experts. kept, again, beside_ffn, beside_norm, ffn, inner, beside_sent, beside_returned, late:
    bytes of a block (see activations.Kept), by the recompute chosen; going: as kept, of the block that goes back.
    """

    workload: Workload
    candidates: Candidates
    place: Counts
    first: Flags
    last: Flags
    flying: Floats
    blocks: Floats
    stage_blocks: Floats
    sparse: Floats
    units: Units
    shards: Shards
    whole: Numbers
    block: Numbers
    trained: float
    tokens: Floats
    kept: Floats
    going: Floats
    again: Floats
    beside_ffn: Floats
    beside_norm: Floats
    ffn: Floats
    inner: Floats
    beside_sent: Floats
    beside_returned: Floats
    late: Floats

    @classmethod
    def of(cls, workload: Workload, candidates: Candidates, place: Counts) -> Self:
        """Where blocks differ (with experts, without), activations are those of the mean, the unit the larger.

        Of this engine's blocks without a pipeline it is known which go back first: those with experts.
        """
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
            blocks / np.where(c.pp > 1, c.stages_per_rank, 1), sparse, units, Shards.of(c),
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
    """kept of the mean block; then as Kept has them, kept and all that follows, of the one that goes back: of the mean
    too, or of one with experts where that is known to go first. In bytes."""
    saved = np.where(c.compiled, memory_constants().compiled_activations, 1.0)

    def of(sparse: bool) -> list[Floats]:
        one = activations.of_block(workload, sparse)
        return [
            np.choose(c.recompute, [widths.on_rank(c) for widths in one.kept]),
            np.choose(c.recompute, [widths.on_rank(c) for widths in one.again]),
            *(
                widths.on_rank(c)
                for widths in (
                    one.beside_ffn,
                    one.beside_norm,
                    one.ffn,
                    one.inner,
                    one.beside_sent,
                    one.beside_returned,
                    one.late,
                )
            ),
        ]

    found = first = of(False) if workload.arch.dense_layers else of(True)
    if workload.arch.dense_layers and workload.arch.moe_layers:
        sparse = of(True)
        found = first = [a * (1 - share) + b * share for a, b in zip(found, sparse, strict=True)]
        if workload.stack.ours:
            first = [np.where(c.pp == 1, b, mean) for b, mean in zip(sparse, found, strict=True)]
    full = c.recompute == RECOMPUTE.index("full")
    tables = activations.tables(workload) * tokens / c.micro_batch
    kept, going = (one * tokens * np.where(full, 1.0, saved) + tables for one in (found[0], first[0]))
    return (kept, going, *(each * tokens * saved for each in first[1:]))


def once(count: Callable[Concatenate[Rank, P], T]) -> Callable[Concatenate[Rank, P], T]:
    """The answer of a Rank is kept beside it: a dozen moments ask for the same numbers."""

    @functools.wraps(count)
    def kept(rank: Rank, /, *more: P.args, **named: P.kwargs) -> T:
        known, key = rank.__dict__, f"{count.__name__} {more}"
        if key not in known:
            known[key] = count(rank, *more, **named)
        found: T = known[key]
        return found

    return kept


@once
def given(rank: Rank) -> Floats:
    """The tables of positions as buffers, and tokens and labels of all micro-batches of a step: 8 bytes each."""
    arch, c, stack = rank.workload.arch, rank.candidates, rank.stack
    if not stack.ours:
        return np.zeros(len(c))
    buffers = 2 * arch.max_sequence_length * arch.head_dim * stack.masters
    return np.asarray(buffers + 2 * 8 * rank.tokens * c.accumulation, dtype=np.float64)


@once
def at_rest(rank: Rank) -> tuple[Floats, Floats]:
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


@once
def accumulating(rank: Rank) -> Flags:
    """Whether backwards went before the fullest moment, so that gradients stand there."""
    c = rank.candidates
    pairs = c.accumulation * np.where(c.pp > 1, c.stages_per_rank, 1)
    return np.asarray(np.where(c.pp > 1, pairs > rank.flying, c.accumulation > 1))


@once
def for_good(rank: Rank) -> Flags:
    """Whether gradients have buffers that are never let go: all-reduced buckets, and those beside 16-bit weights."""
    c, stack = rank.candidates, rank.stack
    beside = stack.weights > 0 and stack.masters > 0
    return np.asarray(((c.zero == 0) & (c.data_parallel > 1)) | ((c.zero < 2) & beside))


@once
def gradients_between(rank: Rank) -> Floats:
    """What stands between micro-batches, in bytes: whole below zero 2, else the shares."""
    c, size = rank.candidates, rank.stack.gradients * rank.trained
    kept = np.where(c.zero < 2, rank.whole.whole, rank.whole.share(rank.shards)) * size
    stands = for_good(rank) | accumulating(rank)
    return np.asarray(np.where(stands, kept, 0.0) * gradients_here(rank))


@once
def gradients_here(rank: Rank) -> Flags:
    """Offloaded, shares of gradients go to the host at once."""
    return np.asarray((rank.candidates.offload == OFFLOAD.index("none")) | (rank.candidates.zero < 2))


@once
def gathers(rank: Rank) -> Flags:
    """Whether a sharded module gathers its parameters: always under zero 3; below it, where nothing whole stays."""
    zero = rank.candidates.zero
    return np.asarray((zero == 3) | ((zero > 0) & (rank.stack.weights == 0)))


@once
def last_backward(rank: Rank) -> Flags:
    """Whether the fullest backward is a step's last one, in which each block that is done is let go: below zero 3 and
    without a pipeline, where no other one has the gradients of all blocks beside it."""
    c = rank.candidates
    return np.asarray((c.pp == 1) & ((c.zero == 1) | ((c.zero == 2) & (c.accumulation <= 2))) & gathers(rank))


@once
def casts(rank: Rank) -> Flags:
    """Whether masters that are whole are cast for use, each micro-batch anew."""
    stack = rank.stack
    return np.asarray((rank.candidates.zero == 0) & (stack.weights == 0) & (stack.gathered < stack.masters))


@once
def root_unit(rank: Rank) -> Numbers:
    """All that is not in a block: one unit, gathered whole."""
    units, tied = rank.units, rank.workload.arch.tied_embeddings
    head = units.head.times(rank.last & ~(rank.first & tied))
    return units.embedding.times(rank.first) + head + units.norm.times(rank.last)


@once
def late_root(rank: Rank) -> Numbers:
    """Of the root what is used behind the blocks."""
    return rank.units.head.times(rank.last) + rank.units.norm.times(rank.last)


def block_bytes(rank: Rank) -> float:
    """Of a block's number, gathered. What is frozen in four bits crosses and stands in four: products make it whole one
    by one. Embedding and head are not quantised (torchtune's NF4 layers)."""
    if rank.workload.trainable.kind != "lora":
        return rank.stack.gathered
    return min(rank.stack.gathered, rank.workload.trainable.base_bytes)


@once
def gathered(rank: Rank, blocks_in_use: float) -> Floats:
    """Bytes of parameters made whole for use. `blocks_in_use`: of a gathered block, 0 or 1."""
    size, zero = rank.stack.gathered, rank.candidates.zero
    # A block of fewer bits counts as so many numbers of the root's size.
    root, block = root_unit(rank).whole, rank.block.whole * (block_bytes(rank) / size)
    at_once = np.where(zero == 3, root + blocks_in_use * block, rank.whole.whole)
    return np.asarray(size * np.where(gathers(rank), at_once, 0.0))


@once
def mean_block(rank: Rank) -> Floats:
    """Numbers of a block of this rank, on average."""
    if not (rank.workload.arch.dense_layers and rank.workload.arch.moe_layers):
        return rank.block.whole
    numbers = rank.whole.whole - root_unit(rank).whole
    return np.divide(numbers, rank.blocks, out=np.zeros_like(numbers), where=rank.blocks > 0)


def let_go(rank: Rank, done: Floats) -> Floats:
    """Of what is gathered, bytes of the blocks that are done in a step's last backward."""
    return rank.stack.gathered * last_backward(rank) * (done * rank.block.whole)


def copied(rank: Rank, done: Floats | float, blocks_in_use: float, heads: Floats) -> Floats:
    """Bytes of parameters cast for use. Of blocks: kept like activations, when `done` of the one in backward are gone,
    and a recomputed one's anew. Of the head and the norm before it: so many copies, each until its backward."""
    none = rank.candidates.recompute == RECOMPUTE.index("none")
    kept = np.maximum(rank.flying * rank.stage_blocks * mean_block(rank) - done * rank.block.whole, 0.0)
    blocks = np.where(none, kept, blocks_in_use * rank.block.whole)
    numbers = blocks + heads * late_root(rank).whole
    return np.where(casts(rank), rank.stack.gathered * numbers, 0.0)


@once
def losses_waiting(rank: Rank) -> Floats:
    """Under GPipe, micro-batches whose loss is computed, beside the one that is looked at."""
    return np.asarray(np.where(rank.candidates.schedule == SCHEDULES.index("gpipe"), rank.flying - 1, 0.0))


@once
def embedding_copy(rank: Rank) -> Floats:
    """Of the embedding, cast anew for each forward, and gone behind it: whole stages end with it."""
    here = casts(rank) & rank.first & ~rank.last
    return np.asarray(rank.stack.gathered * rank.units.embedding.whole * here)


def activations_kept(rank: Rank, done: Floats | float) -> Floats:
    """Kept by all micro-batches in flight, when so many blocks of the one in backward are gone."""
    return np.maximum(rank.flying * rank.stage_blocks * rank.kept - done * rank.going, 0.0)


@once
def hidden(rank: Rank) -> Floats:
    """The stream between two blocks."""
    c = rank.candidates
    size = activations.compute_bytes(rank.workload) * rank.workload.arch.hidden_size
    return np.asarray(rank.tokens * size / np.where(c.sequence_parallel, c.tp, 1))
