"""What a dry run found, as one frozen value: bytes by phase and category, collectives, mismatches. No torch."""

from typing import Literal

import msgspec

from shardwise.plan.mesh import Coord
from shardwise.plan.violation import Violation

Phase = Literal["built", "forward", "backward", "optimizer", "rest"]
PHASES: tuple[Phase, ...] = ("built", "forward", "backward", "optimizer", "rest")

# What the numbers are not: said in every report, because each of these takes memory of a device too.
NOT_COVERED = (
    "the caching allocator's rounding and fragments",
    "workspaces inside kernels, and which kernel a GPU chooses",
    "the device context and NCCL's own buffers",
    "compile: blocks run eagerly here, and a compiled block usually keeps less",
)


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value that crosses layers; unknown keys are errors."""


class LiveBytes(Value, frozen=True):
    """Logical bytes of live tensors, each storage once, by what it is.

    parameters: masters at rest. gradients: of those, and whole ones before they are reduced. states: the optimizer's.
    gathered: parameters made whole, or copied to the compute dtype, for the time of a block. communication: buffers
    that a collective reads or writes and that are nothing else. activations: kept for backward. other: buffers of the
    module, the batch, and results on their way.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    gathered: int = 0
    communication: int = 0
    activations: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in CATEGORIES)


CATEGORIES: tuple[str, ...] = LiveBytes.__struct_fields__


class PhaseBytes(Value, frozen=True):
    """The moment of a phase at which most bytes were live. `built` and `rest` are what stands at their end."""

    phase: Phase
    live: LiveBytes


class Collective(Value, frozen=True):
    """`times` equal calls in a row.

    bytes: of the whole tensor over the group (what an all-gather gives, what a reduce-scatter takes), of one call.
    axis: along which axis of the mesh, several joined by "+", "world" for all ranks. size: ranks of the group.
    peer: the other rank (global) of a send or receive, else None.
    """

    kind: str
    bytes: int
    axis: str
    size: int
    phase: Phase
    times: int = 1
    peer: int | None = None


class RankRun(Value, frozen=True):
    """One distinct rank. `stands_for`: how many ranks of the world hold tensors of the same shapes as this one."""

    rank: int
    coord: Coord
    stands_for: int
    phases: tuple[PhaseBytes, ...]
    collectives: tuple[Collective, ...]
    seconds: float

    @property
    def peak(self) -> PhaseBytes:
        """The phase with most bytes; of equal ones the first."""
        return max(self.phases, key=lambda one: one.live.total)


class Mismatch(Value, frozen=True):
    """Two ranks of one group whose sequences differ at `position`: the run would hang there, or add up wrongly."""

    axis: str
    ranks: tuple[int, int]
    position: int
    first: str
    second: str


class DryRun(Value, frozen=True):
    """What the plan's own code did on fake tensors, for each distinct rank of its world.

    limit_bytes: what a rank may use of its device. violations: what would end the run. said: what was assumed.
    """

    world: int
    limit_bytes: int
    ranks: tuple[RankRun, ...]
    mismatches: tuple[Mismatch, ...]
    violations: tuple[Violation, ...]
    said: tuple[str, ...]
    seconds: float
    not_covered: tuple[str, ...] = NOT_COVERED
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        return not self.mismatches and not self.violations

    @property
    def fullest(self) -> RankRun | None:
        """The rank with the highest peak; None where the plan was refused before any rank ran."""
        return max(self.ranks, key=lambda one: one.peak.live.total, default=None)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(raw: bytes) -> "DryRun":
        """Raises: msgspec.ValidationError on an unknown key, a wrong type or another schema version."""
        return msgspec.json.decode(raw, type=DryRun)
