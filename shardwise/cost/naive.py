"""The naive model of a dense model's time: one utilisation for each kind of recompute, fitted on other families."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from shardwise.cost.candidates import RECOMPUTE
from shardwise.cost.predicting import Interval
from shardwise.cost.published import Row

# Full recompute runs the forward pass once more: 3 of 4 parts of the FLOPs count.
FULL_SHARE = 0.75


def seconds(rows: Sequence[Row]) -> Interval:
    """Of every timed row of a dense model, from rows of other families; without intervals. NaN elsewhere."""
    used = {place: share for place, row in enumerate(rows) if (share := utilisation(row)) is not None}
    by_family: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for place, share in used.items():
        by_family[rows[place].family][kind(rows[place])].append(share)
    centres = {name: {key: median(shares) for key, shares in kinds.items()} for name, kinds in by_family.items()}
    found = Interval.absent(len(rows))
    for place, share in used.items():
        row = rows[place]
        fitted = fit({name: kinds for name, kinds in centres.items() if name != row.family}, kind(row))
        if fitted is not None and row.measured_seconds is not None:
            found.value[place] = row.measured_seconds * share / fitted
    return found


def fit(centres: Mapping[str, Mapping[str, float]], asked: str) -> float | None:
    """The median over families of their medians for this kind; of all kinds where no family has it."""
    same = [kinds[asked] for kinds in centres.values() if asked in kinds]
    if same:
        return median(same)
    shares = [pair for kinds in centres.values() for pair in kinds.items()]
    every = [share / (FULL_SHARE if name == "full" else 1) for name, share in shares]
    return median(every) * (FULL_SHARE if asked == "full" else 1) if every else None


def kind(row: Row) -> str:
    """Of recompute, or that it is not known."""
    if row.candidate is None or "recompute" in row.unknown:
        return "unknown"
    return RECOMPUTE[int(row.candidate.recompute[0])]


def utilisation(row: Row) -> float | None:
    """Measured FLOPs a second over the dense peak; None where that is not known, or the model has experts."""
    if row.workload is None or row.cluster is None or row.candidate is None or row.measured_seconds is None:
        return None
    if row.workload.arch.experts is not None:
        return None
    gpu, precision = row.cluster.device, row.workload.precision
    peak = gpu.dense_fp8_flops_per_second if precision == "fp8" else gpu.peak_flops_per_second(precision)
    if peak is None:
        return None
    flops = row.workload.arch.flops_per_token(row.workload.sequence_length) * row.workload.tokens
    return float(flops / (row.measured_seconds * peak * np.prod(row.candidate.world)))
