"""Beside the loop, once a process was told to stop: the loop saves at its next step, and this watches the clock.

Half of the notice is given to the loop. Where nothing was trained since the last save there is nothing to wait for (a
compilation, say): the process ends. Else the loop goes on to its save, and a late one is told while that can be done.
"""

import os
import signal
import threading
from collections.abc import Callable

from shardwise.errors import EXIT_REQUEUE
from shardwise.events.values import Event, FlushLate, Stopped
from shardwise.resilience.budget import Budget
from shardwise.train.failure import Where


class Stopping:
    """Follows a TERM or USR1 from its arrival on; a Ctrl-C has no notice, its person waits or presses again."""

    def __init__(
        self, budget: Budget, where: Where, steps: Callable[[], tuple[int, int]], say: Callable[[Event], None]
    ) -> None:
        """`steps`: the newest that is trained, and that is committed. `say`: where an event goes, from any thread."""
        self.budget = budget
        self._where, self._steps, self._say = where, steps, say
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, number: int) -> None:
        """A signal came. Called by a thread that must not wait."""
        if number != signal.SIGINT and self._thread is None:
            self._thread = threading.Thread(target=self._follow, daemon=True, name="shardwise-stopping")
            self._thread.start()

    def end(self) -> None:
        """The loop has saved, or ended otherwise. Idempotent."""
        self._over.set()

    def _follow(self) -> None:
        half = self.budget.seconds / 2
        if self._over.wait(half):
            return
        trained, saved = self._steps()
        if trained == saved:
            self._say(Stopped(step=saved, reason="signal", exit_code=EXIT_REQUEUE))
            os._exit(EXIT_REQUEUE)
        if self._over.wait(half):
            return
        trained, saved = self._steps()
        self._say(
            FlushLate(
                step=trained,
                saved_step=saved,
                phase=self._where.phase,
                notice_seconds=self.budget.seconds,
                source=self.budget.source,
            )
        )
