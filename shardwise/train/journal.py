"""What the loop tells: every event of a run, from rank 0, with speed, utilisation and time left worked out."""

import statistics
import time
from collections import deque

from shardwise import ranks
from shardwise.environment import watched
from shardwise.events import values as happened
from shardwise.events.goodput import goodput
from shardwise.events.live import LiveLine
from shardwise.events.reader import read
from shardwise.events.sinks import Events, EventSink
from shardwise.events.writer import EventWriter
from shardwise.inputs.recipe_changes import Change
from shardwise.launch.run_folder import RunState, events_path
from shardwise.plan.mesh import AXES
from shardwise.plan.plan import Plan
from shardwise.plan.prediction import predict, why_none
from shardwise.profiling.utilization import model_flops_utilization
from shardwise.resilience.budget import Budget, Flush, fits
from shardwise.train.evaluate import Evaluation
from shardwise.train.spikes import Spike

# The first steps pay for allocation, caches and compilation; speed is a mean over this many of the latest.
SPEED_WINDOW_STEPS = 20
# A prediction is held against the median of the latest so many steps, without the first ones of the attempt.
WARM_UP_STEPS, COMPARED_STEPS = 3, 1000


class Journal:
    """Writes events on rank 0; elsewhere every call does nothing."""

    def __init__(
        self, opened: RunState, plan: Plan, total: int, tokens_per_sample: int | None, peak: float | None
    ) -> None:
        self.opened, self.plan, self.total = opened, plan, total
        self.tokens_per_sample, self.peak = tokens_per_sample, peak
        self.began = time.perf_counter()
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.valid_loss: float | None = None
        self.samples, self.tokens, self.seconds = 0, 0, 0.0
        self.longest_step = 0.0  # of this attempt, without its first, which compiles
        self.recent: list[tuple[int, float]] = []
        # Asked before anything is trained: what the cost model cannot do is no reason to fail at the end of a run.
        self.predicted = predict(plan) if ranks.is_main() else None
        self.made, self.step_seconds = 0, deque[float](maxlen=COMPARED_STEPS)
        sinks: list[EventSink] = []
        if ranks.is_main():
            sinks.append(EventWriter(events_path(opened.folder, opened.attempt)))
            if not watched():
                sinks.append(LiveLine())
        self.events = Events(sinks)

    def started(self, pids: list[int], device: str, step: int, changes: tuple[Change, ...]) -> None:
        self.events.emit(
            happened.RunStarted(
                run=str(self.opened.folder),
                attempt=self.opened.attempt,
                world=ranks.world(),
                pids=tuple(pids),
                device=device,
                plan=summary(self.plan),
                step=step,
                steps=self.total,
            )
        )
        for change in changes:
            self.events.emit(happened.SettingsChanged(key=change.key, before=change.before, after=change.after))

    def fallback(self, what: str, why: str) -> None:
        self.events.emit(happened.Fallback(what=what, why=why))

    def step(self, number: int, loss: float, grad_norm: float, lr: float, metrics: dict[str, float], samples: int,
             position: int, seconds: float) -> None:  # fmt: skip
        if self.first_loss is None:
            self.first_loss = loss
        self.last_loss = loss
        tokens = None if self.tokens_per_sample is None else samples * self.tokens_per_sample
        self.samples = position
        self.tokens += tokens or 0
        self.seconds += seconds
        self.longest_step = max(self.longest_step, seconds) if self.made else 0.0
        self.made += 1
        if self.made > WARM_UP_STEPS:
            self.step_seconds.append(seconds)
        self.recent = [*self.recent[-SPEED_WINDOW_STEPS + 1 :], (tokens or 0, seconds)]
        recent_seconds = sum(s for _, s in self.recent)
        speed = sum(t for t, _ in self.recent) / recent_seconds if tokens is not None else None
        self.events.emit(
            happened.Step(
                step=number,
                steps=self.total,
                loss=loss,
                grad_norm=grad_norm,
                lr=lr,
                samples=position,
                tokens=tokens,
                step_seconds=seconds,
                tokens_per_second=speed,
                mfu=self._mfu(speed),
                eta_seconds=(self.total - number) * recent_seconds / len(self.recent),
                metrics=metrics,
            )
        )

    def _mfu(self, tokens_per_second: float | None) -> float | None:
        arch = self.plan.arch
        if tokens_per_second is None or arch is None or self.peak is None or self.tokens_per_sample is None:
            return None
        return model_flops_utilization(
            arch.flops_per_token(self.tokens_per_sample), tokens_per_second, ranks.world(), self.peak
        )

    def evaluated(self, number: int, result: Evaluation, seconds: float) -> None:
        self.valid_loss = result.loss
        self.events.emit(
            happened.Evaluated(
                step=number,
                loss=result.loss,
                count=result.count,
                metrics=dict(result.metrics),
                seconds=seconds,
            )
        )

    def non_finite(self, number: int, loss: float, norm: float, in_a_row: int) -> None:
        self.events.emit(happened.NonFiniteLoss(step=number, loss=loss, grad_norm=norm, in_a_row=in_a_row))

    @property
    def predicted_step(self) -> float | None:
        """Seconds; None where nothing is predicted."""
        return None if self.predicted is None else self.predicted.step_seconds

    def notice(self, budget: Budget, flush: Flush | None, known: str) -> None:
        """What a stop has and takes, before anything is trained."""
        step, save = (None, None) if flush is None else flush
        self.events.emit(
            happened.StopNotice(
                notice_seconds=budget.seconds, source=budget.source, step_seconds=step, save_seconds=save, known=known,
                fits=None if flush is None else fits(flush, budget),
            )
        )  # fmt: skip

    def spike(self, spike: Spike) -> None:
        self.events.emit(happened.LossSpike(step=spike.step, loss=spike.loss, usual=spike.usual, times=spike.times))

    def rolled_back(self, step: int, from_step: int, path: str, why: str, passed_over: int) -> None:
        self.events.emit(
            happened.RolledBack(step=step, from_step=from_step, path=path, why=why, passed_over=passed_over)
        )

    def goodput(self) -> None:
        """What the run's time went into, over all its attempts."""
        if not ranks.is_main():
            return
        paths = [events_path(self.opened.folder, attempt) for attempt in range(1, self.opened.attempt + 1)]
        found = goodput([read(path) for path in paths if path.exists()])
        if found is not None:
            self.events.emit(found)

    def compared(self, measured_memory_bytes: float | None) -> None:
        """The prediction beside the measurement, once this attempt has made a step after its warm-up."""
        if not self.step_seconds or not ranks.is_main():
            return
        estimate = self.predicted
        if estimate is None:
            self.events.emit(happened.Compared(why_none=why_none(self.plan)))
            return
        self.events.emit(
            happened.Compared(
                predicted_step_seconds=estimate.step_seconds,
                step_seconds_interval=estimate.step_seconds_interval,
                measured_step_seconds=statistics.median(self.step_seconds),
                steps=len(self.step_seconds),
                predicted_memory_bytes=estimate.memory_bytes,
                memory_bytes_interval=estimate.memory_bytes_interval,
                measured_memory_bytes=measured_memory_bytes,
                probed=self.plan.cluster.measured is not None,
            )
        )

    def stopped(self, number: int, reason: str, exit_code: int) -> None:
        self.events.emit(happened.Stopped(step=number, reason=reason, exit_code=exit_code))  # type: ignore[arg-type]

    def finished(self, number: int, sample: str | None = None) -> None:
        """The run's own summary; speed is over every step of this attempt, without evaluation and saving."""
        speed = self.tokens / self.seconds if self.tokens and self.seconds else None
        self.events.emit(
            happened.Finished(
                step=number,
                samples=self.samples,
                tokens=self.tokens or None,
                seconds=time.perf_counter() - self.began,
                first_loss=self.first_loss,
                last_loss=self.last_loss,
                valid_loss=self.valid_loss,
                tokens_per_second=speed,
                sample=sample,
            )
        )


def summary(plan: Plan) -> str:
    """One line: `8 ranks (pp 2 x dp_shard 2 x tp 2), zero 1, 1f1b, recompute full, bf16, micro-batch 4 x 8`."""
    d = plan.decision
    axes = [f"{name} {degree}" for name, degree in zip(AXES, d.mesh.degrees, strict=True) if degree > 1]
    split = f" ({' x '.join(axes)})" if len(axes) > 1 or d.mesh.pp * d.mesh.tp > 1 else ""
    parts = [f"{d.mesh.world} rank{'s' if d.mesh.world > 1 else ''}{split}"]
    parts.append(f"zero {d.zero}")
    parts += [d.schedule] if d.schedule != "none" else []
    parts += [f"recompute {d.recompute}"] if d.recompute != "none" else []
    return ", ".join([*parts, d.precision, f"micro-batch {d.micro_batch} x {d.accumulation}"])
