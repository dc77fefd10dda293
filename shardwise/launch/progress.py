"""Where a run stands, from its events: what is trained, what of it is committed, and what an end here would lose."""

from typing import NamedTuple

from shardwise.events.values import AnyEvent, RolledBack, RunStarted, Saved, Step


class Lost(NamedTuple):
    """Steps trained and not committed, and the seconds that they took."""

    steps: int
    seconds: float


class Progress:
    """Follows a run over its attempts, event by event."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.committed = 0
        self.gained_seconds = 0.0
        self._reached = 0
        self._open: list[tuple[int, float]] = []

    def begin(self) -> None:
        """Another attempt: nothing of it is trained yet, and what the earlier ones reached is no gain any more."""
        self._reached = max(self._reached, self.step or 0)
        self.step, self.gained_seconds, self._open = None, 0.0, []

    def take(self, event: AnyEvent) -> None:
        if isinstance(event, RunStarted):
            self.committed, self._open = event.step, []
        elif isinstance(event, Step):
            self.step = event.step
            self._open.append((event.step, event.step_seconds))
        elif isinstance(event, Saved):
            self.committed = max(self.committed, event.step)
            kept = [one for one in self._open if one[0] <= event.step]
            self.gained_seconds += sum(seconds for step, seconds in kept if step > self._reached)
            self._open = self._open[len(kept) :]
        elif isinstance(event, RolledBack):
            self.committed = event.step
            self._open = [one for one in self._open if one[0] <= event.step]

    @property
    def lost(self) -> Lost:
        """What is trained again if the attempt ends here."""
        return Lost(len(self._open), sum(seconds for _, seconds in self._open))
