"""The search: the best plans of the whole space, exactly, without writing most of it out. No torch.

Best first with bounds (plan/bounds.py), each cheaper than what it saves. A core's own arithmetic and what its cheapest
split adds at least bound how fast its plans can be; with a pipeline's bubble and transfers they can only be slower; the
bytes of the states that a split must keep and of a pipeline's samples say whether it can fit. Only splits whose bounds
let them in are written out, and what is left is asked of the cost model. Once the next bound is above the worst of the
best plans found, nothing that was not looked at can be among them: no limit cuts a search short.
tests/unit/test_search.py and test_search_costs.py hold it against the space written out.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.candidates import Candidates
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster
from shardwise.plan import bounds, engine, space
from shardwise.plan.bounds import Reals
from shardwise.plan.space import Column, Table
from shardwise.plan.subject import Subject

COLUMNS = tuple(field.name for field in fields(Candidates))
# The first looks are small: they find good plans, which spare most of the rest. Later ones are as large as caches like;
# none is so small that the calls themselves cost more than their rows.
FIRST_CORES, MOST_CORES, ROWS = 256, 8192, 8192
FIRST_PIPELINES, MOST_PIPELINES, FIRST_BYTES = 1024, 8192, 1024
ROUNDING = 1e-9
# What says how much data-parallel ranks have to send, and how much they compute meanwhile, but for a core's options.
BATCHED = ("pp", "tp", "cp", "ep", "data_parallel", "accumulation", "micro_batch")
# What says how many numbers a rank updates or moves to the host.
KEPT = ("pp", "tp", "cp", "ep", "dp_replicate", "dp_shard", "zero", "offload")
# Plans that differ in one of these are told as different; of those that agree in all, the best one.
DISTINCT = ("pp", "tp", "cp", "ep", "zero", "recompute", "offload")


class MemoryParts(bounds.HasParts, Protocol):
    """What `cost.memory.memory` answers: bytes of the fullest rank's device and the ends of their 80 % interval."""

    @property
    def device(self) -> Reals: ...
    @property
    def low(self) -> Reals: ...
    @property
    def high(self) -> Reals: ...


class StepParts(bounds.HasParts, Protocol):
    """What `cost.step.step` answers: seconds and the ends of their 80 % interval."""

    @property
    def seconds(self) -> Reals: ...
    @property
    def low(self) -> Reals: ...
    @property
    def high(self) -> Reals: ...


Floor = Callable[[Workload, Cluster, Candidates], Reals]


class CostModel(NamedTuple):
    """The functions that say what plans cost, and what a split adds to it at least.

    first_rank: memory of a pipeline's first rank alone. bytes_floor: how high the interval of a device's bytes goes at
    least, with so many bytes of live tensors.
    data_floor: of summing gradients and gathering weights; keeping_floor: of the optimizer and of offload.
    """

    memory: Callable[[Workload, Cluster, Candidates], MemoryParts]
    step: Callable[[Workload, Cluster, Candidates], StepParts]
    first_rank: Callable[[Workload, Cluster, Candidates], bounds.HasParts]
    bytes_floor: Callable[[Cluster, Reals], Reals]
    data_floor: Floor
    keeping_floor: Floor


class Ranked(NamedTuple):
    """Plans best first, distinct, at most `most`, none above `ceiling` seconds: of all, or of those that run."""

    table: Table
    seconds: Reals
    most: int
    ceiling: float = np.inf

    @property
    def worst(self) -> float:
        """What a plan must beat to come in."""
        return float(self.seconds[-1]) if len(self.seconds) >= self.most else self.ceiling


class Found(NamedTuple):
    """The best plans, of all and of those that the engine runs; how many plans were searched and how many costed."""

    best: Ranked
    running: Ranked
    searched: int
    costed: int


def search(subject: Subject, model: CostModel, top: int = 5, ceiling: float = np.inf) -> Found:
    """The `top` fastest plans that fit for sure, and the `top` of those that the engine runs; none above `ceiling`."""
    task, cores = subject.task, space.cores(subject.task)
    empty = Ranked({}, np.zeros(0), top, ceiling)
    found = Found(empty, empty, space.count(task, cores) if _length(cores) else 0, 0)
    if not found.searched:
        return found
    splits, cores["batch"] = _splits(subject, model, cores)
    cores["least"] = splits.least()[cores["batch"]]
    cores = space.rows(cores, np.isfinite(cores["least"]))
    if not _length(cores):
        return found
    cores["may_run"] = engine.may_run(cores, subject.task.arch) & subject.runs
    cores["own"] = _core_floors(subject, model, cores)
    cores["floor"] = cores["own"] + cores["least"]
    cores = space.rows(cores, np.argsort(cores["floor"], kind="stable"))
    for piece in _pieces(_length(cores)):
        some = _open(space.rows(cores, piece), found)
        if _length(some):
            found = _look_into(subject, model, some, splits, found)
        elif cores["floor"][piece.start] * (1 - ROUNDING) > _worst(subject, found):
            break
    return found


