"""How far predictions are from measured runs: errors by family, coverage, regret, and a naive model beside. No torch.

Every family has the same weight, however many rows it has. An error is |predicted / measured - 1|.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.cost import naive
from shardwise.cost.predicting import Interval, Predictions
from shardwise.cost.published import Row
from shardwise.errors import DataError

Floats = NDArray[np.float64]

# Memory of smaller runs is mostly a framework's fixed buffers: scored apart.
LARGE_BYTES = 5e9
# A sweep has so many plans or more of one model, batch and cluster.
SWEEP_PLANS = 5


class Errors(msgspec.Struct, frozen=True):
    """Of `rows` predictions: median and 90th percentile of the error, the median of predicted / measured - 1, and the
    share inside the 80 % interval. Absent without rows."""

    rows: int
    median: float | None = None
    p90: float | None = None
    bias: float | None = None
    coverage: float | None = None


class Source(msgspec.Struct, frozen=True):
    """One family of sources. memory: rows of 5 GB and more; small_memory: the others.

    dense_time and naive: of the rows that the naive model predicts too, by this model and by it.
    """

    keys: tuple[str, ...]
    time: Errors
    memory: Errors
    small_memory: Errors
    dense_time: Errors
    naive: Errors


class Regret(msgspec.Struct, frozen=True):
    """Of choosing by prediction among the measured plans of a sweep: chosen / best - 1, by measured seconds."""

    source: str
    model: str
    cluster: str
    plans: int
    chosen_seconds: float
    best_seconds: float
    regret: float


class Sweeps(msgspec.Struct, frozen=True):
    """Of all sweeps, the largest regret first. by_source: the median of each source's sweeps."""

    count: int
    median: float | None
    p90: float | None
    by_source: Mapping[str, float]
    sweeps: tuple[Regret, ...]


class Overall(msgspec.Struct, frozen=True):
    """Means over families. interval_coverage: of all time and memory.

    oom_rows: runs that were out of memory and whose memory is predicted. called fitting: the interval's high end fits.
    """

    time: Errors
    memory: Errors
    small_memory: Errors
    dense_time: Errors
    naive: Errors
    interval_coverage: float | None
    oom_rows: int
    oom_called_fitting: int
    regret: Sweeps


class Skipped(msgspec.Struct, frozen=True):
    """A row that was not scored, and why."""

    line: int
    source: str
    model: str
    reason: str


class Score(msgspec.Struct, frozen=True):
    """What `shardwise dev score` prints."""

    rows: int
    sources: Mapping[str, Source]
    overall: Overall
    skipped: tuple[Skipped, ...]
    schema_version: int = 1


def score(rows: Sequence[Row], predicted: Predictions) -> Score:
    """The score of predictions, one a row.

    Raises: DataError where no row can be scored.
    """
    skipped = _skipped(rows, predicted)
    left_out = {each.line for each in skipped}
    kept = [place for place, row in enumerate(rows) if row.line not in left_out]
    if not kept:
        reason = skipped[0].reason if skipped else "there are none"
        raise DataError("No row can be scored.", why=f"the first one: {reason}", fix="complete the cells that it names")
    families: dict[str, list[int]] = defaultdict(list)
    for place in kept:
        families[rows[place].family].append(place)
    guessed = naive.seconds(rows)
    sources = {name: _source(rows, places, predicted, guessed) for name, places in sorted(families.items())}
    return Score(len(rows), sources, _overall(rows, kept, predicted, list(sources.values())), skipped)


def _skipped(rows: Sequence[Row], predicted: Predictions) -> tuple[Skipped, ...]:
    reasons = [row.reason_to_skip or predicted.problems.get(place, "") for place, row in enumerate(rows)]
    pairs = zip(rows, reasons, strict=True)
    return tuple(Skipped(row.line, row.source, row.model, reason) for row, reason in pairs if reason)


def _source(rows: Sequence[Row], places: list[int], predicted: Predictions, guessed: Interval) -> Source:
    seconds = _measured(rows, places, lambda row: row.measured_seconds)
    dense = {place: value for place, value in seconds.items() if np.isfinite(guessed.value[place])}
    held = _measured(rows, places, lambda row: row.measured_bytes)
    large = {place: value for place, value in held.items() if value >= LARGE_BYTES}
    small = {place: value for place, value in held.items() if value < LARGE_BYTES}
    return Source(
        keys=tuple(sorted({rows[place].source for place in places})),
        time=errors(seconds, predicted.seconds),
        memory=errors(large, predicted.held),
        small_memory=errors(small, predicted.held),
        dense_time=errors(dense, predicted.seconds),
        naive=errors(dense, guessed),
    )


def _measured(rows: Sequence[Row], places: Iterable[int], of: Callable[[Row], float | None]) -> dict[int, float]:
    return {place: value for place in places if (value := of(rows[place])) is not None}


