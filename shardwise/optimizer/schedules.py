"""Learning-rate schedules: a factor on the learning rate, as a pure function of the step.

Steps are counted from 1: the n-th optimizer update of the run uses `factor(n)`. Warm-up rises in equal parts,
factor(1) = 1 / warmup_steps to factor(warmup_steps) = 1; the last step of the decay has exactly
`final_factor`, and so has every step after it. A run that ends inside its warm-up just ends there.
"""

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.recipe import ScheduleSpec

Factor = Callable[[int], float]
DecaySteps = Literal["auto"] | int

# The part of a warmup-stable-decay run that decays unless told otherwise. Source: MiniCPM, arXiv:2404.06395.
WSD_DECAY_FRACTION = 0.1


class Schedule(msgspec.Struct, frozen=True):
    """A schedule before the length of the run is known; `resolve` makes it a function of the step alone."""

    spec: ScheduleSpec

    def resolve(self, total_steps: int) -> Factor:
        """The factor as a function of the step 1 .. total_steps."""
        return lambda step: self.factor(step, total_steps)

    def factor(self, step: int, total_steps: int) -> float:
        """The factor of one step of a run of `total_steps`."""
        spec = self.spec
        if step <= spec.warmup_steps:
            return step / spec.warmup_steps
        if spec.name == "constant":
            return 1.0
        first, steps = _decay(spec, total_steps)
        done = 0.0 if step <= first else min(1.0, (step - first) / steps)
        if done == 1.0:
            return spec.final_factor
        return spec.final_factor + (1.0 - spec.final_factor) * _remaining(spec.name, done)


def _decay(spec: ScheduleSpec, total_steps: int) -> tuple[int, int]:
    """(the last step at factor 1, the number of steps that the decay takes, at least 1)."""
    after_warmup = max(1, total_steps - spec.warmup_steps)
    if spec.name != "wsd":
        return spec.warmup_steps, after_warmup if spec.decay_steps == "auto" else spec.decay_steps
    asked = max(1, round(WSD_DECAY_FRACTION * total_steps)) if spec.decay_steps == "auto" else spec.decay_steps
    steps = min(asked, after_warmup)
    return max(spec.warmup_steps, total_steps - steps), steps


def _remaining(name: str, done: float) -> float:
    """How much of the way from 1 down to the final factor is left, where `done` of the decay is over."""
    return 0.5 * (1.0 + math.cos(math.pi * done)) if name == "cosine" else 1.0 - done


def constant(*, warmup_steps: int = 0) -> Schedule:
    """Warm up, then stay at 1. Raises: RecipeError."""
    return _schedule("constant", warmup_steps, "auto", 1.0)


def linear(*, warmup_steps: int = 0, decay_steps: DecaySteps = "auto", final_factor: float = 0.0) -> Schedule:
    """Warm up, then fall in a straight line over `decay_steps` ("auto": to the last step).

    Raises: RecipeError.
    """
    return _schedule("linear", warmup_steps, decay_steps, final_factor)


def cosine(*, warmup_steps: int = 0, decay_steps: DecaySteps = "auto", final_factor: float = 0.0) -> Schedule:
    """Warm up, then fall along half a cosine over `decay_steps` ("auto": to the last step).

    Raises: RecipeError.
    """
    return _schedule("cosine", warmup_steps, decay_steps, final_factor)


def wsd(*, warmup_steps: int = 0, decay_steps: DecaySteps = "auto", final_factor: float = 0.0) -> Schedule:
    """Warm up, stay at 1, fall in a straight line over the last `decay_steps` ("auto": a tenth of the run).

    Raises: RecipeError.
    """
    return _schedule("wsd", warmup_steps, decay_steps, final_factor)


def _schedule(name: str, warmup_steps: int, decay_steps: DecaySteps, final_factor: float) -> Schedule:
    keys = {
        "name": name,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "final_factor": final_factor,
    }
    try:
        return Schedule(msgspec.convert(keys, ScheduleSpec))
    except msgspec.ValidationError as error:
        raise RecipeError(
            f"sw.{name} cannot be made of these values.",
            why=str(error),
            fix="warmup_steps >= 0, decay_steps > 0 or 'auto', final_factor in 0..1",
        ) from None
