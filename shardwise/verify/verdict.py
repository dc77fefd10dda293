"""What parity's processes told, and the verdict on it, as frozen values. Pure; no torch."""

import math
from typing import Literal

import msgspec

from shardwise.plan.mesh import MeshShape

Kind = Literal["initial value", "gradient", "parameter"]


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that crosses layers."""


class Told(Frozen, frozen=True):
    """What one process says of its training, a number a step.

    samples: those that it read in the first step. squares: of the first step's gradients as far as this process holds
    them, the sum of squares by name, before clipping. outputs: of the first step, by block, the sum of squares of what
    each forward of it gave, equal ones once (recompute gives the same again). unsaved: why its checkpoint was refused.
    """

    losses: tuple[float, ...]
    counts: tuple[float, ...]
    norms: tuple[float, ...]
    evaluation: float
    samples: tuple[int, ...] = ()
    squares: dict[str, float] = {}
    outputs: dict[str, tuple[float, ...]] = {}
    unsaved: str = ""


class Tensor(Frozen, frozen=True):
    """One tensor of the model, as the ranks have it against the one process.

    ranks: those that hold it. differences: each one's distance, relative to the tensor's size.
    copies: equal numbers where two ranks hold equal bits. split: axes over which it is sharded.
    ratio, residual: of the worst rank, the factor that explains it best and what that leaves.
    twin: the name of another tensor of the one process that has this one's bits.
    """

    name: str
    kind: Kind
    ranks: tuple[int, ...]
    differences: tuple[float, ...]
    copies: tuple[int, ...]
    split: tuple[str, ...] = ()
    ratio: float = 1.0
    residual: float = 0.0
    twin: str = ""

    @property
    def worst(self) -> float:
        return max((d if math.isfinite(d) else math.inf for d in self.differences), default=math.inf)


class Bounds(Frozen, frozen=True):
    """Relative, as far as rounding goes in this tier."""

    loss: float
    norm: float
    gradient: float
    parameter: float


class Comparison(Frozen, frozen=True):
    """One training by N ranks and by one process. `tensors` in the order of the forward pass.

    ties: names that are one weight. zero_gradients: parameters whose true gradient is zero; theirs is noise.
    """

    tier: str
    mesh: MeshShape
    accumulation: int
    bounds: Bounds
    one: Told
    ranks: tuple[Told, ...]
    tensors: tuple[Tensor, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    zero_gradients: tuple[str, ...] = ()
    parameters: str = "parameters"


class Resumed(Frozen, frozen=True):
    """New processes that went on after `step`, against those that were never stopped: bits.

    unsaved: why there was nothing to go on from.
    """

    step: int
    whole: tuple[tuple[float, ...], ...]
    resumed: tuple[tuple[float, ...], ...]
    changed: tuple[str, ...]
    unsaved: str = ""


class Masks(Frozen, frozen=True):
    """What one rank drew for dropout: by module a digest of each mask, in order.

    forwards: micro-batches of all steps. draws: how often each module draws in one forward.
    """

    drawn: dict[str, tuple[str, ...]]
    forwards: int
    draws_apart: bool
    draws: dict[str, int] = {}


class Check(Frozen, frozen=True):
    """One thing that was compared: its worst difference against its bound; bound 0 means equal bits."""

    tier: str
    what: str
    worst: float
    bound: float
    passed: bool


class Fault(Frozen, frozen=True):
    """The first difference and its likely cause. axis: "" where the structure points at none."""

    check: str
    tensor: str
    layer: str
    axis: str
    cause: str
    numbers: str


class Verdict(Frozen, frozen=True):
    """Of the parity half. `skipped` says why it was not run; it is then neither passed nor failed."""

    passed: bool
    ranks: int
    shrunk: str
    checks: tuple[Check, ...] = ()
    fault: Fault | None = None
    zero_gradients: tuple[str, ...] = ()
    probe: str = ""
    notes: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0
    schema_version: Literal[1] = 1

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(raw: bytes) -> "Verdict":
        return msgspec.json.decode(raw, type=Verdict)
