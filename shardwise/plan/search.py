"""The search: the best plans of the whole space, exactly, without writing most of it out. No torch.

Best first with bounds (plan/bounds.py), each cheaper than what it saves. A core's own arithmetic and what data parallel
adds at least bound how fast its plans can be; with a pipeline's bubble and transfers they can only be slower; the
bytes of a pipeline's samples and of the states that a split must keep say whether it can fit. What is left is asked of
the cost model. Once the next bound is above the worst of the best plans found, nothing that was not looked at can be
among them. tests/unit/test_search.py and test_search_costs.py hold it against the space written out.
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
# The first look is small: it finds a good plan, which spares most of the rest. Later ones are as large as caches like.
FIRST_CORES, MOST_CORES, ROWS = 32, 512, 8192
ROUNDING = 1e-9
# What says how much data-parallel ranks have to send, and how much they compute meanwhile, but for a core's options.
BATCHED = ("pp", "tp", "cp", "ep", "data_parallel", "accumulation", "micro_batch")
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


class CostModel(NamedTuple):
    """The functions that say what plans cost, what data parallelism adds at least, and what one rank holds for sure."""

    memory: Callable[[Workload, Cluster, Candidates], MemoryParts]
    step: Callable[[Workload, Cluster, Candidates], StepParts]
    data_floor: Callable[[Workload, Cluster, Candidates], Reals]
    first_rank: Callable[[Workload, Cluster, Candidates], bounds.HasParts]


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
    floors, cores["batch"] = _data_floors(subject, model, cores)
    cores["may_run"] = engine.may_run(cores) & subject.runs
    cores["own"] = _core_floors(subject, model, cores)
    cores["data"] = floors.least[cores["batch"]]
    cores["floor"] = cores["own"] + cores["data"]
    cores = space.rows(cores, np.argsort(cores["floor"], kind="stable"))
    for piece in _pieces(_length(cores)):
        some = _open(space.rows(cores, piece), found)
        if _length(some):
            found = _look_into(subject, model, some, floors, found)
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


class _DataFloors(NamedTuple):
    """Seconds that data parallelism adds at least, for each split of each batch on a mesh; where each batch's start."""

    seconds: Reals
    starts: Column
    least: Reals


def _data_floors(subject: Subject, model: CostModel, cores: Table) -> tuple[_DataFloors, Column]:
    """And the batch that each core has. Offload changes nothing of it."""
    batches, batch = space.distinct(cores, BATCHED)
    table = space.with_numbered_splits(subject.task, {**batches, "batch": np.arange(_length(batches))})
    table = space.rows(table, table["offload"] == table["offload"].min(initial=0))
    pieces = [model.data_floor(subject.workload, subject.cluster, candidates(piece)) for piece in _chunks(table)]
    seconds = np.concatenate(pieces)
    counts = np.bincount(table["batch"], minlength=_length(batches))
    starts = np.cumsum(counts) - counts
    least = np.full(_length(batches), np.inf)
    np.minimum.at(least, table["batch"], seconds)
    return _DataFloors(seconds, starts, least), batch


def _core_floors(subject: Subject, model: CostModel, cores: Table) -> Reals:
    pieces = _chunks(cores)
    steps = [_step(subject, model, bounds.mean_rank(piece)) for piece in pieces]
    return np.concatenate([bounds.compute_floor(piece, one) for piece, one in zip(pieces, steps, strict=True)])


def _open(table: Table, found: Found) -> Table:
    """The rows whose bound lets them be among the best; sums in another order may differ in their last digits."""
    return space.rows(table, _fast_enough(table, table["floor"] * (1 - ROUNDING), found))


def _fast_enough(table: Table, seconds: Reals, found: Found) -> NDArray[np.bool_]:
    return np.asarray((seconds <= found.best.worst) | ((table["may_run"] != 0) & (seconds <= found.running.worst)))


def _look_into(subject: Subject, model: CostModel, cores: Table, floors: _DataFloors, found: Found) -> Found:
    """The plans of these cores: their pipelines in order of their bounds, then all splits of those."""
    samples = bounds.samples_floor(_first_rank(subject, model, bounds.mean_rank(cores))) / cores["pp"]
    table = space.with_pipelines(subject.task, space.rows(cores, samples <= subject.limit))
    table["floor"] = bounds.pipeline_floor(table, table["own"]) + table["data"]
    table["may_run"] = engine.may_run(table) & (table["may_run"] != 0)
    for piece in _chunks(_open(table, found)):
        piece = _open(piece, found)
        piece["samples"] = bounds.samples_floor(_memory(subject, model, bounds.least_split(piece)))
        piece = space.rows(piece, piece["samples"] <= subject.limit)
        whole_copies = {**piece, "dp_replicate": piece["data_parallel"]}
        piece["own"] = bounds.without_split(_step(subject, model, whole_copies))
        piece["floor"] = piece["own"] + piece["data"]
        piece = space.rows(piece, np.argsort(piece["floor"], kind="stable"))
        found = _look_at_splits(subject, model, piece, floors, found)
    return found


def _look_at_splits(subject: Subject, model: CostModel, pipelines: Table, floors: _DataFloors, found: Found) -> Found:
    start, size = 0, FIRST_CORES
    while start < _length(pipelines):
        some = _open(space.rows(pipelines, slice(start, start + size)), found)
        start += size
        if _length(some):
            plans = space.with_numbered_splits(subject.task, some)
            size = max(FIRST_CORES, ROWS * _length(some) // max(1, _length(plans)))
            plans["floor"] = plans["own"] + floors.seconds[floors.starts[plans["batch"]] + plans["split"]]
            plans["may_run"] = engine.runs(plans) & (plans["may_run"] != 0)
            found = _cost(subject, model, _open(plans, found), found)
    return found


def _cost(subject: Subject, model: CostModel, plans: Table, found: Found) -> Found:
    """The plans that fit, held against the best so far."""
    workload, limit = subject.workload, subject.limit
    least = plans["samples"] + bounds.least_states(workload, plans)
    plans = space.rows(plans, np.maximum(least, bounds.states_floor(workload, plans)) <= limit)
    if not _length(plans):
        return found
    found = found._replace(costed=found.costed + _length(plans))
    # Seconds are told sooner than bytes: bytes are asked of what is fast enough alone.
    seconds = _step(subject, model, plans).seconds
    plans, seconds = _chosen(plans, seconds, _fast_enough(plans, seconds, found))
    if not len(seconds):
        return found
    memory = _memory(subject, model, plans)
    plans, seconds = _chosen({**plans, "bytes": memory.device}, seconds, memory.high <= limit)
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


def _first_rank(subject: Subject, model: CostModel, table: Table) -> bounds.HasParts:
    return model.first_rank(subject.workload, subject.cluster, candidates(table))


def _memory(subject: Subject, model: CostModel, table: Table) -> MemoryParts:
    return model.memory(subject.workload, subject.cluster, candidates(table))


def _chosen(table: Table, seconds: Reals, keep: NDArray[np.bool_]) -> tuple[Table, Reals]:
    return space.rows(table, keep), seconds[keep]


def _chunks(table: Table) -> list[Table]:
    return [space.rows(table, slice(at, at + ROWS)) for at in range(0, _length(table), ROWS)]


def _length(table: Table) -> int:
    return len(table["pp"])
