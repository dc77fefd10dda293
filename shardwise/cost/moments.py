"""What a rank of a pipeline holds at each moment of a step at which memory can be highest. No torch.

Moments: the loss; in the backward of the last micro-batch's first, second and last block, the feed-forward's fullest
moment, its norm's and the block's end; the root's reduction; the optimizer's update. Between these, what is held rises
or falls steadily with the blocks that are done. It is the engine's own table (plan/zero.py) in bytes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import activations, in_flight, standing
from shardwise.cost.calibration import memory_constants
from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, SPLIT_BACKWARD, Counts, Flags
from shardwise.cost.parameters import Numbers
from shardwise.cost.standing import Floats, Rank, once
from shardwise.inputs.arch import Experts

Held = NDArray[np.float64]  # [category, n]
CATEGORIES = (
    "parameters", "gradients", "states", "gathered", "activations", "logits", "communication", "temporaries",
)  # fmt: skip


def moments(rank: Rank) -> Iterator[Held]:
    """Bytes by category, [8, n], at each of them."""
    yield _loss(rank)
    last = np.maximum(rank.stage_blocks - 1, 0)
    # In the very last block nothing more is gathered, which is more than the one block's shares of gradients.
    last = np.where(rank.candidates.zero == 3, np.maximum(last - 1, 0), last)
    if rank.stack.ours and rank.workload.arch.dense_layers and rank.workload.arch.moe_layers:
        # Those with experts go back first, and are fuller.
        last = np.where(rank.candidates.pp == 1, np.minimum(last, np.maximum(rank.sparse - 1, 0)), last)
    for done in (np.zeros_like(last), np.minimum(last, 1), last):
        yield from _block_backward(rank, done)
    if rank.stack.ours and rank.workload.arch.moe_layers:
        # Of dense blocks, whose weights are small beside all else, neither is the fullest.
        yield _casting(rank, last)
        yield _first_reduced(rank)
    if np.isin(rank.candidates.schedule, SPLIT_BACKWARD).any():
        yield from _between_halves(rank)
    yield _root_backward(rank)
    yield _update(rank)


def _held(rank: Rank, **bytes_of: Floats) -> Held:
    """With what is at rest: parameters and states."""
    parameters, states = standing.at_rest(rank)
    found = np.zeros((len(CATEGORIES), len(rank.candidates)))
    for name, column in {"parameters": parameters, "states": states, **bytes_of}.items():
        found[CATEGORIES.index(name)] = column
    found[CATEGORIES.index("temporaries")] += standing.given(rank)
    return found


@once
def _messages(rank: Rank, backward: bool) -> Floats:
    """Hidden tensors and their gradients on the way between stages.

    In this engine (parallel/pipeline.py) a stage's output stays until its backward, and so does what it received, which
    norms of one operator and recompute keep in any case; a gradient that was sent stays for twice as many ticks of the
    schedules' clock as there are stages, and one comes each third tick. One more is awaited, and in a backward that
    comes from another stage its gradient is there.
    """
    c, size = rank.candidates, activations.compute_bytes(rank.workload)
    if not rank.stack.ours:
        return np.asarray(np.where(c.pp > 1, 4.0, 0.0) * standing.hidden(rank))
    each, gpipe = c.stages_per_rank, c.schedule == SCHEDULES.index("gpipe")
    composed = rank.stack.kernels == "composed" and size < activations.FP32
    kept = composed & (c.recompute == RECOMPUTE.index("none"))
    coming = 1.0 + (backward & ~rank.last)
    received = np.floor(rank.flying * (each - rank.first) / each) * kept
    outputs = np.floor(rank.flying * (each - rank.last) / each)
    sent = np.minimum(np.ceil(2 * c.stages / 3), c.accumulation) * ((each > 1) | ~rank.first)
    return np.asarray(
        np.where(c.pp > 1, received + outputs + np.where(gpipe, 0.0, sent + coming), 0.0) * standing.hidden(rank)
    )


def _loss(rank: Rank) -> Held:
    """Behind the last forward of the fullest moment; with the head, at the fullest moment of the loss."""
    again = rank.candidates.stages_per_rank > 1
    results, scattered = _results(rank)
    # Where the forward is another stage's, nothing is done with the embedding's copy.
    embedding = standing.embedding_copy(rank)
    copies = standing.copied(rank, 0.0, 0.0, 1 + standing.losses_waiting(rank))
    return _held(
        rank,
        gradients=standing.gradients_between(rank),
        gathered=standing.gathered(rank, 0.0) + copies + np.where(again, 0.0, embedding),
        activations=standing.activations_kept(rank, 0.0),
        logits=_logits(rank),
        communication=_messages(rank, False)
        + _still_reducing(rank)
        + scattered
        + _summed_over_copies(rank, rank.block.times(0.0), 3),
        temporaries=results + np.where(again, embedding, 0.0),
    )


def _results(rank: Rank) -> tuple[Floats, Floats]:
    """Bytes of results at the end of a last block that no head follows, and of the collective there.

    What it added to, what it adds, and their sum. With sequence parallel it is fullest where what it adds is scattered:
    that is whole on each rank, as it was made and in the order of the wire; and not yet a message.
    """
    stream, tp = standing.hidden(rank), rank.candidates.tp
    if not rank.stack.ours:
        return np.where(rank.last, 0.0, 2 * stream), np.zeros(len(stream))
    split = rank.candidates.sequence_parallel & (tp > 1)
    results = np.where(split, (4 + tp) * stream, 3 * stream)
    return np.where(rank.last, 0.0, results), np.where(split & ~rank.last, tp * stream, 0.0)


@once
def _still_reducing(rank: Rank) -> Floats:
    """Under zero 2 and 3 the buffer of the last unit that the micro-batch before reduced is still there: the root, and
    of a stage without one its first block."""
    stays = (rank.candidates.zero >= 2) & standing.accumulating(rank)
    root = standing.root_unit(rank).whole
    unit = np.where(root > 0, root, rank.block.whole)
    return np.where(stays, rank.stack.reduced * rank.trained * unit, 0.0)


def _logits(rank: Rank) -> Floats:
    """Bytes a logit, by how the loss is computed, of all on this rank; and what the norm before the head keeps."""
    stack, known, c = rank.stack, memory_constants(), rank.candidates
    full = {"fused": known.logit_bytes_fused_kernels}.get(stack.kernels, known.logit_bytes)
    if stack.fused_loss:
        full = known.logit_bytes_fused_loss_kernels if stack.kernels == "fused" else known.logit_bytes_chunked
    each = np.where(c.compiled, np.minimum(full, known.logit_bytes_compiled), full)
    losses = 1 + rank.workload.arch.prediction_layers
    # The softmax of every micro-batch waits for its backward, and what the last norm keeps.
    waiting = standing.losses_waiting(rank)
    softmaxes = (each + activations.FP32 * waiting) * losses * rank.workload.arch.vocab_size / c.tp
    norms = (waiting + 1) * activations.of_norm(rank.workload).on_rank(c)
    return np.where(rank.last, (softmaxes + norms) * rank.tokens, 0.0)


def _between_halves(rank: Rank) -> Iterator[Held]:
    """At the end of a backward's first half, which leaves its graph standing, with those that wait for their second."""
    c, arch = rank.candidates, rank.workload.arch
    norm = activations.of_norm(rank.workload).on_rank(c)
    logits = activations.compute_bytes(rank.workload) * arch.vocab_size / c.tp
    head = np.where(rank.last, (norm + activations.of_late_norm(rank.workload) + logits) * rank.tokens, 0.0)
    # The one whose first half ends has its softmax still, and is in the norm that its stage began with: the gradient
    # that came to it is one of those that wait.
    softmax = np.where(rank.last, activations.FP32 * arch.vocab_size / c.tp * rank.tokens, 0.0)
    for flying, waiting in in_flight.pairs_waiting(c, rank.place):
        heads = np.maximum(waiting, 1).astype(np.float64)
        yield _held(
            rank,
            gradients=standing.gradients_between(rank),
            gathered=standing.gathered(rank, 0.0) + standing.copied(rank, 0.0, 0.0, heads),
            activations=flying * rank.stage_blocks * rank.kept,
            logits=softmax + waiting * head,
            communication=_messages(rank, False) + _still_reducing(rank),
            temporaries=waiting * rank.stage_blocks * rank.late + rank.beside_norm - standing.hidden(rank),
        )


