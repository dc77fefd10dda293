"""The live line: what a person reads while a run goes on. A line that redraws itself on a terminal, else a
plain line every few seconds."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from shardwise.events.values import (
    AttemptEnded,
    Compared,
    DataPrepared,
    Evaluated,
    Event,
    Failed,
    Fallback,
    FlushLate,
    Goodput,
    LossSpike,
    NonFiniteLoss,
    Resumed,
    RolledBack,
    RunStarted,
    Saved,
    SettingsChanged,
    Step,
    StopNotice,
    Stopped,
)
from shardwise.units import format_bytes, format_count, format_seconds

# On a terminal the line is redrawn at most this often; elsewhere a line is written.
REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 10.0


def progress(event: Step) -> str:
    """`step 120/600  loss 1.832  41.2k tokens/s  MFU 23.1 %  2 min 05 s left`, as far as known."""
    parts = [f"step {event.step}" if event.steps is None else f"step {event.step}/{event.steps}"]
    parts.append(f"loss {event.loss:.4g}")
    if event.tokens_per_second is not None:
        parts.append(f"{format_count(event.tokens_per_second)} tokens/s")
    else:
        parts.append(f"{format_seconds(event.step_seconds)} a step")
    if event.mfu is not None:
        parts.append(f"MFU {event.mfu:.1%}")
    if event.eta_seconds is not None:
        parts.append(f"{format_seconds(event.eta_seconds)} left")
    return "  ".join(parts)


def sentence(event: Event) -> str | None:
    """A line that stays, for the events that a person wants to see; None for the others."""
    if isinstance(event, RunStarted):
        return f"{event.run}, attempt {event.attempt}: {event.plan} on {event.device}"
    if isinstance(event, DataPrepared):
        return _data(event)
    if isinstance(event, Resumed):
        return "\n".join((f"resumed after step {event.step} from {event.path}", *event.told))
    if isinstance(event, Evaluated):
        return f"step {event.step}: held-out loss {event.loss:.4f}{_metrics(event.metrics)}"
    if isinstance(event, Saved):
        took = format_seconds(event.seconds)
        return f"step {event.step}: saved {format_bytes(event.bytes)} in {took}, {event.path}"
    if isinstance(event, NonFiniteLoss):
        why = f"loss {event.loss}, gradient norm {event.grad_norm}"
        return f"step {event.step}: {why}: update skipped on all ranks ({event.in_a_row} in a row)"
    if isinstance(event, LossSpike):
        return (
            f"step {event.step}: loss {event.loss:.4g} is {event.times:.0f} spreads above the usual {event.usual:.4g}"
        )
    if isinstance(event, RolledBack):
        over = f"; {event.passed_over} samples are passed over" if event.passed_over else ""
        return f"step {event.from_step}: back to step {event.step}, {event.path} ({event.why}){over}"
    if isinstance(event, StopNotice):
        return _notice(event)
    if isinstance(event, FlushLate):
        return _late(event)
    if isinstance(event, Goodput):
        return f"time went into: {went_into(event)}"
    if isinstance(event, Fallback):
        return f"{event.what} ({event.why})"
    if isinstance(event, SettingsChanged):
        return f"changed: {event.key} was {event.before}, is {event.after}"
    if isinstance(event, Failed):
        return f"rank {event.rank} failed at step {event.step} ({event.phase})"
    if isinstance(event, Compared):
        return compared(event)
    if isinstance(event, AttemptEnded):
        return _attempt(event)
    if isinstance(event, Stopped) and event.reason == "signal":
        return f"stopped after step {event.step}, saved; the same command goes on"
    return None


def went_into(event: Goodput) -> str:
    """`useful 96.1 %, replayed 2.3 %, stalled 0.9 %, restarting 0.7 % of 1 h 20 min in 3 attempts, 120 steps lost`."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in event.shares().items())
    attempts = f" in {event.attempts} attempts, {event.lost_steps} steps lost" if event.attempts > 1 else ""
    return f"{shares} of {format_seconds(event.total)}{attempts}"


