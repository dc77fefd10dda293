"""Fit the constants of the time model to measured runs, every family the same weight, and score families left out.

    python benchmarks/fit_cost.py RUNS.csv            what the committed constants reach, by family
    python benchmarks/fit_cost.py RUNS.csv --rotate   each family predicted by a fit on all the others
    python benchmarks/fit_cost.py RUNS.csv --write    fit on all and write shardwise/cost/calibration.toml

The fit is a coordinate search in the logarithm of each constant, from the committed values, with a pull towards the
value it had before any fit: deterministic, no random numbers. The loss of a family is the mean of the error's logarithm
(as an absolute value, so medians count more than outliers) and a part of its 90th percentile.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.cost import calibration
from shardwise.cost.calibration import TimeConstants
from shardwise.cost.candidates import Candidates
from shardwise.cost.micro_time import Inputs
from shardwise.cost.predicting import Interval, Predictions, predict
from shardwise.cost.published import Row, rows
from shardwise.cost.scored_model import memory_model
from shardwise.cost.scoring import rotated, score
from shardwise.cost.shape import stacked
from shardwise.cost.step import seconds, step, total
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster
from shardwise.report import score as report

Floats = NDArray[np.float64]
# Of a family at most so many rows, evenly spaced: its weight is the same whatever their number.
MOST_ROWS = 60
# Not of a step's seconds, or of nothing that these runs tell apart.
HELD = (
    "host_", "disk_bytes", "interval_", "unknown_network", "launch_seconds",
    "issue_share", "power_", "wave_sharpness", "depth_ramp", "operand_passes",
)  # fmt: skip
SHARES = ("_share", "_hidden", "_window", "sharpness", "kernels_compiled")


@dataclass(frozen=True)
class Runs:
    """Measured runs as inputs stacked into arrays."""

    inputs: Inputs
    measured: Floats
    family: NDArray[np.str_]
    rows: tuple[Row, ...]

    def only(self, keep: NDArray[np.bool_]) -> "Runs":
        return load([row for row, kept in zip(self.rows, keep, strict=True) if kept])


def load(found: Sequence[Row]) -> Runs:
    usable, each = [], []
    for row in found:
        if row.measured_seconds and row.workload and row.cluster and row.candidate:
            usable.append(row)
            each.append(Inputs.of(row.workload, row.cluster, row.candidate))
    whole = stacked(each)
    measured = np.array([row.measured_seconds for row in usable])
    return Runs(whole, measured, np.array([row.family for row in usable]), tuple(usable))


def thinned(found: Sequence[Row]) -> list[Row]:
    kept = []
    for family in sorted({row.family for row in found}):
        same = [row for row in found if row.family == family and row.measured_seconds and row.workload]
        picked = np.unique(np.linspace(0, len(same) - 1, min(len(same), MOST_ROWS)).astype(int))
        kept += [same[i] for i in picked]
    return kept


def predicted(runs: Runs, known: TimeConstants) -> Floats:
    return np.broadcast_to(total(seconds(runs.inputs, known)), runs.measured.shape)


def loss_of(runs: Runs, known: TimeConstants, prior: TimeConstants, weights: dict[str, float]) -> float:
    off = np.minimum(np.abs(np.log(predicted(runs, known) / runs.measured)), 1.0)
    each = []
    for family in weights:
        mine = off[runs.family == family]
        each.append(0.5 * np.mean(mine) + 0.3 * np.median(mine) + 0.2 * np.percentile(mine, 90))
    pull = sum((np.log(getattr(known, n) / getattr(prior, n))) ** 2 for n in fitted_names())
    return float(np.average(each, weights=list(weights.values()))) + PULL * float(pull)


# Strong enough that what one family alone says does not move a constant far: of 0.003, 0.006 and 0.01 this one was best
# on families left out.
PULL = 0.01
# Runs on test nodes, of toy models: four fifths of what they take is the host's, and repeats of one differ by a third.
# They would set the host's constants for all others, so they count a tenth: enough to say what a host takes where the
# other families say nothing of it.
TEST_NODE_WEIGHT = 0.1


def weight_of(runs: Runs, family: str) -> float:
    """Of a family in the mean of losses."""
    mine = [row for row in runs.rows if row.family == family]
    return float(np.mean([TEST_NODE_WEIGHT if "test_node" in row.unknown else 1.0 for row in mine]))


def fitted_names() -> list[str]:
    return [n for n in TimeConstants.__struct_fields__ if not n.startswith(HELD)]


# Eight bits take half the energy a FLOP or somewhat less, so their products throttle at most so much less: the fastest
# measured ones reach no larger a share of their peak than 16-bit ones (hardware.csv). Unbounded, runs in fp8 on their
# vendor's own machines would make every other fp8 run 2.8 times as fast as in bf16.
MOST_LOW_PRECISION_SHARE = 1.2


def bounded(name: str, value: float) -> float:
    if name == "low_precision_share":
        return float(min(value, MOST_LOW_PRECISION_SHARE))
    if any(word in name for word in SHARES) and name != "network_share_per_doubling":
        return float(np.clip(value, 1e-3, 0.98 if name != "matmul_share" else 1.0))
    return float(value)


def fit(runs: Runs, start: TimeConstants, prior: TimeConstants, rounds: int = 12) -> TimeConstants:
    weights = {family: weight_of(runs, family) for family in sorted(set(runs.family.tolist()))}
    known, best = start, loss_of(runs, start, prior, weights)
    steps = dict.fromkeys(fitted_names(), 0.2)
    for _ in range(rounds):
        before = best
        for name in steps:
            for sign in (1, -1):
                trial = bounded(name, getattr(known, name) * np.exp(sign * steps[name]))
                changed = msgspec.structs.replace(known, **{name: trial})
                value = loss_of(runs, changed, prior, weights)
                if value < best - 1e-7:
                    known, best = changed, value
                    steps[name] *= 1.5
                    break
            else:
                steps[name] *= 0.5
        if before - best < 1e-5 and max(steps.values()) < 0.01:
            break
    return known


def before_any_fit() -> TimeConstants:
    """What the constants were; the widths of intervals as committed, since no fit moves them."""
    prior = calibration.values(calibration.calibration().time, TimeConstants, prior=True)
    committed = calibration.time_constants()
    widths = [name for name in TimeConstants.__struct_fields__ if name.startswith("interval_")]
    return msgspec.structs.replace(prior, **{name: getattr(committed, name) for name in widths})


def refitted(others: Sequence[Row], start: TimeConstants, rounds: int) -> Callable[[Sequence[Row]], Predictions]:
    """Predictions by constants fitted on these rows alone; memory by the committed ones, fitted elsewhere."""
    known = fit(load(thinned(others)), start, start, rounds)

    def time(workload: Workload, cluster: Cluster, plans: Candidates) -> Interval:
        found = step(workload, cluster, plans, known)
        return Interval(found.seconds, found.low, found.high)

    return lambda asked: predict(asked, time, memory_model)


def table(runs: Runs, value: Floats) -> dict[str, tuple[int, float, float, float]]:
    ratio = value / runs.measured
    out = {}
    for family in sorted(set(runs.family.tolist())):
        r = ratio[runs.family == family]
        off = np.abs(r - 1)
        out[family] = (len(r), float(np.median(off)), float(np.percentile(off, 90)), float(np.median(r) - 1))
    return out


def show(found: dict[str, tuple[int, float, float, float]]) -> None:
    for name, (n, median, p90, bias) in found.items():
        print(f"{name:18s} {n:5d}  median {median:6.1%}  p90 {p90:6.1%}  bias {bias:+6.1%}")
    medians, tails = ([row[at] for row in found.values()] for at in (1, 2))
    print(f"{'mean':18s}        median {np.mean(medians):6.1%}  p90 {np.mean(tails):6.1%}")


def write(known: TimeConstants, on: str, path: Path) -> None:
    text = path.read_text()
    for name in fitted_names():
        of_it = rf"(\[time\.{name}\]\nvalue = )[^\n]*(\nprior = [^\n]*\nunit = [^\n]*\nfitted_on = )[^\n]*"
        text = re.sub(of_it, rf'\g<1>{getattr(known, name):.4g}\g<2>"{on}"', text)
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rotate", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true", help="of --rotate: the score as JSON")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    found = rows(arguments.runs)
    committed = calibration.time_constants()
    start = before_any_fit()
    everything = load(found)
    if arguments.rotate:
        left_out = rotated(found, lambda others: refitted(others, start, arguments.rounds))
        scored = score(found, left_out)
        print(report.as_json(scored) if arguments.json else report.text(scored))
        return
    known = committed
    if arguments.write:
        known = fit(load(thinned(found)), start, start, arguments.rounds)
        on = f"{arguments.runs.name}: {', '.join(sorted(set(everything.family.tolist())))}"
        write(known, on, Path(calibration.__file__).with_suffix(".toml"))
    show(table(everything, predicted(everything, known)))


if __name__ == "__main__":
    main()
