"""Micro-batches that only repeat what others did: which need not be run, and how the whole step follows. No torch.

As long as its micro-batches are equal a step is periodic between the first and the last of them: the same forwards and
backwards, the same calls, the same bytes. Such a period is run twice and compared; the rest of its repetitions are
written down, not run.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from shardwise.plan import schedules
from shardwise.plan.plan import Decision
from shardwise.verify.agreement import Call

# In the others a period of calls is none of bytes (gpipe keeps every forward), or not of whole backwards.
PERIODIC = ("none", "1f1b", "interleaved-1f1b")

Event = tuple[str, int, int]  # ("F" or "B", stage, which run of equal micro-batches)


class Mark(NamedTuple):
    """Where a forward or a backward begins: how many calls came before, the bytes live then, and the most since the
    mark before."""

    calls: int
    live: int
    most: int


class Period(NamedTuple):
    """In a shorter step: events `first` to `first + events` repeat, and come `more` times again in the whole step."""

    first: int
    events: int
    more: int


class Run(NamedTuple):
    """Micro-batches of equal size in a row."""

    samples: int
    count: int


def runs(sizes: Sequence[int]) -> tuple[Run, ...]:
    return tuple(Run(samples, len(list(same))) for samples, same in groupby(sizes))


def events(decision: Decision, pp: int, step: Sequence[Run]) -> list[Event]:
    """The forwards and backwards of a step at a place of the pipeline, in order."""
    run_of = [index for index, run in enumerate(step) for _ in range(run.count)]
    if decision.schedule == "none":
        return [(kind, 0, run) for run in run_of for kind in "FB"]
    shape = (decision.schedule, decision.mesh.pp, decision.stages_per_rank, len(run_of))
    return [(action.kind, action.stage, run_of[action.micro]) for action in schedules.actions(*shape)[pp]]


def enough(decision: Decision, pp: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the fewest micro-batches in which this place of the pipeline sees each run's period often enough.

    Four times: two between the first, which may gather, and the last, which may reduce. Under 1f1b messages on their
    way pile up first, the longer the later the place. A run in which it is not seen so often stays whole.
    """
    short = list(runs(sizes))
    if decision.schedule not in PERIODIC:
        return tuple(sizes)
    # The first place's messages pile up while it warms up. One between others sends both ways, which takes up to two
    # periods more; in a run that is too short for that it is tried with fewer.
    least = decision.mesh.pp + 2 + pp
    for index in range(len(short)):
        for times in (least + 2, least + 1, least) if decision.schedule == "1f1b" and pp else (4,):
            cut = _cut(decision, pp, short, index, times)
            if cut is not None:
                short[index] = cut
                break
    return tuple(run.samples for run in short for _ in range(run.count))


def _cut(decision: Decision, pp: int, step: Sequence[Run], index: int, times: int) -> Run | None:
    """A run of a step, as short as it can be with its period so many times in a row; None where it must stay."""
    run, unit = step[index], decision.mesh.pp if decision.schedule == "interleaved-1f1b" else 1
    for count in range(run.count % unit + unit, run.count, unit):
        tried = [*step[:index], run._replace(count=count), *step[index + 1 :]]
        if any(True for _ in periods(decision, pp, tried, step, index, times)):
            return tried[index]
    return None


def periods(
    decision: Decision, pp: int, short: Sequence[Run], longer: Sequence[Run], index: int, times: int
) -> Iterator[Period]:
    """Every period that the run of this index in a shorter step holds so many times in a row, and that fills the step
    up to the longer one, in which this run alone is longer."""
    part, whole = events(decision, pp, short), events(decision, pp, longer)
    unit = decision.mesh.pp if decision.schedule == "interleaved-1f1b" else 1
    length = 2 * decision.stages_per_rank * unit
    more = (len(whole) - len(part)) // length
    for first in range(len(part) - times * length + 1):
        period = part[first : first + length]
        if any(run != index for _, _, run in period) or part[first : first + times * length] != period * times:
            continue
        if part[:first] + period * more + part[first:] == whole:
            yield Period(first, length, more)


def found(
    decision: Decision, pp: int, ran: Sequence[int], sizes: Sequence[int], marks: Sequence[Mark], calls: Sequence[Call]
) -> tuple[Period, ...] | None:
    """Of each run that was shortened, the period whose calls and bytes were equal two times in a row.

    In order, and in the shorter step. None where one has none: run all, then.
    """
    part, whole = runs(ran), runs(sizes)
    if len(marks) != len(events(decision, pp, part)):
        return None  # more forwards than the schedule has: several named losses are counted beforehand
    chosen: list[Period] = []
    for index, (shorter, run) in enumerate(zip(part, whole, strict=True)):
        if shorter != run:
            longer = [*part[:index], run, *part[index + 1 :]]
            seen = (p for p in periods(decision, pp, part, longer, index, 2) if _twice(p, marks, calls))
            chosen += [period for period in [next(seen, None)] if period is not None]
    return tuple(chosen) if len(chosen) == sum(a != b for a, b in zip(part, whole, strict=True)) else None


def _twice(period: Period, marks: Sequence[Mark], calls: Sequence[Call]) -> bool:
    at, again, after = (period.first + times * period.events for times in range(3))
    return after < len(marks) and _same(marks[at : after + 1], calls, again - at)


def _same(marks: Sequence[Mark], calls: Sequence[Call], length: int) -> bool:
    """Whether the calls and bytes between these marks are those of a length twice."""
    middle, end = marks[length], marks[2 * length]
    if list(calls[marks[0].calls : middle.calls]) != list(calls[middle.calls : end.calls]):
        return False
    if marks[0].live != middle.live:
        return False
    pairs = zip(marks[1 : length + 1], marks[length + 1 :], strict=True)
    return all((one.live, one.most) == (two.live, two.most) for one, two in pairs)


def whole(chosen: Sequence[Period], marks: Sequence[Mark], calls: Sequence[Call]) -> list[Call]:
    """The calls of the whole step."""
    filled, done = list[Call](), 0
    for period in chosen:
        at, again = marks[period.first].calls, marks[period.first + period.events].calls
        filled += [*calls[done:again], *list(calls[at:again]) * period.more]
        done = again
    return [*filled, *calls[done:]]
