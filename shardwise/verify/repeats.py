"""Micro-batches that only repeat what others did: which need not be run, and how the whole step follows. No torch.

Between its first and its last micro-batches a step is periodic: the same forwards and backwards, the same calls, the
same bytes. Such a period is run twice and compared; the rest of its repetitions are written down, not run.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.plan import schedules
from shardwise.plan.plan import Decision
from shardwise.verify.agreement import Call

# In the others a period of calls is none of bytes (gpipe keeps every forward), or not of whole backwards.
PERIODIC = ("none", "1f1b", "interleaved-1f1b")

Event = tuple[str, int]  # ("F" or "B", stage)


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


def events(decision: Decision, pp: int, count: int) -> list[Event]:
    """The forwards and backwards of a step of `count` micro-batches at a place of the pipeline, in order."""
    if decision.schedule == "none":
        return [("F", 0), ("B", 0)] * count
    shape = (decision.schedule, decision.mesh.pp, decision.stages_per_rank, count)
    return [(action.kind, action.stage) for action in schedules.actions(*shape)[pp]]


def enough(decision: Decision) -> int:
    """The fewest micro-batches in which every place of the pipeline sees its period often enough; else all of them.

    Four times: two between the first, which may gather, and the last, which may reduce. Under 1f1b two more than
    places: messages on their way pile up for so long.
    """
    count, pp = decision.accumulation, decision.mesh.pp
    if decision.schedule not in PERIODIC:
        return count
    times = max(4, pp + 2) if decision.schedule == "1f1b" else 4
    step = pp if decision.schedule == "interleaved-1f1b" else 1
    for short in range(count % step + step, count, step):
        if all(any(True for _ in periods(decision, place, short, times)) for place in range(pp)):
            return short
    return count


def periods(decision: Decision, pp: int, short: int, times: int) -> Iterator[Period]:
    """Every period that a step of `short` micro-batches holds so many times in a row, and that fills up to the whole
    step."""
    part, whole = events(decision, pp, short), events(decision, pp, decision.accumulation)
    unit = decision.mesh.pp if decision.schedule == "interleaved-1f1b" else 1
    length = 2 * decision.stages_per_rank * unit
    more = (len(whole) - len(part)) // length
    for first in range(len(part) - times * length + 1):
        period = part[first : first + length]
        repeats = part[first : first + times * length] == period * times
        if repeats and part[:first] + period * more + part[first:] == whole:
            yield Period(first, length, more)


def found(decision: Decision, pp: int, short: int, marks: Sequence[Mark], calls: Sequence[Call]) -> Period | None:
    """The period whose calls and bytes were equal two times in a row; None where there is none: run all, then."""
    if len(marks) != len(events(decision, pp, short)):
        return None  # more forwards than the schedule has: several named losses are counted beforehand
    for period in periods(decision, pp, short, 2):
        at, again, after = (period.first + times * period.events for times in range(3))
        if after < len(marks) and _same(marks[at : after + 1], calls, again - at):
            return period
    return None


def _same(marks: Sequence[Mark], calls: Sequence[Call], length: int) -> bool:
    """Whether the calls and bytes between these marks are those of a length twice."""
    middle, end = marks[length], marks[2 * length]
    if list(calls[marks[0].calls : middle.calls]) != list(calls[middle.calls : end.calls]):
        return False
    if marks[0].live != middle.live:
        return False
    pairs = zip(marks[1 : length + 1], marks[length + 1 :], strict=True)
    return all((one.live, one.most) == (two.live, two.most) for one, two in pairs)


def whole(period: Period, marks: Sequence[Mark], calls: Sequence[Call]) -> list[Call]:
    """The calls of the whole step."""
    at, again = marks[period.first].calls, marks[period.first + period.events].calls
    return [*calls[:again], *list(calls[at:again]) * period.more, *calls[again:]]
