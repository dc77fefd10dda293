"""How many (stage, micro-batch) pairs a pipeline's rank keeps at once: closed forms of plan/schedules.py's tables.

Tests hold every form against `most_in_flight` of the table itself. No torch.
Sources: 1F1B arXiv 2006.09503; interleaved arXiv 2104.04473; ZB-H1 and ZB-V arXiv 2401.10241;
DualPipeV, one more than ZB-V, read from its table.
"""

import numpy as np

from shardwise.cost.candidates import SCHEDULES, Candidates, Counts, Flags, in_a_v

_GPIPE, _ONE_F_ONE_B, _INTERLEAVED, _INTERLEAVED_ZB, _ZBV, _DUAL_V = (SCHEDULES.index(name) for name in SCHEDULES[1:])


def pairs_in_flight(candidates: Candidates, place: Counts) -> Counts:
    """The most pairs whose activations rank `place` of the pipeline keeps at one time. Shapes: [n], [n] -> [n]."""
    c = candidates
    micros, per_rank = np.maximum(c.accumulation, 1), c.stages_per_rank
    hops = c.pp - 1 - place
    per_round = micros // np.maximum(1, micros // c.pp)
    earlier = (per_rank - 1) * per_round
    most = np.select(
        [c.schedule == _GPIPE, c.schedule == _ONE_F_ONE_B, c.schedule == _INTERLEAVED,
         c.schedule == _INTERLEAVED_ZB, c.schedule == _ZBV, c.schedule == _DUAL_V],
        # Zero bubble keeps a micro-batch for its weights `place` backwards longer, which fills what 1F1B has left.
        [micros, hops + 1, earlier + 2 * hops + 1,
         earlier + c.pp, np.minimum(2 * c.pp, micros + place + 1), 2 * c.pp + 1],
        1,
    )  # fmt: skip
    return np.asarray(np.minimum(most, micros * np.where(c.pp > 1, per_rank, 1)))


def pairs_waiting(candidates: Candidates, place: Counts) -> tuple[tuple[Counts, Counts], tuple[Counts, Counts]]:
    """Pairs kept, and of these the ones whose weights' half is still to come, at the two moments that can be fullest:
    the most pairs at all; and under zbv, once its ranks alternate, the most that wait. Shapes: 2 x 2 x [n].
    """
    c = candidates
    flying, micros = pairs_in_flight(c, place), np.maximum(c.accumulation, 1)
    # A first stage has no input's half: its whole backward comes with the weights.
    alone = (place == 0) & (c.stages_per_rank == 1)
    late = np.select([c.schedule == _INTERLEAVED_ZB, c.schedule == _ZBV], [np.where(alone, 0, place + 1), 1], 0)
    late = np.minimum(late, flying)
    folds = (c.schedule == _ZBV) & (micros > c.pp) & (place > 0)
    # Exact from 2 pp - 1 micro-batches on, and no fewer below.
    later = np.minimum(2 * place + 1, 2 * (micros - c.pp) + 1)
    then = np.minimum(c.pp + place, later + c.pp - 1 - place)
    return (flying, late), (np.where(folds, then, flying), np.where(folds, later, late))


def layers_at(candidates: Candidates, place: Counts, layers: int) -> Counts:
    """Blocks of all the stages of rank `place`, as schedules.stage_blocks cuts them. Shapes: [n], [n] -> [n].

    Fewer blocks than stages: those that there are, on the first stages.
    """
    c = candidates
    size, longer = np.divmod(layers, c.stages)
    # Stages place, place + pp, ...; in a V place and its mirror at the other end.
    interleaved = np.clip(-(-(longer - place) // c.pp), 0, c.stages_per_rank)
    mirrored = (place < longer).astype(np.int64) + (2 * c.pp - 1 - place < longer)
    return c.stages_per_rank * size + np.where(_in_a_v(c), mirrored, interleaved)


def dense_layers_at(candidates: Candidates, place: Counts, layers: int, dense: int) -> Counts:
    """Of those blocks the ones among the model's first `dense`. Shapes: [n], [n] -> [n]."""
    c = candidates
    if dense >= layers:
        return layers_at(c, place, layers)
    found = np.zeros(len(c), np.int64)
    if not dense:
        return found
    size, longer = np.divmod(layers, c.stages)
    for turn in range(int(c.stages_per_rank.max(initial=1))):
        mirrored = _in_a_v(c) & (turn % 2 == 1)
        stage = np.where(mirrored, 2 * c.pp - 1 - place, place + turn * c.pp)
        start = stage * size + np.minimum(stage, longer)
        end = start + size + (stage < longer)
        held = np.clip(np.minimum(end, dense) - start, 0, None)
        found += np.where(turn < c.stages_per_rank, held, 0)
    return found


def holds_first(place: Counts) -> Flags:
    """Whether the rank has the embedding."""
    return np.asarray(place == 0)


def holds_last(candidates: Candidates, place: Counts) -> Flags:
    """Whether the rank has the head: the last one, and in a V the first."""
    return np.asarray(place == np.where(_in_a_v(candidates), 0, candidates.pp - 1))


def _in_a_v(candidates: Candidates) -> Flags:
    return in_a_v(candidates.schedule)