def _block_backward(rank: Rank, done: Floats) -> Iterator[Held]:
    """In a block's backward, `done` behind it being gone: at its feed-forward, at that one's norm, at its end."""
    ffn_part = rank.ffn
    work = rank.again
    down, inner = _of_feed_forward(rank)
    beside, copies = _at_down(rank, down)
    # A stage's last block has the stream's gradient from the next stage: a message.
    told = (done == 0) & (rank.candidates.pp > 1) & ~rank.last & rank.stack.ours
    beside = beside - np.where(told, standing.hidden(rank), 0.0)
    yield _backward(rank, done, standing.activations_kept(rank, done), work + beside, down, -copies, _one_weight(down))
    if rank.workload.arch.moe_layers and rank.stack.ours:
        yield _at_returned(rank, done, Numbers(inner.dense, np.zeros_like(inner.dense)))
        yield _at_sent(rank, done, inner)
    kept = np.where(rank.candidates.recompute == RECOMPUTE.index("none"), ffn_part, 0.0)
    again = work - np.where(rank.candidates.recompute > 0, ffn_part, 0.0)
    cast = rank.stack.gathered * standing.casts(rank)
    beside = again + rank.beside_norm
    yield _backward(rank, done, standing.activations_kept(rank, done) - kept, beside, inner, -cast * inner.whole)
    end = standing.activations_kept(rank, done + 1)
    yield _backward(rank, done, end, rank.beside_norm, rank.block, -cast * rank.block.whole)


