"""A callback for transformers.Trainer: its checkpoints sealed and verified, signals, a watchdog, events.

The script stays as it is, but for `callbacks=[...]`, and `resume_from_checkpoint` where it is to go on.
"""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardwise.environment import process_identity
from shardwise.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, CheckpointError
from shardwise.events.sinks import Events
from shardwise.events.values import Evaluated, Event, Finished, Resumed, RunStarted, Saved, Step, Stopped
from shardwise.events.writer import EventWriter
from shardwise.interop import sealed
from shardwise.launch.run_folder import events_path
from shardwise.resilience.signals import StopSignals
from shardwise.resilience.watchdog import Watchdog


class TransformersCallback(TrainerCallback):
    """What a run of transformers.Trainer gets of Shardwise.

    - Each checkpoint that the Trainer writes is made durable and sealed: the digest of every file, in a manifest that
      comes last. One that a run goes on from is verified first; `sw.newest_whole(output_dir)` is the newest whole one.
    - SIGTERM, SIGUSR1 or Ctrl-C on any rank: a checkpoint at the next step, and the process ends with 75 or 130.
    - A rank that makes no progress for `hang_seconds` is named, with the stacks of all in `run`/hangs/, and all end.
    - Events as JSON lines in `run`/events/.

    Collective: all ranks have it. Signals need the main thread.

    Example:
        trainer = transformers.Trainer(..., callbacks=[sw.TransformersCallback("runs/mine")])
        trainer.train(resume_from_checkpoint=sw.newest_whole(trainer.args.output_dir))
    """

    def __init__(self, run: str | Path, *, hang_seconds: float = 60.0) -> None:
        self.run, self.hang_seconds = Path(run), hang_seconds
        self.held = contextlib.ExitStack()
        self.signals, self.watchdog = StopSignals(), Watchdog(self.run, hang_seconds=hang_seconds)
        self.events = Events()
        self.stopped, self.attempt = 0, 1
        self.loss: float | None = None
        self.began = self.stepped = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: CheckpointError where the checkpoint that was loaded is not what was written."""
        if state.global_step:
            _require_whole(_folder(args, state))
        self.held.enter_context(self.signals)
        if self.hang_seconds:
            self.held.enter_context(self.watchdog)
        if state.is_world_process_zero:
            writer = EventWriter(self._next_events())
            self.held.callback(writer.close)
            self.events = Events([writer])
        identity = process_identity()
        self._tell(
            RunStarted(run=str(self.run), attempt=self.attempt, world=identity.world, pids=(), device=str(args.device),
                       plan=f"transformers.Trainer, {identity.world} ranks", step=state.global_step,
                       steps=state.max_steps)
        )  # fmt: skip
        if state.global_step:
            self._tell(Resumed(step=state.global_step, path=str(_folder(args, state))))
        self.stepped = time.monotonic()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.step(state.global_step + 1)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.beat()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watchdog.beat()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collective: the ranks agree whether one of them was told to stop."""
        self.stopped = _agreed(self.signals.received or 0, args.device)
        if self.stopped:
            control.should_save = control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, float] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        told, now = logs or {}, time.monotonic()
        if "loss" not in told:
            return
        steps = max(1, args.logging_steps if args.logging_steps >= 1 else 1)
        self._tell(
            Step(step=state.global_step, steps=state.max_steps, loss=float(told["loss"]),
                 grad_norm=told.get("grad_norm"), lr=float(told.get("learning_rate", 0.0)),
                 samples=state.global_step * self._samples(args), tokens=None,
                 step_seconds=(now - self.stepped) / steps)
        )  # fmt: skip
        self.loss, self.stepped = float(told["loss"]), now

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        metrics: dict[str, float] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        told = metrics or {}
        if "eval_loss" in told:
            self._tell(Evaluated(step=state.global_step, loss=float(told["eval_loss"]), count=0.0))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collective: no rank goes on before the checkpoint is sealed."""
        folder, began = _folder(args, state), time.monotonic()
        with self.watchdog.phase("save") if self.hang_seconds else contextlib.nullcontext():
            _together()
            if state.is_world_process_zero and folder.is_dir():
                made = sealed.seal(folder, state.global_step)
                size, seconds = sum(file.bytes for file in made.files), time.monotonic() - began
                why = "stopped" if self.stopped else "the Trainer saved"
                self._tell(Saved(step=state.global_step, path=str(folder), bytes=size, seconds=seconds, why=why))
            _together()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: SystemExit with 75, or 130 after Ctrl-C, where a signal stopped the run."""
        code = EXIT_INTERRUPTED if self.stopped == signal.SIGINT else EXIT_REQUEUE
        if self.stopped:
            self._tell(Stopped(step=state.global_step, reason="signal", exit_code=code))
        else:
            self._tell(
                Finished(step=state.global_step, samples=state.global_step * self._samples(args), tokens=None,
                         seconds=time.monotonic() - self.began, first_loss=None, last_loss=self.loss)
            )  # fmt: skip
        self.held.close()
        if self.stopped:
            raise SystemExit(code)

    def _next_events(self) -> Path:
        self.attempt = next(number for number in range(1, 10**6) if not events_path(self.run, number).exists())
        return events_path(self.run, self.attempt)

    def _tell(self, event: Event) -> None:
        self.events.emit(event)

    @staticmethod
    def _samples(args: TrainingArguments) -> int:
        """Of one step, over all ranks."""
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer keeps the state after this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _require_whole(folder: Path) -> None:
    """What the Trainer has loaded. Of another place nothing is known here, and nothing is said."""
    if folder.is_dir() and (why := sealed.problem(folder)):
        raise CheckpointError(
            f"{folder} is not what was written: {why}.",
            why="the Trainer has loaded it already, as it verifies nothing",
            fix=f"trainer.train(resume_from_checkpoint=sw.newest_whole({str(folder.parent)!r}))",
        )


def _agreed(number: int, device: Any) -> int:
    """The largest of the ranks' numbers. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    told = torch.tensor([number], device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return int(told.item())


def _together() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
