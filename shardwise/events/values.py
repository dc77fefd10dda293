"""The events of a run: frozen values, one kind each, and their JSON lines.

JSON has no NaN and no infinity, and a training run has both. They cross as the strings "nan", "inf" and
"-inf" in fields whose type is a float, and come back as floats.
"""

import math
from typing import Any, Literal

import msgspec

UNSTAMPED = 0.0


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event", tag=True):
    """Something that happened. `time` in unix seconds; `Events.emit` fills it in where it is 0."""

    time: float = UNSTAMPED


class RunStarted(Event, frozen=True, tag="run_started"):
    """An attempt begins after `step`. `pids` by rank; `plan` is its one-line summary."""

    run: str
    attempt: int
    world: int
    pids: tuple[int, ...]
    device: str
    plan: str
    step: int
    steps: int | None = None


class DataPrepared(Event, frozen=True, tag="data_prepared"):
    """A data set is ready. `reused`: it was made by an earlier run. `seconds` that it took here."""

    source: str
    path: str = ""
    samples: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    seconds: float = 0.0
    reused: bool = False


class Step(Event, frozen=True, tag="step"):
    """One optimizer update is done.

    `samples` is the global position after it, over all epochs; `tokens` are those of this step. `mfu` is the
    fraction of the devices' peak FLOPs. What is not known is None.
    """

    step: int
    steps: int | None
    loss: float
    grad_norm: float | None
    lr: float
    samples: int
    tokens: int | None
    step_seconds: float
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None
    metrics: dict[str, float] = {}


class Evaluated(Event, frozen=True, tag="evaluated"):
    """Loss over held-out data after `step`. `count` is what the loss was divided by (tokens, samples)."""

    step: int
    loss: float
    count: float
    metrics: dict[str, float] = {}
    seconds: float | None = None


class Saved(Event, frozen=True, tag="saved"):
    """A checkpoint is committed. `bytes` over all ranks; `seconds` until it was durable, of which training stood still
    for `stall_seconds`. `host_bytes`: what rank 0 keeps of host memory to copy its part of a checkpoint into.
    """

    step: int
    path: str
    bytes: int
    seconds: float
    why: str
    stall_seconds: float = 0.0
    host_bytes: int = 0


class SaveFailed(Event, frozen=True, tag="save_failed"):
    """The state after `step` was not saved, the `in_a_row`-th failure; what was committed before is kept."""

    step: int
    why: str
    error: str
    in_a_row: int


class Resumed(Event, frozen=True, tag="resumed"):
    """The state after `step` was loaded and verified. `told`: what is not the same again, of ranks, plan and machine.

    `root`: of the state, "" in checkpoints that have none.
    """

    step: int
    path: str
    told: tuple[str, ...] = ()
    root: str = ""


class NonFiniteLoss(Event, frozen=True, tag="non_finite_loss"):
    """The loss or the gradient norm of `step` was not finite; its update was skipped on all ranks."""

    step: int
    loss: float
    grad_norm: float | None
    in_a_row: int


class LossSpike(Event, frozen=True, tag="loss_spike"):
    """The loss of `step` is `times` the usual spread above the usual one (`usual`) of the steps before."""

    step: int
    loss: float
    usual: float
    times: float


class RolledBack(Event, frozen=True, tag="rolled_back"):
    """The run goes on after `step`, from the checkpoint at `path`; the steps up to `from_step` are undone.

    `passed_over`: samples of the undone steps that are not read again.
    """

    step: int
    from_step: int
    path: str
    why: str
    passed_over: int = 0


class StopNotice(Event, frozen=True, tag="stop_notice"):
    """Before training: how long a stop may take, who says so, and how long one will; None where that is not known yet.

    step_seconds: a step that is under way; save_seconds: its save until it is committed. `known`: from what.
    """

    notice_seconds: float
    source: str
    step_seconds: float | None
    save_seconds: float | None
    known: str
    fits: bool | None


class FlushLate(Event, frozen=True, tag="flush_late"):
    """A stop's notice is over and its save is not: `step` is trained, `saved_step` the newest that is committed."""

    step: int
    saved_step: int
    phase: str
    notice_seconds: float
    source: str