def _casting(rank: Rank, done: Floats) -> Held:
    """At the end of a block whose weights were copies: the last of their gradients as it becomes its master's, and the
    raw ones of the root. Shared experts come behind the others."""
    copies, size = standing.casts(rank), rank.stack.gradients * rank.trained
    made = activations.compute_bytes(rank.workload) * rank.trained
    down, _ = _of_feed_forward(rank)
    waiting = np.where(down.expert > 0, down.dense, 0.0)
    late = standing.late_root(rank).whole
    blocks = (done + 1) * rank.block.whole - waiting
    last = _one_weight(down)
    stands = standing.accumulating(rank) | standing.for_good(rank)
    gradients = size * np.where(stands, rank.whole.whole, blocks)
    raw = made * (late + waiting + last) + np.where(stands, size * last, 0.0)
    return _held(
        rank, gradients=np.where(copies, gradients, 0.0), activations=standing.activations_kept(rank, done + 1),
        communication=_messages(rank, True), temporaries=np.where(copies, raw + standing.hidden(rank), 0.0),
        gathered=standing.copied(rank, done + 1, 0.0, standing.losses_waiting(rank)),
    )  # fmt: skip


def _first_reduced(rank: Rank) -> Held:
    """Behind the first block of a backward, as its gradients are laid into the buffer that reduces them; its weights
    are let go. Behind others there is less: that buffer takes the place of the one before.

    Of two micro-batches under zero 2 the first lets no weights go, and has no shares of gradients yet.
    """
    c, stack, first = rank.candidates, rank.stack, np.zeros(len(rank.candidates))
    reduces = ((c.zero >= 2) | ((c.zero == 1) & (c.accumulation == 1))) & (c.pp == 1) & standing.gathers(rank)
    gradients, moving, raw = _gradients(rank, first, rank.block)
    weights, shares = (
        standing.gathered(rank, 0.0) - standing.let_go(rank, first + 1),
        stack.gradients * rank.whole.share(rank.shards),
    )
    sooner = (c.zero == 2) & (c.accumulation == 2) & (stack.gathered * rank.block.whole > shares)
    return _held(
        rank, gradients=np.where(reduces, gradients - np.where(sooner, shares * rank.trained, 0.0), 0.0),
        gathered=np.where(sooner, standing.gathered(rank, 0.0), weights),
        activations=standing.activations_kept(rank, first + 1),
        communication=np.where(
            reduces, moving - _still_reducing(rank) + stack.reduced * rank.trained * rank.block.whole, 0.0
        ),
        temporaries=np.where(reduces, raw + standing.hidden(rank), 0.0),
    )  # fmt: skip


