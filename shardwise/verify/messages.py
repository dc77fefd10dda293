"""What the command and the processes of parity tell each other, as JSON. No torch."""

import msgspec

from shardwise.inputs.recipe import OptimizerSpec
from shardwise.plan.plan import Plan
from shardwise.verify.verdict import Masks, Told

# The first case is stopped after this step and resumed.
STOP_AFTER = 2


class Case(msgspec.Struct, frozen=True):
    """One training: a shrunk plan, and the optimizer that it is compared under."""

    name: str
    plan: Plan
    optimizer: OptimizerSpec


class Task(msgspec.Struct, frozen=True):
    """What to train. The first case is the one that is stopped and resumed."""

    cases: tuple[Case, ...]
    mutation: str = ""


class Report(msgspec.Struct, frozen=True):
    """What one process says of one case; its tensors lie beside it."""

    told: Told
    split: dict[str, tuple[str, ...]] = {}
    masks: Masks | None = None


class Failure(msgspec.Struct, frozen=True):
    """An error in one of the processes. `expected`: an error of ours, whose four parts follow."""

    who: str
    kind: str
    expected: bool
    what: str
    why: str = ""
    fix: str = ""
    traceback: str = ""


class About(msgspec.Struct, frozen=True):
    """What is known of the model itself: names that are one weight, and what the two-split probe found.

    draws: how often each dropout module draws in one forward.
    """

    ties: tuple[tuple[str, ...], ...]
    probe: str
    draws: dict[str, int] = {}
