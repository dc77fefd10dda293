"""The space of plans: every valid combination of degrees and options for a task, as arrays. No torch.

It is built in three steps, so that what does not fit or cannot be fast is dropped before it is written out. A *core*
is what a rank computes: degrees, micro-batches, recompute, compile, sequence parallel. Its *pipelines* are in which
order: schedule and stages a rank. Its *splits* are who holds what: dp_replicate x dp_shard, zero, offload, buckets. A
plan is a core with one of its pipelines and one of its splits. Degrees divide the world and sizes grow by powers of two
(and three times a power of two), so the space grows with the logarithms of the world and of the batch.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, Candidates
from shardwise.inputs.arch import Arch
from shardwise.plan import schedules, validity
from shardwise.units import MIB

Column = NDArray[np.int64]
# Columns of one length: those of a candidate are whole numbers; the search adds bounds beside them.
Table = dict[str, NDArray[Any]]
Row = tuple[int, ...]

# torch's default, and one that a fast network and many ranks want: fewer messages, of which each waits once.
DEFAULT_BUCKET = 25 * MIB
BUCKETS = (DEFAULT_BUCKET, 100 * MIB)
PIPELINED, DIVIDED = ("pp", "accumulation"), ("data_parallel", "cp", "ep")
SPLIT = ("dp_replicate", "dp_shard", "zero", "offload", "bucket_bytes")


@dataclass(frozen=True)
class Task:
    """What is to be split over what. `fixed`: columns (data_parallel too) and the one value that each may have.

    devices_per_node: what bounds tensor parallel. most_micro_batch: samples; None: any. fixed_length: every sequence
    has `sequence_length` tokens (a user's own data may have any).
    """

    arch: Arch
    sequence_length: int
    global_batch: int
    world: int
    devices_per_node: int
    most_micro_batch: int | None = None
    fixed_length: bool = True
    fixed: Mapping[str, int] = field(default_factory=dict)

    def allowed(self, name: str, options: Iterable[int]) -> list[int]:
        """The options of a column that what the user fixed leaves."""
        return [option for option in options if self.fixed.get(name, option) == option]


def cores(task: Task) -> Table:
    """Every valid core, one a row."""
    table = _table(("pp", "tp", "cp", "ep", "data_parallel"), list(meshes(task)))
    table = grow(table, ("data_parallel", "pp"), ("accumulation", "micro_batch"), functools.partial(batches, task))
    options = itertools.product(
        task.allowed("recompute", range(len(RECOMPUTE))), task.allowed("compiled", (0, 1)), (0, 1)
    )
    names, found = ("recompute", "compiled", "sequence_parallel"), list(options)
    table = grow(table, (), names, lambda: found)
    # Without tensor parallel nothing lies between split matrices: one of the two is enough.
    split, alone = table["sequence_parallel"] == 1, table["tp"] == 1
    keep = ~(split & alone)
    if "sequence_parallel" in task.fixed:
        keep &= alone | (split == (task.fixed["sequence_parallel"] == 1))
    if task.fixed_length:
        length, chained = task.sequence_length // table["cp"], table["pp"] * table["cp"]
        keep &= validity.positions_divide(length, chained, table["tp"], split)
    keep &= _options(table, PIPELINED, functools.partial(pipelines, task)) > 0
    return rows(table, keep)


def meshes(task: Task) -> Iterator[Row]:
    """(pp, tp, cp, ep, data-parallel ranks) that make the world."""
    degrees = divisors(task.world)
    tps = [
        tp
        for tp in task.allowed("tp", degrees)
        if validity.heads_divide(task.arch, tp) and validity.stays_in_a_node(tp, task.devices_per_node)
    ]
    cps = [cp for cp in task.allowed("cp", degrees) if validity.chunks_are_equal(task.sequence_length, cp)]
    pps = [pp for pp in task.allowed("pp", degrees) if validity.stages_have_blocks(task.arch, pp)]
    for pp, tp, cp in itertools.product(pps, tps, cps):
        data, rest = divmod(task.world, pp * tp * cp)
        if rest or not validity.ranks_have_samples(task.global_batch, data):
            continue
        if not task.allowed("data_parallel", [data]):
            continue
        for ep in task.allowed("ep", divisors(data * cp)):
            if validity.experts_divide(task.arch, ep):
                yield pp, tp, cp, ep, data


def batches(task: Task, data_parallel: int, pp: int) -> list[Row]:
    """(micro-batches a step, samples of the largest) of the batch on so many ranks.

    Sizes are grown, counts follow, and then the samples are shared out evenly. For interleaved schedules, counts in
    whole rounds of `pp` too.
    """
    each = math.ceil(task.global_batch / data_parallel)
    most = min(each, task.most_micro_batch or each)
    sizes = [task.fixed["micro_batch"]] if "micro_batch" in task.fixed else grown(most)
    counts = {math.ceil(each / size) for size in sizes if size <= most}
    if pp > 1:
        counts |= {rounded for count in counts if (rounded := math.ceil(count / pp) * pp) <= each}
    if "accumulation" in task.fixed:
        counts = {task.fixed["accumulation"]} if task.fixed["accumulation"] <= each else set()
    found = ((count, math.ceil(task.global_batch / (data_parallel * count))) for count in sorted(counts))
    return [(count, micro) for count, micro in found if task.allowed("micro_batch", [micro]) and micro <= most]


@functools.cache
def _schedules(layers: int, pp: int, micros: int) -> tuple[tuple[str, int], ...]:
    """Every schedule that these numbers of micro-batches and blocks allow, with its stages a rank."""
    if pp == 1:
        return (("none", 1),)
    return tuple(
        (schedule, held)
        for schedule in SCHEDULES[1:]
        for held in grown(layers // pp)
        if not schedules.requires(schedule, pp, held, micros)
    )


def pipelines(task: Task, pp: int, accumulation: int) -> list[Row]:
    """(schedule, stages a rank) for so many micro-batches: every one that `schedules.requires` lets through."""
    held = task.fixed.get("stages_per_rank")
    options = _schedules(task.arch.num_layers, pp, accumulation)
    if held is not None and pp > 1 and validity.stages_have_blocks(task.arch, pp * held):
        options = tuple((name, held) for name in SCHEDULES[1:] if not schedules.requires(name, pp, held, accumulation))
    found = [(SCHEDULES.index(name), count) for name, count in options]
    return [(name, count) for name, count in found if task.allowed("schedule", [name]) and held in (None, count)]


def splits(task: Task, data_parallel: int, cp: int, ep: int) -> list[Row]:
    """Every (dp_replicate, dp_shard, zero, offload, bucket_bytes) of so many data-parallel ranks.

    One kind of offload after another, each with the same splits in the same order.
    """
    held: list[tuple[int, int, int, int]] = []
    for shard in task.allowed("dp_shard", divisors(data_parallel)):
        whole = task.allowed("dp_replicate", [data_parallel // shard])
        if not whole or not validity.experts_share_ranks(shard, cp, ep):
            continue
        for zero in task.allowed("zero", range(4)):
            if validity.shards_match_zero(zero, shard):
                held += [(whole[0], shard, zero, bucket) for bucket in _buckets(task, zero, data_parallel)]
    offloads = task.allowed("offload", range(len(OFFLOAD)))
    return [(copies, shard, zero, offload, bucket) for offload in offloads for copies, shard, zero, bucket in held]


def _buckets(task: Task, zero: int, data_parallel: int) -> tuple[int, ...]:
    """Of whole copies; sharding communicates block by block."""
    if "bucket_bytes" in task.fixed:
        return (task.fixed["bucket_bytes"],)
    return BUCKETS if zero == 0 and data_parallel > 1 else (DEFAULT_BUCKET,)


def with_pipelines(task: Task, table: Table) -> Table:
    """Every pipeline of these cores."""
    return grow(table, PIPELINED, ("schedule", "stages_per_rank"), functools.partial(pipelines, task))


def with_splits(task: Task, table: Table) -> Table:
    """Every split of these cores or pipelines."""
    return grow(table, DIVIDED, SPLIT, functools.partial(splits, task))


def with_numbered_splits(task: Task, table: Table) -> Table:
    """The same, each with its place (`split`) among those of its kind of offload, and their number (`of_splits`)."""

    def numbered(*keys: int) -> list[Row]:
        found = splits(task, *keys)
        kinds = max(1, len({one[SPLIT.index("offload")] for one in found}))
        each = len(found) // kinds
        return [(*one, place % each, each) for place, one in enumerate(found)]

    return grow(table, DIVIDED, (*SPLIT, "split", "of_splits"), numbered)


def distinct(table: Table, keys: Sequence[str]) -> tuple[Table, Column]:
    """One row for each that these columns tell apart, and which of them each row has."""
    code = _code(table, keys)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return rows(table, first), inverse


def count(task: Task, table: Table) -> int:
    """How many plans these cores have."""
    orders = _options(table, PIPELINED, functools.partial(pipelines, task))
    holders = _options(table, DIVIDED, functools.partial(splits, task))
    return int((orders * holders).sum())


def _options(table: Table, keys: Sequence[str], options: Callable[..., Sequence[Row]]) -> Column:
    """How many options each row has."""
    codes, inverse = _distinct(table, keys)
    return np.array([len(options(*code)) for code in codes], dtype=np.int64)[inverse]


def candidates(table: Table) -> Candidates:
    """The rows of an expanded table as the cost model takes them."""
    return Candidates.of(**{name: column for name, column in table.items() if name != "data_parallel"})


def everything(task: Task) -> Candidates:
    """The whole space written out: for small worlds, and to hold the search against."""
    return candidates(with_splits(task, with_pipelines(task, cores(task))))


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def grown(most: int) -> list[int]:
    """Powers of two and three times a power of two, and `most` itself: 1, 2, 3, 4, 6, 8, 12, ..."""
    powers = [2**power for power in range(most.bit_length())]
    return sorted({one for one in (*powers, *(3 * power for power in powers), most) if 1 <= one <= most})


def grow(table: Table, keys: Sequence[str], names: Sequence[str], options: Callable[..., Sequence[Row]]) -> Table:
    """Each row once for each option that its `keys` have; an option's numbers become the columns `names`."""
    codes, inverse = _distinct(table, keys)
    found = [list(options(*code)) for code in codes]
    sizes = np.array([len(each) for each in found], dtype=np.int64)
    flat = _table(names, [option for each in found for option in each])
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    repeats = sizes[inverse] if len(sizes) else np.zeros(0, np.int64)
    index = np.repeat(np.arange(len(inverse)), repeats)
    within = np.arange(len(index)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    chosen = within + starts[inverse[index]] if len(index) else within
    return {**rows(table, index), **rows(flat, chosen)}


def rows(table: Table, keep: NDArray[np.bool_] | Column | slice) -> Table:
    """The rows that a mask or indices choose."""
    return {name: column[keep] for name, column in table.items()}


def _table(names: Sequence[str], found: Sequence[Row]) -> Table:
    numbers = np.array(found, dtype=np.int64).reshape(len(found), len(names))
    return {name: numbers[:, index].copy() for index, name in enumerate(names)}


def _distinct(table: Table, keys: Sequence[str]) -> tuple[list[Row], Column]:
    """The distinct values of these columns together, and which of them each row has."""
    length = len(next(iter(table.values())))
    if not keys or not length:
        return ([()] if length else []), np.zeros(length, dtype=np.int64)
    found, inverse = distinct({key: table[key] for key in keys}, keys)
    return [tuple(int(found[key][row]) for key in keys) for row in range(len(found[keys[0]]))], inverse


def _code(table: Table, keys: Sequence[str]) -> Column:
    """A number that tells rows apart by these columns."""
    code = np.zeros(len(table[keys[0]]), dtype=np.int64)
    for key in keys:
        code = code * (int(table[key].max(initial=0)) + 1) + table[key]
    return code