def _at_returned(rank: Rank, done: Floats, shared: Numbers) -> Held:
    """Where what experts gave goes back; `shared` experts have gone before."""
    kept = standing.activations_kept(rank, done)
    copies = -rank.stack.gathered * standing.casts(rank) * shared.whole
    return _backward(rank, done, kept, rank.again + rank.beside_returned, shared, copies)


def _at_sent(rank: Rank, done: Floats, inner: Numbers) -> Held:
    """At the end of experts' last product in a backward: all gradients of their weights are there."""
    none = rank.candidates.recompute == RECOMPUTE.index("none")
    kept = standing.activations_kept(rank, done) - np.where(none, rank.inner, 0.0)
    again = rank.again - np.where(none, 0.0, rank.inner)
    cast = rank.stack.gathered * standing.casts(rank)
    down, _ = _of_feed_forward(rank)
    return _backward(rank, done, kept, again + rank.beside_sent, inner, -cast * inner.whole, _one_weight(down))


def _one_weight(down: Numbers) -> Floats:
    """Numbers of one weight of a feed-forward: of all experts the projection down, where there are some."""
    return np.where(down.expert > 0, down.expert, down.dense)


def _at_down(rank: Rank, down: Numbers) -> tuple[Floats, Floats]:
    """Bytes beside what is kept at the fullest moment around the projection down, and of copies that are gone there.

    Behind it what it read is gone and gradients of gate and up are there. Where its weight was a copy, that is gone
    then too: before, the gradient of what it read stands beside all, and the stream's, whole with sequence parallel.
    """
    behind, c, arch = rank.beside_ffn, rank.candidates, rank.workload.arch
    if arch.experts is not None and arch.moe_layers and rank.stack.ours:
        return _at_experts_down(rank, arch.experts)
    gone = np.where(standing.casts(rank) & (arch.experts is None), rank.stack.gathered * down.whole, 0.0)
    stream, size = standing.hidden(rank), activations.compute_bytes(rank.workload)
    width = size * rank.tokens * arch.ffn_size / c.tp
    whole = np.where(c.sequence_parallel, stream * c.tp, 0.0)
    before = width + stream + whole
    sooner = (gone > 0) & (before >= behind - gone)
    return np.where(sooner, before, behind), np.where(sooner, 0.0, gone)


def _at_experts_down(rank: Rank, experts: Experts) -> tuple[Floats, Floats]:
    """As _at_down. Before, what came back has given place to its gradient; that of what was read stands beside all."""
    arch, behind = rank.workload.arch, rank.beside_ffn
    width, size = experts.ffn_size, activations.compute_bytes(rank.workload)
    more = arch.hidden_size + width - (2 if arch.gated_ffn else 1) * width
    before = behind + size * rank.tokens * experts.per_token * more / rank.candidates.tp
    gone = np.where(standing.casts(rank), rank.stack.gathered * rank.block.expert / (3 if arch.gated_ffn else 2), 0.0)
    # Where a weight's gradient is added to one that stands, it is there for this moment alone.
    adds = (
        (rank.candidates.zero < 2) & (standing.accumulating(rank) | standing.for_good(rank)) & _in_masters_dtype(rank)
    )
    sooner = adds | (before >= behind - gone)
    return np.where(sooner, before, behind), np.where(sooner, 0.0, gone)


