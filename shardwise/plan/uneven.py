"""Plans for groups of machines that differ: stages with more blocks, or more of the batch, where they are faster.

Ranks follow the groups' order, and a pipeline is the outermost axis: where the ranks of a stage divide every group,
each stage lies in one. With equal shares all wait for the slowest; here each group gets what it does in the same time.
Plans are looked for among the best that each group would take for itself, were all machines of its kind. No torch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.inputs.hardware import NodeGroup, of_groups
from shardwise.plan import choice, engine, evaluate, schedules, space
from shardwise.plan.choice import Choice
from shardwise.plan.estimate import Estimate
from shardwise.plan.plan import Decision
from shardwise.plan.search import CostModel, search
from shardwise.plan.space import Table
from shardwise.plan.subject import Subject, limit_of

# Plans of each group for itself that are looked at.
LOOKED_AT = 4
# Parts of a step that a rank spends on its micro-batches; the rest comes once a step, or is waiting.
WORK = ("matmul", "attention", "memory_bound", "tensor_parallel", "context_parallel", "expert", "host")


class Kind(NamedTuple):
    """A group as if all machines were of its kind, so many devices of which are its own."""

    subject: Subject
    devices: int


class Look(NamedTuple):
    """What a rank with so many blocks and micro-batches takes on machines of its kind."""

    place: "Place"
    estimate: Estimate

    @property
    def work(self) -> float:
        """Seconds of a step for its own micro-batches."""
        return sum(self.estimate.seconds[part] for part in WORK)

    @property
    def alone(self) -> float:
        """Seconds of a step without waiting for the pipeline's other ranks."""
        return self.estimate.step_seconds - self.estimate.seconds["bubble"]


def is_uneven(decision: Decision) -> bool:
    """Whether ranks get different numbers of blocks or of micro-batches by the plan's own word."""
    return decision.stage_blocks != "even" or decision.shares != "equal"


def kinds(subject: Subject) -> tuple[Kind, ...]:
    """The groups whose devices are the world's ranks, in order; one of all ranks where they do not differ or fit."""
    world = subject.task.world
    if len(subject.groups) < 2 or sum(group.devices for group in subject.groups) != world:
        return (Kind(subject, world),)
    return tuple(_kind(subject, group) for group in subject.groups)


def _kind(subject: Subject, group: NodeGroup) -> Kind:
    world = subject.task.world
    cluster = of_groups((msgspec.structs.replace(group, nodes=math.ceil(world / group.node.devices)),))
    return Kind(subject._replace(cluster=cluster, limit=limit_of(cluster, world)), group.devices)


def choices(subject: Subject, model: CostModel) -> tuple[Choice, ...]:
    """The best uneven plans that fit for sure, fastest first; none where groups do not differ.

    Not for experts behind dense blocks: what a stage holds is then no matter of its number of blocks alone.
    """
    arch, groups = subject.workload.arch, kinds(subject)
    if len(groups) < 2 or (arch.experts is not None and arch.dense_layers):
        return ()
    found = [*_with_stages(subject, groups, model), *_with_shares(subject, groups, model)]
    taken = []
    for decided in dict.fromkeys(found):
        one = estimate(subject, model, decided)
        if one.memory_bytes_interval[1] <= one.memory_limit_bytes:
            taken.append(Choice(decided, one, (*subject.planned_only, *engine.reasons(decided, arch))))
    return tuple(sorted(taken, key=lambda one: one.estimate.step_seconds))


def of_any(
    subject: Subject, model: CostModel, decided: Decision, change: Callable[[Subject], Subject] = lambda same: same
) -> Estimate:
    """What a plan takes, even or not. `change`: to the work or the machines before they are asked."""
    if is_uneven(decided):
        return estimate(subject, model, decided, change)
    return evaluate.estimate(change(subject), model, choice.table([_row(subject, decided)]))[0]


def estimate(
    subject: Subject, model: CostModel, decided: Decision, change: Callable[[Subject], Subject] = lambda same: same
) -> Estimate:
    """What an uneven plan takes: its slowest rank decides, and the others' work fills its bubble."""
    row = _row(subject, decided)
    groups = [kind._replace(subject=change(kind.subject)) for kind in kinds(subject)]
    looks = _looks(groups, model, decided, row)
    slowest = max(looks, key=lambda look: look.alone)
    seconds = {**slowest.estimate.seconds}
    others = sum(look.work for look in looks) - slowest.work
    if len(looks) > 1:
        # Its own estimate has the others as busy as itself.
        seconds["bubble"] *= others / ((len(looks) - 1) * slowest.work)
        # What crosses from group to group goes as fast as the slower of the two.
        crossing = ["pipeline_transfers", *(["data_parallel"] if decided.shares != "equal" else [])]
        seconds |= {part: max(look.estimate.seconds[part] for look in looks) for part in crossing}
    low, high = (end / slowest.estimate.step_seconds for end in slowest.estimate.step_seconds_interval)
    total = sum(seconds.values())
    held = _held(groups, [look.place for look in looks], row)
    memory = max(held, key=lambda one: one.interval[1] / one.limit)
    return evaluate.as_estimate(change(subject), total, (low * total, high * total), seconds, memory)


