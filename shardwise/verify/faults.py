"""What can befall a run, as values: kinds of faults, their moments, a seeded draw of them, and what was survived."""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from shardwise.data.ledger import Proof

Kind = Literal[
    "kill rank",
    "kill launcher",
    "kill command",
    "stop rank",
    "terminate command",
    "terminate rank",
    "interrupt command",
    "flip bit",
    "truncate file",
    "full disk",
    "slow disk",
    "store errors",
]
# Where a scratch run keeps its checkpoints: in its folder, or in an object store of its own (chaos_store.py).
Where = Literal["disk", "s3"]
Moment = Literal["opening", "training", "writing", "committing", "resuming"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# opening: the command runs, and no step was made; resuming: the same, where there is a checkpoint; training: after a
# step; writing: a rank's file is under way; committing: every rank's file is there and the manifest is not.
MOMENTS: tuple[Moment, ...] = get_args(Moment)
STARTING: tuple[Moment, ...] = ("opening", "resuming")
# What harms a file needs a committed checkpoint, and comes while steps are made.
IN_TRAINING: tuple[Kind, ...] = ("flip bit", "truncate file", "full disk")
# Damage alone is met only when something is loaded: the rank that is killed after it makes the run load.
DAMAGE: tuple[Kind, ...] = ("flip bit", "truncate file")
# What no process ends of at once: the run is expected to go on.
QUIET: tuple[Kind, ...] = ("full disk", "slow disk", "store errors")
# What comes between a run and where it writes, and so has to stand there from its beginning.
PLANTED: tuple[Kind, ...] = ("slow disk", "store errors")
# Whose checkpoints lie elsewhere has nothing to fear of these.
OF_WHERE: dict[Where, tuple[Kind, ...]] = {"disk": ("full disk", "slow disk"), "s3": ("store errors",)}


class Fault(NamedTuple):
    """One fault. `after_steps`: how many steps the run makes before its moment is waited for. `draw`, of [0, 1), picks
    a rank, a file or a byte when it comes.
    """

    kind: Kind
    moment: Moment
    after_steps: int
    draw: float

    def __str__(self) -> str:
        return f"{self.kind} while {self.moment}"


class Befell(NamedTuple):
    """A fault that came: at which step, how the command ended afterwards (None: it went on), the steps that were lost,
    and seconds until the next step.
    """

    fault: Fault
    step: int
    exit_code: int | None
    lost_steps: int
    seconds: float


class Verdict(NamedTuple):
    """What was survived. `findings`: everything that was not as promised; empty where nothing was lost. late, harmed:
    how many calls a slow disk answered late, and to how many requests a store did harm.
    """

    befell: tuple[Befell, ...]
    not_reached: tuple[Fault, ...]
    starts: int
    proof: Proof | None
    same_bits: bool
    findings: tuple[str, ...]
    seconds: float
    late: int = 0
    harmed: int = 0

    @property
    def survived(self) -> bool:
        return not self.findings


def kinds_at(where: Where) -> tuple[Kind, ...]:
    """The kinds that can befall a run whose checkpoints lie there."""
    elsewhere = {kind for other, kinds in OF_WHERE.items() if other != where for kind in kinds}
    return tuple(kind for kind in KINDS if kind not in elsewhere)


def drawn(count: int, seed: int, kinds: Sequence[Kind] = KINDS, most_steps: int = 12) -> list[Fault]:
    """`count` faults: every kind as often as any other, each at random moments. The same for the same seed."""
    rng = random.Random(seed)
    order: list[Kind] = []
    while len(order) < count:
        order += rng.sample(list(kinds), len(kinds))
    return [
        Fault(
            kind,
            "training" if kind in IN_TRAINING else rng.choice(MOMENTS),
            rng.randint(1, most_steps),
            rng.random(),
        )
        for kind in order[:count]
    ]