def _in_masters_dtype(rank: Rank) -> bool:
    """Whether gradients are made in the dtype in which they are kept; others' kernels may add them where they lie."""
    return rank.stack.ours and activations.compute_bytes(rank.workload) == rank.stack.gradients


@once
def _of_feed_forward(rank: Rank) -> tuple[Numbers, Numbers]:
    """Of a block: the projection down, whose gradient is made first, and all of the feed-forward."""
    arch, tp = rank.workload.arch, rank.candidates.tp
    inner = arch.shared_expert_parameters() if arch.moe_layers else arch.ffn_parameters()
    whole = Numbers(np.asarray(inner / tp), rank.block.expert)
    down = whole.times(1 / (3 if arch.gated_ffn else 2))
    # In this engine shared experts go back before the others.
    return Numbers(whole.dense, down.expert) if arch.moe_layers and rank.stack.ours else down, whole


def _backward(
    rank: Rank,
    done: Floats,
    kept: Floats,
    beside: Floats,
    current: Numbers,
    copies: Floats | float = 0.0,
    one: Floats | float = 0.0,
) -> Held:
    """`current`: of the block in backward, the numbers whose gradients are made; `one`: of the weight whose gradient is
    just made. `copies`: bytes of them more."""
    gradients, moving, raw = _gradients(rank, done, current, one)
    gathered = (
        standing.gathered(rank, 1.0)
        - standing.let_go(rank, done)
        + standing.copied(rank, done, 1.0, standing.losses_waiting(rank))
        + copies
    )
    return _held(
        rank, gradients=gradients, gathered=gathered, activations=kept,
        communication=_messages(rank, True) + moving, temporaries=beside + raw,
    )  # fmt: skip


def _gradients(rank: Rank, done: Floats, current: Numbers, one: Floats | float = 0.0) -> tuple[Floats, Floats, Floats]:
    """Bytes of gradients; of the buffers that gather the next block and reduce the one before; and of raw gradients.

    Raw: of copies, cast into the masters' gradients when their block is done (those made before all blocks, the
    root's, at the very end); of a tied weight, whose other use has a gradient too; and without copies of `one` weight,
    before it is added to a gradient that stands.
    """
    stack, c = rank.stack, rank.candidates
    made = activations.compute_bytes(rank.workload) * rank.trained
    size, late = stack.gradients * rank.trained, standing.late_root(rank).whole
    reduces = (c.zero >= 2) | ((c.zero == 1) & (stack.weights == 0))
    done_numbers, copies = rank.block.times(done), standing.casts(rank)
    stands, new = standing.accumulating(rank) | standing.for_good(rank), late + current.whole
    shares = np.where(standing.accumulating(rank), rank.whole.share(rank.shards), done_numbers.share(rank.shards))
    twice = np.where(rank.first & rank.last & rank.workload.arch.tied_embeddings, late, 0.0)
    sharded = size * shares * standing.gradients_here(rank) + made * (new - twice)
    adds = made * np.where(copies, 0.0, one) if _in_masters_dtype(rank) else 0.0
    whole = np.where(
        stands, size * rank.whole.whole + adds, size * (done_numbers.whole + np.where(copies, 0.0, new)),
    ) if size else made * current.whole  # fmt: skip
    raw = made * np.where(reduces, twice, np.where(copies, new, 0.0))
    gathers_next = np.where(c.zero == 3, standing.block_bytes(rank) * _next_block(rank, done), 0.0)
    # Under zero 1 the last backward alone reduces: no more than one micro-batch is in flight there.
    now = reduces & ((c.zero >= 2) | (rank.flying <= 1))
    reduced = np.where((done > 0) & now, stack.reduced * rank.trained * rank.block.whole, 0.0)
    # In the last backward a block's gradients, once added up, give place to this rank's share.
    given = standing.last_backward(rank) * (done_numbers.whole - done_numbers.share(rank.shards))
    first_sharded = np.where(
        (c.zero == 1) & reduces & standing.accumulating(rank),
        # What is computed in the masters' dtype is added up where it is made.
        size * (rank.whole.whole - given) + made * (one if _in_masters_dtype(rank) else new - twice), sharded,
    )  # fmt: skip
    gradients = np.where(reduces, first_sharded, whole)
    # Under zero 2 a backward before the last one is the fullest: it lets no weights go.
    summed = _summed_over_copies(rank, done_numbers, np.where(c.zero == 2, 4, 3))
    reduced = np.where(done > 0, reduced, _still_reducing(rank)) + summed
    return gradients, reduced + np.where(standing.gathers(rank), gathers_next, 0.0), raw