def errors(measured: Mapping[int, float], predicted: Interval) -> Errors:
    """Of the rows at these places; those without a prediction are left out."""
    places = [place for place in measured if np.isfinite(predicted.value[place])]
    if not places:
        return Errors(0)
    truth = np.array([measured[place] for place in places])
    ratio = predicted.value[places] / truth
    inside = (predicted.low[places] <= truth) & (truth <= predicted.high[places])
    off = np.abs(ratio - 1)
    bounded = np.isfinite(predicted.low[places]).all()
    return Errors(
        rows=len(places), median=float(np.median(off)), p90=float(np.percentile(off, 90)),
        bias=float(np.median(ratio) - 1), coverage=float(inside.mean()) if bounded else None,
    )  # fmt: skip


def _overall(rows: Sequence[Row], kept: list[int], predicted: Predictions, sources: list[Source]) -> Overall:
    time, memory = mean([each.time for each in sources]), mean([each.memory for each in sources])
    covered = [
        each for source in sources for each in (source.time.coverage, source.memory.coverage) if each is not None
    ]
    failed = [place for place in kept if rows[place].out_of_memory and np.isfinite(predicted.device.high[place])]
    return Overall(
        time=time,
        memory=memory,
        small_memory=mean([each.small_memory for each in sources]),
        dense_time=mean([each.dense_time for each in sources]),
        naive=mean([each.naive for each in sources]),
        interval_coverage=float(np.mean(covered)) if covered else None,
        oom_rows=len(failed),
        oom_called_fitting=sum(_called_fitting(rows[place], predicted.device.high[place]) for place in failed),
        regret=_sweeps(rows, kept, predicted.seconds.value),
    )


def mean(each: Sequence[Errors]) -> Errors:
    """Over families that have rows, each with the same weight; rows are counted."""
    present = [one for one in each if one.rows]

    def over(values: list[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return float(np.mean(numbers)) if numbers else None

    return Errors(
        rows=sum(one.rows for one in present), median=over([one.median for one in present]),
        p90=over([one.p90 for one in present]), bias=over([one.bias for one in present]),
        coverage=over([one.coverage for one in present]),
    )  # fmt: skip


def _called_fitting(row: Row, high_bytes: float) -> bool:
    return row.cluster is not None and bool(high_bytes <= row.cluster.device.hbm_bytes)


def _sweeps(rows: Sequence[Row], kept: Iterable[int], seconds: Floats) -> Sweeps:
    found = [each for places in sweeps(rows, kept) if (each := _regret(rows, places, seconds)) is not None]
    regrets = [each.regret for each in found]
    by_source: dict[str, list[float]] = defaultdict(list)
    for each in found:
        by_source[each.source].append(each.regret)
    return Sweeps(
        count=len(found), median=float(np.median(regrets)) if regrets else None,
        p90=float(np.percentile(regrets, 90)) if regrets else None,
        by_source={name: float(np.median(each)) for name, each in sorted(by_source.items())},
        sweeps=tuple(sorted(found, key=lambda each: -each.regret)),
    )  # fmt: skip


def sweeps(rows: Sequence[Row], kept: Iterable[int]) -> list[list[int]]:
    """Places of timed rows that share source, model, batch, precision and cluster, where they are enough."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place in kept:
        row = rows[place]
        if row.workload is not None and row.measured_seconds is not None:
            work = row.workload
            key = (
                row.family,
                work.arch,
                work.sequence_length,
                work.global_batch,
                work.precision,
                work.trainable,
                row.cluster,
            )
            alike[key].append(place)
    return [places for places in alike.values() if len(places) >= SWEEP_PLANS]


def _regret(rows: Sequence[Row], places: list[int], seconds: Floats) -> Regret | None:
    """Plans that were measured more than once count once, by their median; None where too few are left."""
    runs: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place in places:
        runs[_plan(rows[place])].append(place)
    if len(runs) < SWEEP_PLANS:
        return None
    measured = [float(np.median([rows[place].measured_seconds for place in same])) for same in runs.values()]
    guessed = [float(np.median(seconds[same])) for same in runs.values()]
    if not np.isfinite(guessed).all():
        return None
    row, chosen, best = rows[places[0]], measured[int(np.argmin(guessed))], min(measured)
    cluster = row.cluster.name if row.cluster else ""
    return Regret(row.source, row.model, cluster, len(runs), chosen, best, chosen / best - 1)


def _plan(row: Row) -> tuple[object, ...]:
    stack = row.workload.stack if row.workload else None
    candidate = row.candidate
    degrees = tuple(array.tolist()[0] for array in vars(candidate).values()) if candidate is not None else ()
    return (stack, *degrees)


def rotated(
    rows: Sequence[Row], refit: Callable[[Sequence[Row]], Callable[[Sequence[Row]], Predictions]]
) -> Predictions:
    """Each family predicted by a model that was fitted on all the others.

    refit: rows to fit on -> a function from rows to their predictions.
    """
    seconds, held, device = (Interval.absent(len(rows)) for _ in range(3))
    problems: dict[int, str] = {}
    for family in sorted({row.family for row in rows}):
        places = [place for place, row in enumerate(rows) if row.family == family]
        fitted = refit([row for row in rows if row.family != family])
        found = fitted([rows[place] for place in places])
        seconds.put(places, found.seconds)
        held.put(places, found.held)
        device.put(places, found.device)
        problems |= {places[inner]: reason for inner, reason in found.problems.items()}
    return Predictions(seconds, held, device, problems)
