"""Predictions for rows of measured runs: rows of one workload and cluster go through a model together. No torch."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.candidates import Candidates
from shardwise.cost.published import Row
from shardwise.cost.published_engine import MeasuredRank, MemoryKind
from shardwise.cost.workload import Workload
from shardwise.errors import ShardwiseError
from shardwise.inputs.hardware import Cluster

Floats = NDArray[np.float64]

# What a row does not say widens its interval: standard deviations of the logarithm, of time and of memory.
WIDER: Mapping[str, tuple[float, float]] = {
    "recompute": (0.10, 0.20),
    "interconnect": (0.10, 0.0),
    "attention": (0.03, 0.05),
    "seq_parallel": (0.03, 0.10),
    "vocab": (0.03, 0.05),
    "heads": (0.05, 0.02),
    "optimizer": (0.0, 0.10),
    "stack": (0.0, 0.10),
    "lora_rank": (0.02, 0.03),
    "latent": (0.05, 0.05),
    "ffn": (0.10, 0.10),
    "memory_kind": (0.0, 0.05),
    "zero_stage_or_fsdp": (0.05, 0.20),
    "dp_shard": (0.03, 0.10),
    "micro_batch": (0.10, 0.20),
    "global_batch": (0.20, 0.0),
    "dp": (0.10, 0.10),
    "n_gpus": (0.05, 0.05),
    "params_b": (0.05, 0.05),
    "noise": (0.20, 0.0),
    "test_node": (0.50, 0.0),
    "activation_offload": (0.05, 0.15),
    "seq_len": (0.30, 0.20),
}
# The ends of a central 80 % of a normal distribution, in standard deviations.
EIGHTY_PERCENT = 1.2816


@dataclass(frozen=True)
class Interval:
    """Values and the ends of their 80 % intervals, arrays of one length; NaN where there is no prediction."""

    value: Floats
    low: Floats
    high: Floats

    @classmethod
    def absent(cls, count: int) -> Self:
        """Of `count` rows, none predicted."""
        return cls(np.full(count, np.nan), np.full(count, np.nan), np.full(count, np.nan))

    def put(self, places: list[int], other: "Interval") -> None:
        """Write the other's values into these places."""
        self.value[places], self.low[places], self.high[places] = other.value, other.low, other.high

    def widened(self, deviations: Floats) -> "Interval":
        """With these deviations of the logarithm added to either side's own, as independent ones add."""
        extra = EIGHTY_PERCENT * deviations
        below = np.hypot(np.log(self.value / self.low), extra)
        above = np.hypot(np.log(self.high / self.value), extra)
        return Interval(self.value, self.value * np.exp(-below), self.value * np.exp(above))


# A model of a step's seconds; and one of memory, which gives bytes of the kind that was measured, on the rank that was
# measured, and all that the device must hold on its fullest rank.
TimeModel = Callable[[Workload, Cluster, Candidates], Interval]
MemoryModel = Callable[[Workload, Cluster, Candidates, MemoryKind, MeasuredRank], tuple[Interval, Interval]]


@dataclass(frozen=True)
class Predictions:
    """One a row: seconds of a step, bytes as measured, bytes of the whole device. problems: why a row was refused."""

    seconds: Interval
    held: Interval
    device: Interval
    problems: Mapping[int, str]


class Block(NamedTuple):
    """Rows that differ in their candidates alone, and their places among all rows."""

    workload: Workload
    cluster: Cluster
    kind: MemoryKind
    rank: MeasuredRank
    places: list[int]
    candidates: Candidates


def together(each: Sequence[Candidates]) -> Candidates:
    """Candidates one after the other."""
    names = [field.name for field in fields(Candidates)]
    return Candidates(**{name: np.concatenate([getattr(one, name) for one in each]) for name in names})


def predict(rows: Sequence[Row], time: TimeModel, memory: MemoryModel) -> Predictions:
    """What the models say of every row that has a workload."""
    seconds, held, device = (Interval.absent(len(rows)) for _ in range(3))
    problems: dict[int, str] = {}
    for block in blocks(rows):
        try:
            seconds.put(block.places, time(block.workload, block.cluster, block.candidates))
            asked = memory(block.workload, block.cluster, block.candidates, block.kind, block.rank)
            held.put(block.places, asked[0])
            device.put(block.places, asked[1])
        except ShardwiseError as error:
            problems |= dict.fromkeys(block.places, error.what)
    of_time, of_memory = _unsaid(rows)
    return Predictions(seconds.widened(of_time), held.widened(of_memory), device.widened(of_memory), problems)


def blocks(rows: Sequence[Row]) -> Iterator[Block]:
    """Usable rows by workload and cluster: one call of a model for each."""
    alike: dict[tuple[Workload, Cluster, MemoryKind, MeasuredRank], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.workload is not None and row.cluster is not None:
            alike[row.workload, row.cluster, row.memory_kind, row.measured_rank].append(place)
    for (workload, cluster, kind, rank), places in alike.items():
        candidates = together([one for place in places if (one := rows[place].candidate) is not None])
        yield Block(workload, cluster, kind, rank, places, candidates)


def _unsaid(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Deviations of the logarithm for all that each row does not say, of time and of memory."""
    sizes = [[WIDER.get(name, (0.0, 0.0)) for name in row.unknown] for row in rows]
    both = np.array([np.hypot.reduce(np.array([(0.0, 0.0), *each]), axis=0) for each in sizes]).reshape(-1, 2)
    return both[:, 0], both[:, 1]