def _notice(event: StopNotice) -> str:
    notice = f"a stop has {format_seconds(event.notice_seconds)} ({event.source})"
    if event.step_seconds is None or event.save_seconds is None:
        return f"{notice}; how long one takes is known after the first save"
    step, save = format_seconds(event.step_seconds), format_seconds(event.save_seconds)
    line = f"{notice} and takes about {step} for a step and {save} for its save ({event.known})"
    return line if event.fits else f"{line}: each preemption will lose what was trained since the last save"


def _late(event: FlushLate) -> str:
    lost, notice = event.step - event.saved_step, format_seconds(event.notice_seconds)
    return (
        f"the notice of {notice} ({event.source}) is over in {event.phase}, the save is not: {lost} steps since step "
        f"{event.saved_step} are lost if this process is ended now"
    )


def _attempt(event: AttemptEnded) -> str:
    head = f"attempt {event.attempt} ended: {event.error}"
    if event.begins is None:
        return f"{head}; no other begins: {event.then}"
    ranks = "" if event.world is None else f" with {event.world} rank{'s' if event.world > 1 else ''}"
    again = "nothing is lost"
    if event.lost_steps:
        steps = f"{event.lost_steps} steps" if event.lost_steps > 1 else "1 step"
        again = f"{steps} ({format_seconds(event.lost_seconds)}) trained again"
    return f"{head}; attempt {event.begins} begins after step {event.committed}{ranks} ({event.then}), {again}"


def compared(event: Compared) -> str:
    """`predicted 0.21 s a step (80 %: 0.18 to 0.25 s), measured 0.22 s: 0.95 of it, inside; ...`."""
    if event.why_none:
        return f"no prediction: {event.why_none}"
    pairs = (
        ("a step", event.predicted_step_seconds, event.step_seconds_interval, event.measured_step_seconds,
         format_seconds),
        ("memory", event.predicted_memory_bytes, event.memory_bytes_interval, event.measured_memory_bytes,
         format_bytes),
    )  # fmt: skip
    found = [
        _pair(what, predicted, ends, measured, said)
        for what, predicted, ends, measured, said in pairs
        if predicted is not None and ends is not None
    ]
    known = "on a measured machine" if event.probed else "by published numbers: shardwise doctor --measure knows more"
    return f"{'; '.join(found)} ({known})"


def _pair(
    what: str, predicted: float, ends: tuple[float, float], measured: float | None, said: Callable[[float], str]
) -> str:
    text = f"{what}: predicted {said(predicted)} (80 %: {said(ends[0])} to {said(ends[1])})"
    if measured is None:
        return f"{text}, not measured"
    where = "inside" if ends[0] <= measured <= ends[1] else "outside"
    return f"{text}, measured {said(measured)}: {predicted / measured:.2f} of it, {where}"


def _data(event: DataPrepared) -> str:
    size = f"{format_count(event.tokens)} tokens" if event.tokens is not None else f"{event.samples} samples"
    made = "found made" if event.reused else f"made in {format_seconds(event.seconds)}"
    return f"data: {size} of {event.source}, {made}"


def _metrics(metrics: dict[str, float]) -> str:
    return "".join(f", {name} {value:.4g}" for name, value in metrics.items())


class LiveLine:
    """A sink that shows events on a stream: steps in one redrawn line, the rest above it."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._shown_at: float | None = None
        self._line = ""
        self._pending: Step | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self._pending = event
            every = REDRAW_SECONDS if self._terminal else PLAIN_SECONDS
            last = event.step == event.steps
            if last or self._shown_at is None or self._clock() - self._shown_at >= every:
                self._show(event)
            return
        text = sentence(event)
        if text is not None:
            self.above(f"{text}\n")

    def _show(self, event: Step) -> None:
        self._pending, self._shown_at = None, self._clock()
        line = progress(event)
        if self._terminal:
            self._stream.write(f"\r\x1b[2K{line}")
            self._line = line
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def above(self, text: str) -> None:
        """Write text above the line, which is drawn again below whole lines of it."""
        if self._line:
            self._stream.write("\r\x1b[2K")
        self._stream.write(text)
        if self._line and text.endswith("\n"):
            self._stream.write(self._line)
        self._stream.flush()

    def close(self) -> None:
        """Show the latest step and leave the line standing. Idempotent."""
        if self._pending is not None:
            self._show(self._pending)
        if self._line:
            self._stream.write("\n")
            self._stream.flush()
            self._line = ""
