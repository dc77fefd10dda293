"""Spikes of the loss: what is far above the loss of the steps before, and what the run then does about it."""

import math
import statistics
from collections import deque
from typing import Any, NamedTuple

# Of the latest so many losses, the median is the usual one and the median distance from it the usual spread.
WINDOW, LEAST = 200, 30
# A normal variable is 10 spreads (1.4826 median distances are a standard deviation) above its mean once in 10^23 draws.
# Losses have heavier tails: what lasts so many steps is more than a hard sample.
TIMES, IN_A_ROW = 10.0, 3
_NORMAL = 1.4826
# Losses that hardly differ would make a spike of nothing: the spread is at least this part of the usual loss.
_LEAST_SPREAD = 0.01


class Spike(NamedTuple):
    """A step whose loss is `times` usual spreads above the `usual` one; the spike began at step `since`."""

    step: int
    since: int
    loss: float
    usual: float
    times: float

    @property
    def lasting(self) -> bool:
        return self.step - self.since + 1 >= IN_A_ROW


class Spikes:
    """Watches the agreed loss of every step, so every rank sees the same. State goes into checkpoints."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._since: int | None = None

    def look(self, step: int, loss: float) -> Spike | None:
        """The spike that this step belongs to, or None. What is not finite is not looked at here."""
        if not math.isfinite(loss):
            return None
        if len(self._recent) >= LEAST:
            usual = statistics.median(self._recent)
            spread = _NORMAL * statistics.median(abs(one - usual) for one in self._recent)
            times = (loss - usual) / max(spread, _LEAST_SPREAD * abs(usual), 1e-12)
            if times > TIMES:
                self._since = step if self._since is None else self._since
                return Spike(step, self._since, loss, usual, times)
        # A spike's own losses are not part of what is usual.
        self._since = None
        self._recent.append(loss)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._since = state["since"]