class Goodput(Event, frozen=True, tag="goodput"):
    """Seconds of the run over all its attempts, by what they went into; `events.goodput` says how they are counted."""

    useful: float
    replayed: float
    stalled: float
    restarting: float
    attempts: int
    lost_steps: int

    @property
    def total(self) -> float:
        return self.useful + self.replayed + self.stalled + self.restarting

    def shares(self) -> dict[str, float]:
        """The parts as fractions that sum to one; empty where no time has passed."""
        parts = {"useful": self.useful, "replayed": self.replayed, "stalled": self.stalled}
        parts["restarting"] = self.restarting
        return {name: seconds / self.total for name, seconds in parts.items()} if self.total > 0 else {}


class Fallback(Event, frozen=True, tag="fallback"):
    """Something harmless went another way than asked."""

    what: str
    why: str


class SettingsChanged(Event, frozen=True, tag="settings_changed"):
    """A recipe key has another value than in the attempt before. Values as JSON text."""

    key: str
    before: str
    after: str


class Failed(Event, frozen=True, tag="failed"):
    """A rank raised."""

    rank: int
    step: int | None
    phase: str
    error: str
    traceback: str
    exit_code: int = 1


class Compared(Event, frozen=True, tag="compared"):
    """A step as it was predicted and as it was: seconds, and bytes of the fullest rank where both are known.

    measured: the median of `steps` steps after a warm-up. Intervals hold four of five measurements. why_none: why there
    is no prediction.
    """

    predicted_step_seconds: float | None = None
    step_seconds_interval: tuple[float, float] | None = None
    measured_step_seconds: float | None = None
    steps: int = 0
    predicted_memory_bytes: float | None = None
    memory_bytes_interval: tuple[float, float] | None = None
    measured_memory_bytes: float | None = None
    probed: bool = False
    why_none: str = ""


class Stopped(Event, frozen=True, tag="stopped"):
    """The attempt ends after `step`."""

    step: int
    reason: Literal["finished", "user", "signal", "failed"]
    exit_code: int


class Hung(Event, frozen=True, tag="hung"):
    """A rank made no progress for so long that all are ended. Told by the watcher; launch/hang.py says more.

    rank, step, phase, state: of the first stuck one; folder: stacks and last collectives of all.
    """

    rank: int
    step: int
    phase: str
    state: str
    quiet_seconds: float
    why: str
    folder: str


class AttemptEnded(Event, frozen=True, tag="attempt_ended"):
    """An attempt is over. Told by the command, in events/attempts.jsonl.

    cause: one of launch.outcome.Cause; committed: the step after which a restart goes on; then: why another attempt
    begins or none; begins: that one's number, None where it ends here; world: the ranks that it starts.
    """

    attempt: int
    cause: str
    exit_code: int
    step: int | None = None
    committed: int = 0
    error: str = ""
    lost_steps: int = 0
    lost_seconds: float = 0.0
    then: str = ""
    begins: int | None = None
    world: int | None = None


class Finished(Event, frozen=True, tag="finished"):
    """The summary of a run that reached its last step. `sample` is text that the model wrote."""

    step: int
    samples: int
    tokens: int | None
    seconds: float
    first_loss: float | None
    last_loss: float | None
    valid_loss: float | None = None
    tokens_per_second: float | None = None
    checkpoint: str | None = None
    sample: str | None = None


AnyEvent = (
    RunStarted
    | DataPrepared
    | Step
    | Evaluated
    | Saved
    | SaveFailed
    | Resumed
    | NonFiniteLoss
    | LossSpike
    | RolledBack
    | StopNotice
    | FlushLate
    | Goodput
    | Fallback
    | SettingsChanged
    | Failed
    | Compared
    | Stopped
    | Hung
    | AttemptEnded
    | Finished
)

# Not strict: the strings "nan", "inf" and "-inf" are floats where a float is declared, and only there.
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent, strict=False)


def to_line(event: Event) -> bytes:
    """One line of JSON, with its newline."""
    return msgspec.json.encode(_spell_non_finite(msgspec.to_builtins(event))) + b"\n"


def from_line(line: bytes) -> AnyEvent:
    """The inverse of `to_line`.

    Raises: msgspec.DecodeError (also its kind ValidationError) on anything else.
    """
    return _DECODER.decode(line)


def _spell_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_non_finite(item) for item in value]
    return value