def _worst(subject: Subject, found: Found) -> float:
    """Above it nothing comes in any more."""
    return max(found.best.worst, found.running.worst if subject.runs else 0.0)


def _pieces(length: int) -> Iterator[slice]:
    start, size = 0, FIRST_CORES
    while start < length:
        yield slice(start, start + size)
        start, size = start + size, min(2 * size, MOST_CORES)


class _Splits(NamedTuple):
    """The splits of each batch on a mesh whose states fit: their columns, and `least`, seconds that they add at least.

    Batch after batch, each from `starts`, `counts` of them, in order of `least`.
    """

    table: Table
    starts: Column
    counts: Column

    def least(self) -> Reals:
        """Of each batch; infinite where no states fit."""
        found = np.full(len(self.starts), np.inf)
        some = self.counts > 0
        found[some] = self.table["least"][self.starts[some]]
        return found

    def within(self, pipelines: Table, ceiling: Reals) -> Table:
        """The plans of these pipelines whose `own` and the least of their split together are not above `ceiling`."""
        batch = pipelines["batch"]
        room = ceiling / (1 - ROUNDING) - pipelines["own"]
        counts = self._below(batch, room)
        index = np.repeat(np.arange(len(batch)), counts)
        within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = space.rows(self.table, self.starts[batch[index]] + within)
        plans = {**space.rows(pipelines, index), **chosen}
        return {**plans, "floor": plans["own"] + plans["least"]}

    def _below(self, batch: Column, room: Reals) -> Column:
        """How many of each batch's splits add no more than the room that there is: by halving, all at once."""
        low, high = np.zeros_like(batch), self.counts[batch]
        last = max(0, len(self.table["least"]) - 1)
        for _ in range(int(high.max(initial=0)).bit_length()):
            middle = (low + high) // 2
            under = self.table["least"][np.minimum(self.starts[batch] + middle, last)] <= room
            open_ = low < high
            low, high = np.where(open_ & under, middle + 1, low), np.where(open_ & ~under, middle, high)
        return low


def _splits(subject: Subject, model: CostModel, cores: Table) -> tuple[_Splits, Column]:
    """And the batch that each core has. Offload changes nothing of what is summed."""
    batches, batch = space.distinct(cores, BATCHED)
    length = _length(batches)
    table = space.with_numbered_splits(subject.task, {**batches, "batch": np.arange(length)})
    once = table["offload"] == table["offload"].min(initial=0)
    summed = _floor(subject, model.data_floor, space.rows(table, once))
    first = np.searchsorted(table["batch"][once], np.arange(length))
    table["least"] = summed[first[table["batch"]] + table["split"]]
    table = space.rows(table, _can_fit(subject, model, bounds.states_floor(subject.workload, table)))
    meshes, mesh = space.distinct(table, KEPT)
    table["least"] += _floor(subject, model.keeping_floor, meshes)[mesh]
    table = space.rows(table, np.lexsort((table["least"], table["batch"])))
    counts = np.bincount(table["batch"], minlength=length)
    columns = {name: table[name] for name in (*space.SPLIT, "least")}
    return _Splits(columns, np.cumsum(counts) - counts, counts), batch


def _floor(subject: Subject, floor: Floor, table: Table) -> Reals:
    """Of each row, a piece that caches like after another."""
    found = [floor(subject.workload, subject.cluster, candidates(piece)) for piece in _chunks(table)]
    return np.concatenate([np.zeros(0), *found])


def _core_floors(subject: Subject, model: CostModel, cores: Table) -> Reals:
    pieces = _chunks(cores)
    steps = [_step(subject, model, bounds.mean_rank(piece)) for piece in pieces]
    return np.concatenate([bounds.compute_floor(piece, one) for piece, one in zip(pieces, steps, strict=True)])


def _open(table: Table, found: Found) -> Table:
    """The rows whose bound lets them be among the best; sums in another order may differ in their last digits."""
    return space.rows(table, _fast_enough(table, table["floor"] * (1 - ROUNDING), found))


def _fast_enough(table: Table, seconds: Reals, found: Found) -> NDArray[np.bool_]:
    return np.asarray((seconds <= found.best.worst) | ((table["may_run"] != 0) & (seconds <= found.running.worst)))


def _look_into(subject: Subject, model: CostModel, cores: Table, splits: _Splits, found: Found) -> Found:
    """The plans of these cores: their pipelines in order of what they take without their split, then its splits."""
    table = space.with_pipelines(subject.task, cores)
    table["floor"] = bounds.pipeline_floor(table, table["own"]) + table["least"]
    table["may_run"] = engine.may_run(table, subject.task.arch) & (table["may_run"] != 0)
    table = _open(table, found)
    if not _length(table):
        return found
    pieces = [{**piece, "dp_replicate": piece["data_parallel"]} for piece in _chunks(table)]
    table["own"] = np.concatenate([bounds.without_split(_step(subject, model, piece)) for piece in pieces])
    table["floor"] = table["own"] + table["least"]
    table = space.rows(table, np.argsort(table["floor"], kind="stable"))
    start, size = 0, FIRST_PIPELINES
    while start < _length(table):
        some = _open(space.rows(table, slice(start, start + size)), found)
        start, size = start + size, min(2 * size, MOST_PIPELINES)
        if not _length(some):
            continue
        least_split = candidates(bounds.least_split(some))
        some["samples"] = bounds.samples_floor(model.first_rank(subject.workload, subject.cluster, least_split))
        some = space.rows(some, _can_fit(subject, model, some["samples"]))
        if _length(some):
            found = _look_at_splits(subject, model, some, splits, found)
    return found


