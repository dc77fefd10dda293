"""How long a call takes on this rank's device: the median of as many as a budget of seconds allows."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

LEAST_CALLS = 3
# A call much shorter than this is timed many at once: a clock and a wait for the device cost microseconds.
LEAST_SAMPLE_SECONDS = 2e-4


def seconds_a_call(call: Callable[[], Any], budget: float, *, together: Callable[[], None] | None = None) -> float:
    """The median seconds of a call. At least LEAST_CALLS samples, and one call before them that warms up.

    together: a barrier, called before every sample: of collectives, which start when the last rank comes.
    """
    started = time.perf_counter()
    once = _sample(call, 1)
    once = min(once, _sample(call, 1))
    repeats = max(1, round(LEAST_SAMPLE_SECONDS / max(once, 1e-9)))
    found: list[float] = []
    while len(found) < LEAST_CALLS or time.perf_counter() - started < budget:
        if together is not None:
            together()
        found.append(_sample(call, repeats))
    return statistics.median(found)


def calls_in(call: Callable[[], Any], calls: int, *, together: Callable[[], None]) -> float:
    """The median seconds of exactly so many calls, for collectives: every rank has to make as many.

    One more is made before, which warms up.
    """
    call()
    found: list[float] = []
    for _ in range(calls):
        together()
        found.append(_sample(call, 1))
    return statistics.median(found)


def _sample(call: Callable[[], Any], repeats: int) -> float:
    _wait()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait()
    return (time.perf_counter() - started) / repeats


def _wait() -> None:
    """For what the device still does; a CPU's work is done when the call returns."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
