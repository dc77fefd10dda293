"""Predicted against measured memory by family: python benchmarks/memory_model.py RUNS.csv [--rotate] [--fit].

Rows of 5 GB and more. Few constants are fitted: the share that allocators reserve beyond tensors, and the interval.
--rotate fits them on all families but one, and reports that one. Every family has the same weight.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shardwise.cost.calibration import MemoryConstants, calibration, memory_constants, values
from shardwise.cost.memory import Memory, memory
from shardwise.cost.predicting import WIDER
from shardwise.cost.published import Row, rows

SMALLEST = 5e9
INSIDE = 0.8
# A family's own share counts as much as what was believed before.
PRIOR_WEIGHT = 1.0


class Measured(NamedTuple):
    """A row, and what is predicted with constants."""

    row: Row
    held: Memory
    fullest: Memory


def predicted(found: Sequence[Row], known: MemoryConstants) -> list[Measured]:
    kept = []
    for row in found:
        if row.workload is None or row.cluster is None or row.candidate is None:
            continue
        if row.out_of_memory or (row.measured_bytes or 0.0) >= SMALLEST:
            held, fullest = (
                memory(row.workload, row.cluster, row.candidate, rank, known) for rank in (row.measured_rank, "fullest")
            )
            kept.append(Measured(row, held, fullest))
    return kept


def off(one: Measured) -> float:
    """The logarithm of predicted over measured."""
    return float(np.log(one.held.of_kind(one.row.memory_kind)[0] / one.row.measured_bytes))


def by_family(found: Sequence[Measured]) -> dict[str, list[Measured]]:
    of: dict[str, list[Measured]] = {}
    for one in found:
        if (one.row.measured_bytes or 0.0) >= SMALLEST:
            of.setdefault(one.row.family, []).append(one)
    return dict(sorted(of.items()))


def fit(found: Sequence[Row], prior: MemoryConstants) -> MemoryConstants:
    """The reserved share: the mean of the families' medians and of the prior. The interval: as wide as holds INSIDE."""
    bare = msgspec.structs.replace(prior, reserved_share=0.0)
    shares = [prior.reserved_share] * int(PRIOR_WEIGHT)
    for _, mine in by_family(predicted(found, bare)).items():
        told = [one for one in mine if one.row.memory_kind != "allocated"]
        if told:
            missing = [(one.row.measured_bytes - one.held.of_kind(one.row.memory_kind)[0]) / one.held.logical[0]
                       for one in told]  # fmt: skip
            shares.append(max(0.0, float(np.median(missing))))
    known = msgspec.structs.replace(prior, reserved_share=float(np.mean(shares)))
    families = by_family(predicted(found, known))
    widths = np.linspace(0.02, 0.5, 49)
    inside = [coverage(families, msgspec.structs.replace(known, interval_base=width)) for width in widths]
    enough = np.flatnonzero(np.asarray(inside) >= INSIDE)
    return msgspec.structs.replace(known, interval_base=float(widths[enough[0] if len(enough) else -1]))


def coverage(families: dict[str, list[Measured]], known: MemoryConstants) -> float:
    """The mean over families of the share of rows inside the interval, which unknown facts of a row widen."""
    return float(
        np.mean([np.mean([abs(off(one)) <= spread(one, known) for one in mine]) for mine in families.values()])
    )


def spread(one: Measured, known: MemoryConstants) -> float:
    parts = one.held.parts
    share = float((parts["activations"] + parts["logits"] + parts["temporaries"])[0] / one.held.logical[0])
    wider = [WIDER[name][1] for name in one.row.unknown if name in WIDER]  # of memory
    return float(np.sqrt(known.interval_base**2 + (known.interval_activations * share) ** 2 + np.sum(np.square(wider))))


def show(families: dict[str, list[Measured]], known: MemoryConstants, title: str) -> None:
    for family, mine in families.items():
        far = np.asarray([np.expm1(off(one)) for one in mine])
        inside = coverage({family: mine}, known)
        print(f"{title:14} {family:16} {len(mine):4} rows  median {np.median(np.abs(far)):6.1%}  "
              f"p90 {np.quantile(np.abs(far), 0.9):6.1%}  bias {np.median(far):+6.1%}  inside {inside:4.0%}  "
              f"reserved_share {known.reserved_share:.3f}  interval_base {known.interval_base:.2f}")  # fmt: skip


def called_fitting(found: Sequence[Measured]) -> int:
    return sum(
        bool(one.row.out_of_memory and one.fullest.high[0] <= one.row.cluster.device.hbm_bytes)
        for one in found
        if one.row.cluster is not None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rotate", action="store_true", help="fit without each family in turn")
    parser.add_argument("--fit", action="store_true", help="print what all families together would give")
    arguments = parser.parse_args()
    found, prior = list(rows(str(arguments.runs))), values(calibration().memory, MemoryConstants, prior=True)
    whole = predicted(found, memory_constants())
    show(by_family(whole), memory_constants(), "committed")
    print(f"out-of-memory rows called fitting: {called_fitting(whole)}")
    if arguments.fit:
        known = fit(found, prior)
        show(by_family(predicted(found, known)), known, "all fitted")
    if arguments.rotate:
        for family in by_family(whole):
            known = fit([row for row in found if row.family != family], prior)
            left = predicted([row for row in found if row.family == family], known)
            show(by_family(left), known, "left out")
            print(f"{'':14} out-of-memory rows called fitting: {called_fitting(left)}")


if __name__ == "__main__":
    main()