def _look_at_splits(subject: Subject, model: CostModel, pipelines: Table, splits: _Splits, found: Found) -> Found:
    """The plans of these pipelines that their bounds let in, and that fit by what they hold at least."""
    running = np.where(pipelines["may_run"] != 0, found.running.worst, -np.inf)
    plans = splits.within(pipelines, np.maximum(found.best.worst, running))
    plans["may_run"] = engine.runs(plans, subject.task.arch) & (plans["may_run"] != 0)
    plans = _open(plans, found)
    least = plans["samples"] + bounds.least_states(subject.workload, plans)
    plans = space.rows(plans, _can_fit(subject, model, least))
    plans = space.rows(plans, np.argsort(plans["floor"], kind="stable"))
    for piece in _chunks(plans):
        some = _open(piece, found)
        if _length(some):
            found = _cost(subject, model, some, found)
    return found


def _cost(subject: Subject, model: CostModel, plans: Table, found: Found) -> Found:
    """The plans that fit, held against the best so far.

    Seconds are told sooner than bytes: bytes are asked of what is fast enough alone, the fastest first.
    """
    found = found._replace(costed=found.costed + _length(plans))
    seconds = _step(subject, model, plans).seconds
    plans, seconds = _chosen(plans, seconds, _fast_enough(plans, seconds, found))
    order = np.argsort(seconds, kind="stable")
    start, size = 0, FIRST_BYTES
    while start < len(order):
        some = order[start : start + size]
        start, size = start + size, 2 * size
        few, taken = _chosen(plans, seconds, some)
        few, taken = _chosen(few, taken, _fast_enough(few, taken, found))
        if len(taken):
            found = _rank(subject, model, few, taken, found)
    return found


def _rank(subject: Subject, model: CostModel, plans: Table, seconds: Reals, found: Found) -> Found:
    """With those of these plans that fit for sure."""
    memory = _memory(subject, model, plans)
    plans, seconds = _chosen({**plans, "bytes": memory.device}, seconds, memory.high <= subject.limit)
    return found._replace(
        best=_ranked(found.best, plans, seconds),
        running=_ranked(found.running, *_chosen(plans, seconds, plans["may_run"] != 0)),
    )


def _ranked(ranked: Ranked, plans: Table, seconds: Reals) -> Ranked:
    """With these plans, where they are among the best."""
    plans, seconds = _chosen(plans, seconds, seconds <= ranked.worst)
    if not len(seconds):
        return ranked
    names = [*COLUMNS, "data_parallel", "may_run", "bytes"]
    joined = {
        name: np.concatenate([ranked.table[name], plans[name]]) if ranked.table else plans[name] for name in names
    }
    together = np.concatenate([ranked.seconds, seconds])
    # Of equally fast plans one that runs, then the one with the least memory, then the plainest.
    plain = [joined[name] for name in ("accumulation", "stages_per_rank", "bucket_bytes", "dp_replicate", "zero")]
    order = np.lexsort((*plain, joined["bytes"], joined["may_run"] == 0, together))
    code = np.zeros(len(order), dtype=np.int64)
    for name in DISTINCT:
        code = code * (int(joined[name].max()) + 1) + joined[name][order]
    first = np.sort(np.unique(code, return_index=True)[1])[: ranked.most]
    return ranked._replace(table=space.rows(joined, order[first]), seconds=together[order[first]])


def candidates(table: Table) -> Candidates:
    """The rows as the cost model takes them."""
    known = {name: table[name] for name in COLUMNS if name in table}
    return Candidates.of(**known)


def _step(subject: Subject, model: CostModel, table: Table) -> StepParts:
    return model.step(subject.workload, subject.cluster, candidates(table))


def _can_fit(subject: Subject, model: CostModel, live: Reals) -> NDArray[np.bool_]:
    """Whether a rank that holds so many bytes or more may fit for sure."""
    return np.asarray(model.bytes_floor(subject.cluster, live) * (1 - ROUNDING) <= subject.limit)


def _memory(subject: Subject, model: CostModel, table: Table) -> MemoryParts:
    return model.memory(subject.workload, subject.cluster, candidates(table))


def _chosen(table: Table, seconds: Reals, keep: NDArray[np.bool_] | Column) -> tuple[Table, Reals]:
    return space.rows(table, keep), seconds[keep]


def _chunks(table: Table) -> list[Table]:
    return [space.rows(table, slice(at, at + ROWS)) for at in range(0, _length(table), ROWS)]


def _length(table: Table) -> int:
    return len(table["pp"])
