"""How long a pipeline's ranks wait: closed forms of what the tables in plan/schedules.py show. No torch."""

import numpy as np

from shardwise.cost.candidates import SCHEDULES, V_SHAPED, Counts
from shardwise.cost.compute import Floats

INTERLEAVED, ZERO_BUBBLE = (SCHEDULES.index(name) for name in ("interleaved-1f1b", "interleaved-zb"))


def bubble(schedule: Counts, pp: Counts, stages_per_rank: Counts, micro_batches: Counts) -> Floats:
    """The waiting of a rank in a step, counted in its own micro-batches (forward and backward through all its stages).

    gpipe and 1f1b wait for pp - 1 of them (arXiv 2006.09503). Interleaved over v stages a rank for (pp - 1) / v (arXiv
    2104.04473), and where there are fewer than pp for those that are not there. With the weights' gradients put off,
    a third of either is left, and half of that in a V (arXiv 2401.10241; DualPipeV's too, as its pairs do not overlap
    here), once there are enough micro-batches; one alone passes all ranks forward and back: two thirds of the work of
    each. tests/unit/test_bubble.py compares.
    """
    p, v, m = (np.asarray(column, dtype=np.float64) for column in (pp, stages_per_rank, micro_batches))
    first = 2 / 3 * p + 1 / (3 * v) - 1
    late = np.maximum((p - 1) / (3 * v), first - (m - 1) * (1 - 2 / (3 * v)))
    in_v = np.maximum((p - 1) / 6, 2 / 3 * (p - 1) - (m - 1) / 3)
    interleaved = np.maximum(0.0, p - m) + (np.minimum(m, p) - 1) / v
    kinds = [schedule == INTERLEAVED, schedule == ZERO_BUBBLE, np.isin(schedule, V_SHAPED)]
    return np.where(p == 1, 0.0, np.select(kinds, [interleaved, late, in_v], p - 1))
