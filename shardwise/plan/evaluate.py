"""Rows of the space as Choices: each with its decision, its Estimate, and why the engine does not run it. No torch."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardwise.plan import choice, engine, space
from shardwise.plan.bounds import Reals
from shardwise.plan.choice import Choice
from shardwise.plan.estimate import Estimate, Interval
from shardwise.plan.search import CostModel, MemoryParts, candidates
from shardwise.plan.space import Table
from shardwise.plan.subject import Subject


def choices(subject: Subject, model: CostModel, table: Table) -> tuple[Choice, ...]:
    """The plans of these rows, in their order, whether they fit or not."""
    if not table:
        return ()
    estimates = estimate(subject, model, table)
    found = []
    for index, one in enumerate(estimates):
        row = {name: int(table[name][index]) for name in (*choice.COLUMNS, "data_parallel")}
        decided = choice.decision(row, subject.workload.global_batch, subject.workload.precision)
        found.append(Choice(decided, one, (*subject.planned_only, *engine.reasons(decided, subject.workload.arch))))
    return tuple(found)


def estimate(subject: Subject, model: CostModel, table: Table) -> list[Estimate]:
    """What each row is predicted to take."""
    workload, cluster, rows = subject.workload, subject.cluster, candidates(table)
    memory, step = model.memory(workload, cluster, rows), model.step(workload, cluster, rows)
    found = []
    for index in range(len(rows)):
        ends = (float(step.low[index]), float(step.high[index]))
        parts = {name: float(part[index]) for name, part in step.parts.items()}
        found.append(
            as_estimate(subject, float(step.seconds[index]), ends, parts, _bytes(memory, index, subject.limit))
        )
    return found


class Bytes(NamedTuple):
    """Bytes of one rank's device at its peak, by part; the ends of their interval; and how many it may use."""

    parts: dict[str, float]
    total: float
    interval: Interval
    limit: float


def _bytes(memory: MemoryParts, index: int, limit: float) -> Bytes:
    parts = {name: float(part[index]) for name, part in memory.parts.items()}
    ends = (float(memory.low[index]), float(memory.high[index]))
    return Bytes(parts, float(memory.device[index]), ends, float(limit))


def as_estimate(subject: Subject, seconds: float, ends: Interval, parts: dict[str, float], memory: Bytes) -> Estimate:
    """The Estimate of such seconds and bytes."""
    speed = _Speed.of(subject)
    tokens, (slow, fast) = speed.tokens(seconds), (speed.tokens(ends[1]), speed.tokens(ends[0]))
    return Estimate(
        step_seconds=seconds,
        step_seconds_interval=ends,
        tokens_per_second_per_gpu=tokens,
        tokens_per_second_per_gpu_interval=(slow, fast),
        mfu=speed.utilization(tokens),
        mfu_interval=speed.between(slow, fast),
        memory_bytes=memory.total,
        memory_bytes_interval=memory.interval,
        memory_limit_bytes=memory.limit,
        memory=memory.parts,
        seconds=parts,
    )


def of_ranks(subject: Subject, row: Mapping[str, int]) -> list[Bytes]:
    """What each rank of a plan's pipeline holds at its own peak."""
    from shardwise.cost.memory import by_rank

    memory = by_rank(subject.workload, subject.cluster, candidates(choice.table([dict(row)])))
    return [_bytes(memory, rank, subject.limit) for rank in range(row["pp"])]


def needed(subject: Subject, model: CostModel, table: Table) -> Reals:
    """Bytes with which each row fits for sure: the upper end of the interval."""
    return model.memory(subject.workload, subject.cluster, candidates(table)).high


class _Speed(NamedTuple):
    """What turns seconds of a step into tokens a second and device, and those into a utilisation."""

    tokens_per_device: float
    flops_per_token: float
    peak: float | None

    @classmethod
    def of(cls, subject: Subject) -> "_Speed":
        workload = subject.workload
        flops = workload.arch.flops_per_token(workload.sequence_length)
        return cls(workload.tokens / subject.task.world, flops, subject.peak_flops_per_second)

    def tokens(self, seconds: float) -> float:
        return self.tokens_per_device / seconds

    def utilization(self, tokens: float) -> float | None:
        return None if self.peak is None else self.flops_per_token * tokens / self.peak

    def between(self, slow: float, fast: float) -> Interval | None:
        low, high = self.utilization(slow), self.utilization(fast)
        return None if low is None or high is None else (low, high)


def nearest(subject: Subject, model: CostModel) -> Table:
    """The valid plan that needs the fewest bytes, whether it fits or not, as a table of one row; empty where none is.

    Looked for where it lies: the smallest micro-batches of each mesh, all that may be recomputed and moved to the host.
    """
    task, cores = subject.task, space.cores(subject.task)
    order = np.lexsort((-cores["sequence_parallel"], cores["compiled"], cores["micro_batch"], -cores["recompute"]))
    least: dict[tuple[int, ...], int] = {}
    for index in order:
        least.setdefault(tuple(int(cores[name][index]) for name in ("pp", "tp", "cp", "ep")), int(index))
    best, fewest = Table(), np.inf
    for index in least.values():
        plans = space.with_splits(task, space.with_pipelines(task, space.rows(cores, np.array([index]))))
        if len(plans["pp"]):
            plans = space.rows(plans, plans["offload"] == plans["offload"].max())
            bytes_each = needed(subject, model, plans)
            if bytes_each.min() < fewest:
                fewest, best = float(bytes_each.min()), space.rows(plans, np.array([np.argmin(bytes_each)]))
    return best
