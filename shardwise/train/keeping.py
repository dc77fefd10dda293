"""When a run saves, how its saves ended, and whether a stop has the time for one."""

from shardwise import ranks
from shardwise.checkpoint.checkpointer import Checkpointer, SavedCheckpoint
from shardwise.checkpoint.interval import Interval
from shardwise.resilience.budget import Budget, Flush, fits, told
from shardwise.train.failure import WHERE
from shardwise.train.journal import Journal
from shardwise.train.reading import Reading
from shardwise.units import format_seconds


class Keeping:
    """The saves of one run. `step` is always the newest that is trained."""

    def __init__(
        self, checkpointer: Checkpointer, interval: Interval, budget: Budget, reading: Reading, journal: Journal
    ) -> None:
        self._checkpointer, self._interval, self._budget = checkpointer, interval, budget
        self._reading, self._journal = reading, journal
        self._flushes = True

    @property
    def wants(self) -> tuple[bool, bool]:
        """This rank's part of a step's agreement: whether its clock asks for a save, and whether one is under way."""
        return ranks.is_main() and self._interval.asks(), self._checkpointer.pending

    def started(self, step: int) -> None:
        """Training goes on after `step`."""
        self._interval.started(step)

    def after(self, step: int, *, asked: bool, pending: bool, last: bool) -> None:
        """What is due after a step: the end of a save is judged where all ranks know it, and the next is begun.

        `asked` and `pending` are agreed. Collective. Raises: CheckpointError, on every rank.
        """
        if not pending:
            self._learn(self._checkpointer.settle())
        if not last and self._interval.due(step, asked):
            WHERE.phase = "save"
            self._learn(self._checkpointer.settle())
            self._learn(self._checkpointer.begin(step, "policy", samples=self._reading.samples))
            self._interval.started(step)

    def finish(self, step: int, why: str) -> None:
        """The state after `step` is committed when this returns. Collective. Raises: CheckpointError, on every rank."""
        WHERE.phase = "save"
        self._learn(self._checkpointer.finish(step, why, samples=self._reading.samples))

    def go_back(self, before: int, why: str) -> int:
        """To the newest checkpoint from before this step; returns its step. Collective. Raises: CheckpointError."""
        WHERE.phase = "resume"
        self._reading.begin_again()
        step = self._checkpointer.go_back(before, why)
        self._interval.started(step)
        return step

    def _learn(self, saved: SavedCheckpoint | None) -> None:
        """From a save: how often to save, and whether a stop's notice is long enough; told once when it is not."""
        if saved is None:
            return
        flush = Flush(self._journal.longest_step, saved.seconds)
        flushes = fits(flush, self._budget)
        self._interval.saved(saved.step, saved.stall_seconds, saved.seconds, flushes=flushes)
        if not flushes and self._flushes:
            loses = f"what was trained since the last save, up to {format_seconds(self._interval.seconds)} of work"
            self._journal.fallback("a stop may come too soon for its save", told(flush, self._budget, loses))
        self._flushes = flushes
