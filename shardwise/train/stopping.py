"""Beside the loop, once a process was told to stop: the loop saves at its next step, and this watches the clock.

Half of the notice is given to the loop. Where nothing was trained since the last save there is nothing to wait for (a
compilation, say): the process ends. Else the loop goes on to its save, and a late one is told while that can be done.
"""

import os
import signal
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from shardwise import ranks
from shardwise.errors import EXIT_REQUEUE
from shardwise.events.values import AnyEvent, Event, FlushLate, Saved, Step, Stopped
from shardwise.plan.plan import Plan
from shardwise.resilience.budget import Budget, Flush
from shardwise.resilience.signals import StopSignals
from shardwise.train.failure import Where

# Weights and AdamW's two moments in fp32, each once: what a checkpoint of a decoder holds for a parameter.
STATE_BYTES = 12


def expected(
    plan: Plan, predicted_step: float | None, earlier: Sequence[Sequence[AnyEvent]]
) -> tuple[Flush | None, str]:
    """How long a stop will take, and from what that is known: earlier attempts, or the plan on a measured machine."""
    events = [event for attempt in earlier for event in attempt]
    steps = [event.step_seconds for event in events if isinstance(event, Step)]
    saves = [event.seconds for event in events if isinstance(event, Saved)]
    if steps and saves:
        return Flush(statistics.median(steps), statistics.median(saves)), "as in earlier attempts"
    measured = plan.cluster.measured
    rate = measured.disk_write_bytes_per_second if measured is not None else None
    if predicted_step is None or plan.arch is None or rate is None:
        return None, ""
    return Flush(predicted_step, plan.arch.parameters() * STATE_BYTES / rate), "predicted"


class Asked(NamedTuple):
    """What the ranks agreed on of the signals that any of them got."""

    interrupted: bool = False
    terminated: bool = False

    def __bool__(self) -> bool:
        return self.interrupted or self.terminated


def flags(signals: StopSignals | None) -> tuple[float, float]:
    """This rank's part of an agreement: SIGINT; SIGTERM or SIGUSR1."""
    received = None if signals is None else signals.received
    return float(received == signal.SIGINT), float(received not in (None, signal.SIGINT))


class Asking:
    """Whether any rank was told to stop, asked again and again: each answer is the one to the question before, so that
    nobody waits for it.
    """

    def __init__(self, signals: StopSignals | None) -> None:
        """`signals` absent: nobody is told anything, as after a run's end."""
        self.signals = signals
        self.answer = Asked()
        self._wait: Callable[[], torch.Tensor] | None = None

    def told(self) -> Asked:
        """Collective, as often on every rank."""
        self.close()
        self._wait = ranks.begin_sum(torch.tensor(flags(self.signals), device=ranks.wire_device()))
        return self.answer

    def now(self) -> Asked:
        """An answer to the question of now. Collective."""
        self.told()
        return self.close()

    def close(self) -> Asked:
        """The answer to the last question. Collective, as `told`."""
        if self._wait is not None:
            self.answer, self._wait = Asked(*(count > 0 for count in self._wait().tolist())), None
        return self.answer


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
