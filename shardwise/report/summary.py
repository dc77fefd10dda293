"""What a run ends with: a summary for a person, and one JSON line for a program."""

import json
import math
from collections.abc import Sequence
from typing import Any

from shardwise.events.live import compared, went_into
from shardwise.events.values import AnyEvent, Compared, Evaluated, Finished, Goodput, Saved, Step
from shardwise.plan.plan import Plan
from shardwise.units import format_count, format_seconds


def text(plan: Plan, events: Sequence[AnyEvent], run: str) -> str:
    """The plan in short and why, loss before and after, speed, where the run lies, what the model wrote."""
    decision = plan.decision
    ranks = "1 rank" if decision.mesh.world == 1 else f"{decision.mesh.world} ranks"
    lines = [
        f"plan       {ranks}, zero {decision.zero}, {decision.precision}, {decision.global_batch} samples a step",
        *(f"           - {reason}" for reason in plan.why),
    ]
    first, last = _losses(events)
    if first is not None and last is not None:
        lines.append(f"loss       {first:.4f} -> {last:.4f} (training)")
    lines += _held_out(events)
    finished = _finished(events)
    if finished is not None:
        lines += _speed(finished)
    prediction = _compared(events)
    if prediction is not None:
        lines.append(f"prediction {compared(prediction)}")
    spent = _goodput(events)
    if spent is not None:
        lines.append(f"time       {went_into(spent)}")
    lines.append(f"run        {run}")
    if finished is not None and finished.sample:
        lines += ["sample", *(f"  | {line}" for line in printable(finished.sample).split("\n"))]
    return "\n".join(lines)


def printable(text: str) -> str:
    """Text that cannot move the cursor: what is neither printable, a newline nor a tab is shown as a dot."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\u00b7" for one in text)


def _held_out(events: Sequence[AnyEvent]) -> list[str]:
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    if not evaluations:
        return []
    before = f"{evaluations[0].loss:.4f} (step {evaluations[0].step}) -> " if len(evaluations) > 1 else ""
    return [f"held out   {before}{evaluations[-1].loss:.4f} (step {evaluations[-1].step})"]


def _speed(finished: Finished) -> list[str]:
    speed = f"{format_count(finished.tokens_per_second)} tokens/s, " if finished.tokens_per_second else ""
    return [f"speed      {speed}{format_seconds(finished.seconds)} for this attempt"]


def _losses(events: Sequence[AnyEvent]) -> tuple[float | None, float | None]:
    steps = [event for event in events if isinstance(event, Step)]
    return (steps[0].loss, steps[-1].loss) if steps else (None, None)


def _finished(events: Sequence[AnyEvent]) -> Finished | None:
    return next((event for event in reversed(events) if isinstance(event, Finished)), None)


def _compared(events: Sequence[AnyEvent]) -> Compared | None:
    return next((event for event in reversed(events) if isinstance(event, Compared)), None)


def _goodput(events: Sequence[AnyEvent]) -> Goodput | None:
    return next((event for event in reversed(events) if isinstance(event, Goodput)), None)


def _prediction(event: Compared | None) -> dict[str, Any] | None:
    """Of a program's line: what was predicted and measured, their ratio, and whether within the 80 % interval."""
    if event is None:
        return None
    if event.why_none:
        return {"why_none": event.why_none}
    pairs: dict[str, tuple[float | None, tuple[float, float] | None, float | None]] = {
        "step_seconds": (event.predicted_step_seconds, event.step_seconds_interval, event.measured_step_seconds),
        "memory_bytes": (event.predicted_memory_bytes, event.memory_bytes_interval, event.measured_memory_bytes),
    }
    return {"probed": event.probed, "steps": event.steps, **{name: _pair(*pair) for name, pair in pairs.items()}}


def _pair(predicted: float | None, ends: tuple[float, float] | None, measured: float | None) -> dict[str, Any] | None:
    if predicted is None or ends is None:
        return None
    known = measured is not None and measured > 0
    return {
        "predicted": predicted,
        "interval": list(ends),
        "measured": measured,
        "ratio": predicted / measured if measured else None,
        "inside": ends[0] <= measured <= ends[1] if known and measured is not None else None,
    }


def last_line(events: Sequence[AnyEvent], run: str, exit_code: int) -> str:
    """One JSON object; `valid_loss` in nats a token, null where nothing was held out. Non-finite is null."""
    finished = _finished(events)
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    steps = [event for event in events if isinstance(event, Step)]
    saved = [event for event in events if isinstance(event, Saved)]
    first, last = _losses(events)
    spent = _goodput(events)
    line = {
        "run": run,
        "exit_code": exit_code,
        "finished": finished is not None,
        "step": finished.step if finished else steps[-1].step if steps else None,
        "first_loss": _number(first),
        "last_loss": _number(last),
        "valid_loss": _number(evaluations[-1].loss if evaluations else finished.valid_loss if finished else None),
        "tokens_per_second": _number(finished.tokens_per_second if finished else None),
        "mfu": _number(steps[-1].mfu if steps else None),
        "goodput": {**spent.shares(), "attempts": spent.attempts, "lost_steps": spent.lost_steps} if spent else None,
        "prediction": _prediction(_compared(events)),
        "checkpoint": saved[-1].path if saved else finished.checkpoint if finished else None,
    }
    return json.dumps(line)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
