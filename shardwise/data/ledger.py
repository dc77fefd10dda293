"""Which samples were trained on: a ledger that is kept in every checkpoint, and the proof that each came exactly once.

Positions are those of the global order, counted over epochs. Steps that a crash took back are not in it, because the
ledger goes back to the checkpoint together with the weights. No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shardwise.data.micros import Micros

# A prime below 2^31: sums of residues over up to 2^22 ranks are exact in fp64.
_MODULUS = 2**31 - 1
# The ledger's name in the state of a Trainer's checkpoint.
KEPT_AS = "state/trainer.ledger"
_DROPPED = 'fewer than a global batch at the end of an epoch (last = "drop")'


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Steps `first_step` to `last_step` of one attempt, `samples` each, from position `first` to before `end`.

    `why` is empty for what was trained on. Else it says why these samples were passed over, and `first_step` is the
    step that was to be made next.
    """

    attempt: int
    first_step: int
    last_step: int
    first: int
    end: int
    samples: int
    why: str = ""


class Ledger:
    """The committed history of this run's samples. JSON of a fixed size for every epoch and attempt, not every step."""

    def __init__(self, attempt: int = 0) -> None:
        self.attempt = attempt
        self.segments: list[Segment] = []

    def add(self, step: int, first: int, samples: int, next_position: int | None = None) -> None:
        """A step that read `samples` positions from `first` on; `next_position` where the loader goes on elsewhere."""
        end = first + samples
        last = self.segments[-1] if self.segments else None
        goes_on = (
            last is not None
            and not last.why
            and (last.attempt, last.last_step + 1, last.end, last.samples) == (self.attempt, step, first, samples)
        )
        if last is not None and goes_on:
            self.segments[-1] = msgspec.structs.replace(last, last_step=step, end=end)
        else:
            self.segments.append(Segment(self.attempt, step, step, first, end, samples))
        if next_position is not None and next_position > end:
            self.pass_over(end, next_position, _DROPPED)

    def pass_over(self, first: int, end: int, why: str) -> None:
        """Positions that are left out on purpose, before the next step."""
        step = max((one.last_step for one in self.segments if not one.why), default=0) + 1
        self.segments.append(Segment(self.attempt, step, step, first, end, end - first, why))

    def state_dict(self) -> dict[str, Any]:
        return {"segments": msgspec.to_builtins(self.segments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: msgspec.ValidationError for what is no ledger."""
        self.segments = msgspec.convert(state["segments"], list[Segment])


class Proof(NamedTuple):
    """What a ledger shows. `faults` is empty where every sample came once and none is missing.

    `trained` and `passed_over` in samples; `steps` that were made; `attempts` that made them.
    """

    trained: int
    passed_over: tuple[Segment, ...]
    steps: int
    attempts: int
    faults: tuple[str, ...]


def kept_in(state: Mapping[str, Any]) -> list[Segment] | None:
    """The ledger in a checkpoint's state (`manifest.state`); None where a loop of one's own kept none."""
    packed = state.get(KEPT_AS)
    return None if packed is None else msgspec.convert(packed["segments"], list[Segment])


def prove(segments: Sequence[Segment]) -> Proof:
    """Whether steps and positions follow each other without a gap and without an overlap, from 0 on."""
    faults: list[str] = []
    position = step = 0
    for one in segments:
        if one.first != position:
            kind = "never read" if one.first > position else "read twice"
            low, high = sorted((one.first, position))
            faults.append(f"samples {low} to {high - 1} were {kind}, before step {one.first_step}")
        if not one.why:
            if one.first_step != step + 1:
                faults.append(f"step {one.first_step} follows step {step}")
            if one.end - one.first != one.samples * (one.last_step - one.first_step + 1):
                faults.append(f"steps {one.first_step} to {one.last_step} do not read {one.samples} samples each")
            step = one.last_step
        position = one.end
    trained = [one for one in segments if not one.why]
    return Proof(
        trained=sum(one.end - one.first for one in trained),
        passed_over=tuple(one for one in segments if one.why),
        steps=sum(one.last_step - one.first_step + 1 for one in trained),
        attempts=len({one.attempt for one in trained}),
        faults=tuple(faults),
    )


def read_sums(micros: Micros) -> tuple[int, int, int]:
    """What this rank read of a step: how many positions, their sum and that of their squares, both mod 2^31 - 1.

    Over the ranks that count they add up to `expected_sums`; a rank that reads another's samples, or the step before,
    changes them.
    """
    parts = [expected_sums(micro.first, micro.samples) for micro in micros if micro.first is not None]
    return added(parts)


def expected_sums(first: int, samples: int) -> tuple[int, int, int]:
    """The same of the positions `first` to `first + samples - 1`, in closed form."""
    end = first + samples
    return samples, (_to(end) - _to(first)) % _MODULUS, (_squares_to(end) - _squares_to(first)) % _MODULUS


def added(parts: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    count = total = squares = 0
    for part in parts:
        count, total, squares = count + part[0], (total + part[1]) % _MODULUS, (squares + part[2]) % _MODULUS
    return count, total, squares


def agrees(micros: Micros, read: Sequence[float]) -> bool:
    """Whether what all ranks together read, as sums that crossed in fp64, are the samples of this step."""
    count, total, squares = (round(value) for value in read)
    return (count, total % _MODULUS, squares % _MODULUS) == expected_sums(micros.first, micros.samples)


def _to(n: int) -> int:
    return n * (n - 1) // 2


def _squares_to(n: int) -> int:
    return (n - 1) * n * (2 * n - 1) // 6
