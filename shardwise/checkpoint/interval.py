"""How often to save: given, or from what a save costs, how long it takes to be durable and how often runs die.

T = max(L, sqrt(2 c M)): c the stall of a save, L its lag until it is committed, M the mean time between failures that
lose work. Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974); the
lower bound because one save is in flight at a time.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from shardwise.events.values import AnyEvent, RunStarted, Stopped

DAY = 86_400.0
# Failures of 1,000 node-days: between Llama 3's 405B run (419 of 16,384 GPUs in 54 days: 3.8) and Meta's research
# clusters (one in 1.8 h on 2,048 nodes: 6.5).
FAILURES_PER_1000_NODE_DAYS = 5.0
# Until a save was measured; and never rarer than this, whatever the mathematics says.
FIRST_SECONDS, MOST_STEPS = 600.0, 500
# Where a stop has no time to save, each preemption loses what was trained since the last one: no more than this.
UNFLUSHED_SECONDS = 120.0


def interval_seconds(stall: float, lag: float, between_failures: float) -> float:
    """The interval that loses least, in seconds; all three in seconds."""
    return max(lag, math.sqrt(2 * stall * between_failures))


def between_failures(nodes: int, seconds: float, failures: int) -> float:
    """Seconds between failures that lose work, of a run that trained `seconds` and met `failures`.

    The published rate for so many nodes counts as one failure seen before: the run's own record takes over as it grows.
    """
    published = 1000.0 * DAY / (FAILURES_PER_1000_NODE_DAYS * max(nodes, 1))
    return (published + seconds) / (1 + failures)


def record_of(attempts: Sequence[Sequence[AnyEvent]]) -> tuple[float, int]:
    """Seconds that earlier attempts ran, and how many of them ended without saying so: those lost work."""
    seconds, failures = 0.0, 0
    for events in attempts:
        began = next((event.time for event in events if isinstance(event, RunStarted)), None)
        if began is not None:
            seconds += events[-1].time - began
            failures += not any(isinstance(event, Stopped) for event in events)
    return seconds, failures


class Interval:
    """When the next save is due. With "auto" one rank's clock decides, and its flag rides in the step's agreement."""

    def __init__(
        self,
        every_steps: int | Literal["auto"],
        *,
        nodes: int = 1,
        record: tuple[float, int] = (0.0, 0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`record`: seconds that earlier attempts ran, and how many of them died."""
        self.every_steps = every_steps
        self.seconds = FIRST_SECONDS
        self._clock = clock
        self._began = self._saved = clock()
        self._last_step = 0
        self._nodes, self._record = nodes, record

    def started(self, step: int) -> None:
        """Training goes on after `step`."""
        self._saved, self._last_step = self._clock(), step

    def saved(self, step: int, stall: float, lag: float, flushes: bool = True) -> None:
        """A save of the state after `step` held training up for `stall` seconds and was committed after `lag`.

        `flushes`: whether a stop's notice is long enough for such a save.
        """
        self._saved, self._last_step = self._clock(), step
        trained, failures = self._record
        mean = between_failures(self._nodes, trained + self._clock() - self._began, failures)
        self.seconds = interval_seconds(stall, lag, mean)
        if not flushes:
            self.seconds = max(lag, min(self.seconds, UNFLUSHED_SECONDS))

    def asks(self) -> bool:
        """Of the rank that decides, before a step's agreement: whether "auto" wants a save after this step."""
        return self.every_steps == "auto" and self._clock() - self._saved >= self.seconds

    def due(self, step: int, asked: bool) -> bool:
        """Whether the state after `step` is to be saved; `asked` is what the ranks agreed that `asks` said."""
        if self.every_steps == "auto":
            return asked or step - self._last_step >= MOST_STEPS
        return self.every_steps > 0 and step % self.every_steps == 0
