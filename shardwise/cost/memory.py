"""Bytes that a plan's fullest rank holds at its peak, by category, for many plans at once.

A step has a few moments at which memory can be highest; each is added up for the pipeline's first, second and last
rank, and the highest counts. `moments` says what is held when. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from shardwise.cost.calibration import MemoryConstants, memory_constants
from shardwise.cost.candidates import Candidates, Counts, Flags
from shardwise.cost.moments import CATEGORIES, Held, moments, stepping
from shardwise.cost.published_engine import MeasuredRank, MemoryKind
from shardwise.cost.standing import Floats, Rank
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of the fullest rank. Shapes: [n] each.

    parameters, gradients, states: at rest and kept. gathered: parameters made whole or cast for use. activations: kept
    for backward. logits: of the loss. communication: buffers of collectives and messages. temporaries: results on their
    way, and what recompute makes again. allocator: reserved beyond that. context: the driver's, kernels' and NCCL's.
    below, above: the ends of an 80 % interval, as factors.
    """

    parameters: Floats
    gradients: Floats
    states: Floats
    gathered: Floats
    activations: Floats
    logits: Floats
    communication: Floats
    temporaries: Floats
    allocator: Floats
    context: Floats
    below: Floats
    above: Floats

    @property
    def parts(self) -> dict[str, Floats]:
        """By name; they sum to `device`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("below", "above")}

    @property
    def logical(self) -> Floats:
        """Bytes of live tensors: what torch calls allocated."""
        return np.asarray(sum(getattr(self, name) for name in CATEGORIES))

    @property
    def reserved(self) -> Floats:
        """What the caching allocator holds."""
        return np.asarray(self.logical + self.allocator)

    @property
    def device(self) -> Floats:
        """What nvidia-smi shows of the process."""
        return np.asarray(self.reserved + self.context)

    def of_kind(self, kind: MemoryKind) -> Floats:
        """The bytes that a measurement of that kind sees."""
        return {"allocated": self.logical, "reserved": self.reserved, "device": self.device}[kind]

    @property
    def low(self) -> Floats:
        """Of the device, the lower end of the interval."""
        return np.asarray(self.device * self.below)

    @property
    def high(self) -> Floats:
        """Of the device, the upper end of the interval."""
        return np.asarray(self.device * self.above)


COMMITTED = memory_constants()


def memory(
    workload: Workload, cluster: Cluster, candidates: Candidates, rank: MeasuredRank = "fullest",
    known: MemoryConstants = COMMITTED,
) -> Memory:  # fmt: skip
    """What each candidate holds; on the fullest rank, or on the first or the last of the pipeline.

    known: constants of what is reserved beyond tensors, and of the interval; a fit tries others than the committed.
    """
    return _around(_peak(workload, candidates, _places(candidates, rank)), cluster, candidates, known)


def by_rank(workload: Workload, cluster: Cluster, candidate: Candidates, known: MemoryConstants = COMMITTED) -> Memory:
    """What each rank of one candidate's pipeline holds at its own peak. Shapes: a row in, [pp] out."""
    pp = int(candidate.pp[0])
    ranks = candidate.where(np.zeros(pp, dtype=np.int64))
    return _around(_peak(workload, ranks, [np.arange(pp)]), cluster, ranks, known)


Peak = tuple[Held, Floats, Floats]


def _around(peak: Peak, cluster: Cluster, candidates: Candidates, known: MemoryConstants) -> Memory:
    """With what the allocator and the driver take beside tensors, and the interval."""
    held, total, flat = peak
    on_gpu = cluster.device.kind == "gpu"
    ranks = candidates.world
    context = known.context_bytes + np.where(ranks > 1, known.communicator_bytes, 0.0)
    groups = sum(
        (degree > 1).astype(np.float64) for degree in (candidates.tp, candidates.pp, candidates.cp, candidates.ep)
    )
    context = context + known.group_bytes * groups
    allocator = known.reserved_share * total + np.where(candidates.zero == 3, known.reserved_sharded, 0.0) * total
    allocator = allocator + flat
    spread = np.hypot(known.interval_base, known.interval_activations * (held[4] + held[5] + held[7]) / total)
    return Memory(
        **dict(zip(CATEGORIES, held, strict=True)),
        allocator=allocator * on_gpu,
        context=context * on_gpu,
        below=np.exp(-spread),
        above=np.exp(spread),
    )


def _peak(workload: Workload, candidates: Candidates, places: Sequence[Counts]) -> Peak:
    """Of the fullest of these ranks: the categories at its highest moment, [8, n], their sum, and the flat buffers that
    are reserved beyond it. `places`: ranks of the pipeline to look at; -1 where a candidate has none.

    What the optimizer's step makes flat finds no room in the holes that activations leave in the cache, which keeps
    both: torch.cuda's caching allocator joins no two segments.
    """
    best = np.zeros((len(CATEGORIES), len(candidates)))
    most, flat = np.full(len(candidates), -1.0), np.zeros(len(candidates))
    for place in places:
        rows = np.flatnonzero(place >= 0)
        if not len(rows):
            continue
        some = candidates if len(rows) == len(candidates) else candidates.where(rows)
        here = Rank.of(workload, some, place[rows])
        found, total, at_update = _highest(here)
        more = total > most[rows]
        best[:, rows] = np.where(more, found, best[:, rows])
        flat[rows] = np.where(more, np.where(at_update, 0.0, stepping(here)), flat[rows])
        most[rows] = np.where(more, total, most[rows])
    return best, most, flat


def _places(candidates: Candidates, rank: MeasuredRank) -> list[Counts]:
    """Ranks of the pipeline to look at; -1 where a candidate has no such rank, or it is known already."""
    pp = candidates.pp
    first, second, last = np.zeros_like(pp), np.where(pp > 2, 1, -1), np.where(pp > 1, pp - 1, -1)
    return {"fullest": [first, second, last], "first": [first], "last": [pp - 1]}[rank]


def _highest(rank: Rank) -> tuple[Held, Floats, Flags]:
    """The categories, their sum, and whether that is in the optimizer's step, which is the last of the moments."""
    best = most = None
    latest = np.zeros(len(rank.candidates), dtype=np.bool_)
    for held in moments(rank):
        total = held.sum(axis=0)
        if best is None or most is None:
            best, most = held, total
        else:
            latest = total > most
            np.copyto(best, held, where=latest)
            most = np.maximum(most, total)
    if best is None or most is None:
        raise ValueError("a step without moments")
    return best, most, latest