def memory_by_rank(subject: Subject, decided: Decision) -> list[evaluate.Bytes]:
    """What each rank of any plan's pipeline holds at its own peak; under uneven shares, a rank of each group."""
    groups = kinds(subject)
    return _held(groups, _places(groups, decided, subject.workload.arch.num_layers), _row(subject, decided))


def _row(subject: Subject, decided: Decision) -> dict[str, int]:
    return choice.row(decided, subject.task.fixed.get("sequence_parallel", 1) == 1)


class Place(NamedTuple):
    """A rank of the pipeline: the index of its group, its blocks, and how many ranks the pipeline has."""

    rank: int
    group: int
    blocks: int
    pp: int


def _places(groups: Sequence[Kind], decided: Decision, layers: int) -> list[Place]:
    """Of each rank of the pipeline; of uneven shares, of a rank of each group."""
    pp = decided.mesh.pp
    if decided.shares != "equal":
        return [Place(0, group, layers, 1) for group in range(len(groups))]
    each = decided.mesh.world // pp
    homes = [group for group, kind in enumerate(groups) for _ in range(kind.devices // each)]
    held = [0] * pp
    sizes = schedules.stage_blocks(layers, pp * decided.stages_per_rank, decided.stage_blocks)
    for stage, blocks in enumerate(sizes):
        held[schedules.rank_of_stage(decided.schedule, stage, pp)] += len(blocks)
    return [Place(rank, homes[rank], held[rank], pp) for rank in range(pp)]


def _held(groups: Sequence[Kind], places: Sequence[Place], row: dict[str, int]) -> list[evaluate.Bytes]:
    known = {
        (place.group, place.blocks): evaluate.of_ranks(_deep(groups[place.group].subject, place.blocks, place.pp), row)
        for place in dict.fromkeys(place._replace(rank=0) for place in places)
    }
    return [known[place.group, place.blocks][place.rank] for place in places]


def _looks(groups: Sequence[Kind], model: CostModel, decided: Decision, row: dict[str, int]) -> list[Look]:
    """Of each rank of the pipeline; of uneven shares, of a rank of each group."""
    counts = (decided.accumulation,) * len(groups) if decided.shares == "equal" else decided.shares
    places = _places(groups, decided, groups[0].subject.workload.arch.num_layers)
    known = {
        (place.group, place.blocks): evaluate.estimate(
            _deep(groups[place.group].subject, place.blocks, place.pp),
            model,
            choice.table([{**row, "accumulation": counts[place.group]}]),
        )[0]
        for place in dict.fromkeys(place._replace(rank=0) for place in places)
    }
    return [Look(place, known[place.group, place.blocks]) for place in places]


def _deep(subject: Subject, blocks: int, pp: int) -> Subject:
    """Each of `pp` ranks with so many blocks."""
    arch = msgspec.structs.replace(subject.workload.arch, num_layers=blocks * pp)
    return subject._replace(workload=msgspec.structs.replace(subject.workload, arch=arch))


def _with_stages(subject: Subject, groups: Sequence[Kind], model: CostModel) -> Iterator[Decision]:
    """Pipelines whose stages have blocks by speed, one stage a rank, as far as each device holds them."""
    arch, world = subject.workload.arch, subject.task.world
    for pp in subject.task.allowed("pp", space.divisors(world)):
        each = world // pp
        if not 2 <= pp <= arch.num_layers or any(kind.devices % each for kind in groups):
            continue
        ranks = [kind.devices // each for kind in groups]
        peaks = [kind.subject.cluster.device.peak_flops_per_second(subject.workload.precision) for kind in groups]
        start, _ = _shared_out(arch.num_layers, ranks, [1 / peak if peak else 1.0 for peak in peaks])
        deep = [
            kind._replace(subject=_deep(kind.subject, math.ceil(blocks / count), pp))
            for kind, blocks, count in zip(groups, start, ranks, strict=True)
        ]
        even = tuple(len(blocks) for blocks in schedules.stage_blocks(arch.num_layers, pp))
        found: list[tuple[float, Decision]] = []
        rows = _rows(deep, model, {"pp": pp, "stages_per_rank": 1})
        for row, (held, seconds) in zip(rows, _balanced(groups, model, rows, ranks), strict=True):
            sizes = tuple(size for blocks, count in zip(held, ranks, strict=False) for size in _evenly(blocks, count))
            decided = choice.decision(row, subject.workload.global_batch, subject.workload.precision)
            if held:
                sized = msgspec.structs.replace(decided, stage_blocks="even" if sizes == even else sizes)
                found.append((seconds, sized))
        found.sort(key=lambda one: one[0])
        yield from [one for _, one in found if not engine.reasons(one, arch)][:LOOKED_AT]
        yield from [one for _, one in found[: LOOKED_AT // 2]]


def _rows(groups: Sequence[Kind], model: CostModel, fixed: dict[str, int]) -> list[dict[str, int]]:
    """What each group would take for itself with these columns, in one list without doubles."""
    found: dict[tuple[int, ...], dict[str, int]] = {}
    reach = min(kind.subject.task.devices_per_node for kind in groups)
    for kind in groups:
        task = kind.subject.task
        if any(task.fixed.get(name, value) != value for name, value in fixed.items()):
            return []
        task = replace(task, fixed={**task.fixed, **fixed})
        there = search(kind.subject._replace(task=task), model, LOOKED_AT)
        for table in (there.best.table, there.running.table):
            for row in _as_rows(table):
                if row["tp"] <= reach:
                    found.setdefault(tuple(row.values()), row)
    return list(found.values())


def _as_rows(table: Table) -> Iterator[dict[str, int]]:
    names = (*choice.COLUMNS, "data_parallel")
    for index in range(len(table["pp"]) if table else 0):
        yield {name: int(table[name][index]) for name in names}


def _balanced(
    groups: Sequence[Kind], model: CostModel, rows: Sequence[dict[str, int]], ranks: Sequence[int]
) -> list[tuple[list[int], float]]:
    """Of each row, the blocks of each group with which the slowest rank is fastest and each device holds its own, and
    its seconds; no blocks where they do not fit. Seconds and bytes grow by the block: two depths tell both.
    """
    if not rows:
        return []
    layers, pp, table = groups[0].subject.workload.arch.num_layers, rows[0]["pp"], choice.table(list(rows))
    low, high = max(1, layers // (2 * pp)), max(2, 3 * layers // (2 * pp))
    seconds, base, room = [], [], []
    for kind in groups:
        small, large = (evaluate.estimate(_deep(kind.subject, depth, pp), model, table) for depth in (low, high))
        alone = [[one.step_seconds - one.seconds["bubble"] for one in depth] for depth in (small, large)]
        bytes_ = [[one.memory_bytes_interval[1] for one in depth] for depth in (small, large)]
        seconds.append((np.array(alone[1]) - alone[0]) / (high - low))
        base.append(np.array(alone[0]) - low * seconds[-1])
        block = np.maximum((np.array(bytes_[1]) - bytes_[0]) / (high - low), 1.0)
        room.append(low + np.floor((kind.subject.limit - np.array(bytes_[0])) / block).astype(np.int64))
    found = []
    for row in range(len(rows)):
        each, fixed = ([float(column[row]) for column in columns] for columns in (seconds, base))
        found.append(_shared_out(layers, ranks, each, fixed, [int(column[row]) for column in room]))
    return found


def _shared_out(
    units: int,
    ranks: Sequence[int],
    seconds: Sequence[float],
    base: Sequence[float] | None = None,
    room: Sequence[int] | None = None,
) -> tuple[list[int], float]:
    """So many units, one after another to the group whose ranks are then done first, at least one a rank; and the
    seconds of the last. By group: `seconds` of a unit, `base` beside them, `room`: the most units of a rank. No units
    where there is no room.
    """
    each, fixed, count = np.array(seconds), np.array(base if base is not None else [0.0] * len(ranks)), np.array(ranks)
    most = count * (np.array(room) if room is not None else units)
    held = count.copy()

    def done(units: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(fixed + np.ceil(units / count) * each)

    for _ in range(units - int(held.sum())):
        then = np.where(held < most, done(held + 1), np.inf)
        if not np.isfinite(then).any():
            return [], math.inf
        held[int(then.argmin())] += 1
    return ([], math.inf) if (held > most).any() else ([int(one) for one in held], float(done(held).max()))


def _evenly(units: int, ranks: int) -> list[int]:
    return [len(part) for part in schedules.stage_blocks(units, ranks)]


def _with_shares(subject: Subject, groups: Sequence[Kind], model: CostModel) -> Iterator[Decision]:
    """Without a pipeline: each rank takes micro-batches by its speed."""
    batch = subject.workload.global_batch
    for row in _rows(groups, model, {"pp": 1}):
        width = row["tp"] * row["cp"]
        if any(kind.devices % width for kind in groups):
            continue
        ranks = [kind.devices // width for kind in groups]
        seconds = []
        for kind in groups:
            twice = choice.table([row, {**row, "accumulation": 2 * row["accumulation"]}])
            once, double = evaluate.estimate(kind.subject, model, twice)
            seconds.append((double.step_seconds - once.step_seconds) / row["accumulation"])
        counts = _rounds(math.ceil(batch / row["micro_batch"]), ranks, seconds)
        decided = choice.decision(row, batch, subject.workload.precision)
        shares = "equal" if len(set(counts)) == 1 else tuple(counts)
        yield msgspec.structs.replace(decided, accumulation=max(counts), shares=shares)


def _rounds(micro_batches: int, ranks: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Micro-batches of each rank, by group, so that together they are at least so many, and the slowest done first."""
    speed = sum(count / each for count, each in zip(ranks, seconds, strict=True))
    counts = [max(1, int(micro_batches / speed / each)) for each in seconds]
    while sum(c * r for c, r in zip(counts, ranks, strict=True)) < micro_batches:
        done = [(count + 1) * each for count, each in zip(counts, seconds, strict=True)]
        counts[done.index(min(done))] += 1
    return counts