def _next_block(rank: Rank, done: Floats) -> Floats:
    """Numbers of the block that goes back behind the one that does: behind the last one with experts a dense one."""
    arch, c = rank.workload.arch, rank.candidates
    if not (rank.stack.ours and arch.dense_layers and arch.moe_layers):
        return rank.block.whole
    return np.where((c.pp > 1) | (done + 1 < rank.sparse), rank.block.whole, rank.units.dense_block.whole)


def _summed_over_copies(rank: Rank, done: Numbers, whole_from: Counts | int) -> Floats:
    """With copies of sharded groups, what is summed over them stays until its block is reduced anew, or a step ends; of
    the first micro-batch it is the gradient itself. whole_from: how many micro-batches let all of it stand."""
    c, stays = rank.candidates, _sums_over_copies(rank)
    if stays is None:
        return np.zeros(len(c))
    numbers = np.where(c.accumulation >= whole_from, rank.whole.share(rank.shards), done.share(rank.shards))
    return np.where(stays, rank.stack.reduced * rank.trained * numbers, 0.0)


@once
def _sums_over_copies(rank: Rank) -> Flags | None:
    """Where gradients of sharded groups are summed over copies and added to those that stand; None where nowhere."""
    c = rank.candidates
    found = (c.dp_replicate > 1) & (c.zero >= 2) & standing.accumulating(rank)
    return np.asarray(found) if rank.stack.ours and found.any() else None


def _root_backward(rank: Rank) -> Held:
    """Behind all blocks of the last micro-batch: the root's gradients, and the buffer that reduces them."""
    stack, c = rank.stack, rank.candidates
    made, size = activations.compute_bytes(rank.workload) * rank.trained, stack.gradients * rank.trained
    root = standing.root_unit(rank).whole
    reduces = (c.zero >= 2) | ((c.zero == 1) & (stack.weights == 0))
    sharded = size * rank.whole.share(rank.shards) * standing.gradients_here(rank) + made * root
    cast = made * rank.units.embedding.whole * (rank.first | rank.last) if made < size else 0.0
    gradients = np.where(reduces, sharded, size * rank.whole.whole)
    return _held(
        rank, gradients=gradients, gathered=np.where(standing.gathers(rank), stack.gathered * root, 0.0),
        communication=np.where(reduces, stack.reduced * rank.trained * root, 0.0) + _messages(rank, True),
        temporaries=np.where(rank.first, 0.0, standing.hidden(rank)) + np.where(reduces, 0.0, cast),
    )  # fmt: skip


def _update(rank: Rank) -> Held:
    """In the optimizer's step."""
    size, c = rank.stack.gradients * rank.trained, rank.candidates
    whole, share = rank.whole.whole, rank.whole.share(rank.shards)
    gradients = size * np.where((c.zero == 0) | ((c.zero == 1) & standing.for_good(rank)), whole, share)
    return _held(rank, gradients=gradients * standing.gradients_here(rank), temporaries=stepping(rank))


def stepping(rank: Rank) -> Floats:
    """What the optimizer's step makes beside, where it runs on the device."""
    here = rank.candidates.offload == OFFLOAD.index("none")
    updated = np.where(rank.candidates.zero == 0, rank.whole.whole, rank.whole.share(rank.shards))
    return np.asarray(rank.stack.stepping * rank.trained * updated * here)
