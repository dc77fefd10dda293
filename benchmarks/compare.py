"""Ratios with their intervals: two things measured in alternating blocks on one machine, in one run."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Two-sided 95 % points of Student's t by degrees of freedom; 1.96 beyond the table would be too narrow for few blocks.
T95 = {7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093, 23: 2.069, 31: 2.040, 63: 1.998, 127: 1.979}


class Ratio(NamedTuple):
    """The geometric mean of ours / theirs over the blocks, and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Block by block, in logarithms, so that drift of the machine cancels. At least 8 pairs."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if len(logs) < 8:
        raise ValueError(f"{len(logs)} blocks are too few for an interval; take 8 or more")
    freedom = max(df for df in T95 if df <= len(logs) - 1)
    mean, half = statistics.fmean(logs), T95[freedom] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
