"""A hang: how long each phase may say nothing, whether anybody is stuck, who, and what is said about it. Pure.

A rank is judged by the time since its last heartbeat, and the bound is its phase's own:

    a step, an evaluation, a batch of data   hang_seconds
    the loop's body                          10 times that
    opening, loading, saving, compiling,     30 times that
      and the first steps, which compile too

or three times the longest silence of that kind in this attempt, where that is more. That nobody is ended who is merely
slow, it is assumed that no micro-batch, no fetch of data and no pass through the loop's body is silent for longer.
What waits for others is not stuck: a silence is a hang only where nobody is left whom the silent ones could wait for.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardwise.errors import EXIT_FAILED
from shardwise.launch.heartbeat import UNWATCHED
from shardwise.launch.outcome import FirstFailure

# Named at nine tenths of the bound: the rest is for looking, and for the ranks to say where they are.
PATIENCE = 0.9
# A silence is healthy up to so many times the longest of its kind.
SLACK = 3.0
# torchrun gives the ranks 10 s after one is gone: that end is no hang.
GONE_SECONDS = 15.0
WIDE, LONG = 10.0, 30.0
_LONG_PHASES = ("setup", "resume", "compile", "load", "save")
_WIDE_PHASES = ("loop body",)
FIRST_STEPS = 2
# Two steps ahead: then the other one does not need this one, and is no reason for its silence.
AHEAD = 2

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
State = Literal["running", "sleeping", "in the kernel", "stopped", "gone", "lost"]
Kind = Literal["step", "wide", "long"]


class Seen(msgspec.Struct, frozen=True):
    """A rank as its node's watcher sees it.

    quiet_seconds: since its last heartbeat; steps: begun in this attempt; waits: in a collective that it told; state:
    its process's, `lost` where its node says nothing any more; collectives: told by it, or by torch's recorder.
    at: where its Python stands, innermost first; stacks: the file with all it had to say; mute: none of its Python
    threads answered, as when native code keeps the GIL.
    """

    rank: int
    pid: int
    host: str
    phase: str
    step: int
    micro: int
    steps: int
    quiet_seconds: Seconds
    waits: bool
    collective: str
    collectives: int
    state: State
    at: str = ""
    waits_by_stack: bool = False
    wait_channel: str = ""
    stacks: str = ""
    mute: bool = False

    @property
    def moves(self) -> bool:
        return self.state not in ("stopped", "gone", "lost")


class Hang(msgspec.Struct, frozen=True):
    """Who is stuck. rank, phase, step, since_seconds, state: of the first of `stuck`; why and fix: for a person.

    ranks: all, as they were seen; folder: their stacks; left: processes that nothing could end.
    """

    rank: int
    phase: str
    step: int
    since_seconds: Seconds
    state: State
    why: str
    fix: str
    stuck: tuple[int, ...]
    ranks: tuple[Seen, ...]
    attempt: int = 0
    folder: str = ""
    left: tuple[int, ...] = ()
    schema_version: Literal[1] = 1

    @property
    def what(self) -> str:
        """One sentence."""
        who = _named(self.stuck).capitalize()
        host = next(seen.host for seen in self.ranks if seen.rank == self.rank)
        made = "has made" if len(self.stuck) == 1 else "have made"
        return f"{who} on {host} {made} no progress for {self.since_seconds:.0f} s, at step {self.step} ({self.phase})."


def kind_of(phase: str, steps: int) -> Kind:
    if phase in _LONG_PHASES or (steps <= FIRST_STEPS and phase not in _WIDE_PHASES):
        return "long"
    return "wide" if phase in _WIDE_PHASES else "step"


def bound_seconds(seen: Seen, hang_seconds: float, longest: Mapping[Kind, float]) -> float:
    """For how long this rank may say nothing. What is stopped or gone has no phase that could explain it."""
    if seen.state == "gone":
        return max(hang_seconds, GONE_SECONDS)
    if seen.state in ("stopped", "lost"):
        return hang_seconds
    kind = kind_of(seen.phase, seen.steps)
    factor = {"step": 1.0, "wide": WIDE, "long": LONG}[kind]
    return max(factor * hang_seconds, SLACK * longest.get(kind, 0.0))


def hangs(ranks: Sequence[Seen], hang_seconds: float, longest: Mapping[Kind, float]) -> bool:
    """Whether a rank is silent beyond its bound, and no other one is left that it could be waiting for."""
    watched = [seen for seen in ranks if seen.phase not in UNWATCHED]
    overdue = {s.rank for s in watched if s.quiet_seconds >= PATIENCE * bound_seconds(s, hang_seconds, longest)}

    def explains(other: Seen, silent: Seen) -> bool:
        free = other.moves and not other.waits and other.rank not in overdue
        return free and other.step < silent.step + AHEAD

    return any(
        not seen.moves or not any(explains(other, seen) for other in watched if other is not seen)
        for seen in watched
        if seen.rank in overdue
    )


def stuck_ones(ranks: Sequence[Seen]) -> tuple[list[Seen], bool]:
    """The ranks that the others wait for, by the strongest evidence there is; and whether all wait for each other."""
    watched = [seen for seen in ranks if seen.phase not in UNWATCHED] or list(ranks)
    for state in ("lost", "gone", "stopped", "in the kernel"):
        if found := [seen for seen in watched if seen.state == state]:
            return found, False
    outside = [seen for seen in watched if not seen.waits and not seen.waits_by_stack]
    if outside:
        # Who waits in a collective has let the GIL go. Of several outside, the one that others are ahead of.
        if 0 < sum(seen.mute for seen in watched) < len(watched):
            outside = [seen for seen in outside if seen.mute] or outside
        behind = min((seen.step, seen.collectives) for seen in outside)
        return [seen for seen in outside if (seen.step, seen.collectives) == behind], False
    behind = min((seen.step, seen.collectives) for seen in watched)
    return [seen for seen in watched if (seen.step, seen.collectives) == behind], True


def conclude(ranks: Sequence[Seen], *, attempt: int, folder: str, hang_seconds: float, world: int = 0) -> Hang:
    """The hang as it is told, of what all ranks said, at least one; `world`: how many there should be."""
    stuck, all_wait = stuck_ones(ranks)
    first = max(stuck, key=lambda seen: seen.quiet_seconds)
    why, fix = _reason(first, ranks, all_wait, hang_seconds)
    if all_wait and (silent := sorted(set(range(world)) - {seen.rank for seen in ranks})):
        why, fix = f"nothing was ever heard of {_named(silent)}", "look at their nodes, and at their logs"
    return Hang(
        rank=first.rank, phase=first.phase, step=first.step, since_seconds=first.quiet_seconds, state=first.state,
        why=why, fix=fix, stuck=tuple(seen.rank for seen in stuck), ranks=tuple(ranks), attempt=attempt, folder=folder,
    )  # fmt: skip


def _named(numbers: Sequence[int]) -> str:
    some = ", ".join(map(str, numbers[:8]))
    return f"rank {some}" if len(numbers) == 1 else f"ranks {some}{' and others' if len(numbers) > 8 else ''}"


def _reason(first: Seen, ranks: Sequence[Seen], all_wait: bool, hang_seconds: float) -> tuple[str, str]:
    pid = f"its process {first.pid}"
    stacks = f"look at {first.stacks}" if first.stacks else "look at the stacks"
    if first.state == "lost":
        return f"{first.host} has not been heard of", "look at that node, and leave it out or repair it"
    if first.state == "gone":
        return f"{pid} is gone, and nobody ended the others", "look for what killed it: the kernel's log, the scheduler"
    if first.state == "stopped":
        return f"{pid} is stopped (SIGSTOP, or a debugger)", f"find who stopped it; kill -CONT {first.pid} wakes it"
    if first.state == "in the kernel":
        return f"{pid} waits in the kernel ({first.wait_channel or 'where is not known'})", "look at its disk or device"
    at = f", at {first.at}" if first.at else ""
    if all_wait:
        names = sorted({seen.collective for seen in ranks if seen.collective})
        if len(names) > 1:
            return f"the ranks wait in different calls: {'; '.join(names)}", "make all ranks make the same calls"
        return f"all ranks wait for each other{at}", "look at the network between the nodes"
    others = sum(seen.waits or seen.waits_by_stack for seen in ranks)
    waiting = f", while {others} of the {len(ranks) - 1} others wait in a collective" if others else ""
    if first.mute:
        return f"{pid} answers nothing: native code holds the GIL{at}{waiting}", f"{stacks}"
    busy = "runs" if first.state == "running" else "sleeps"
    longer = f"where that may take longer than {hang_seconds:g} s: more train.hang_seconds"
    return f"{pid} {busy} outside of any collective{at}{waiting}", f"{stacks}; {longer}"


def text(hang: Hang) -> str:
    """A screen: the sentence, why, fix, and a line of each rank; of many the stuck ones and the first others."""
    lines = [f"hang: {hang.what}", f"  why: {hang.why}", f"  fix: {hang.fix}"]
    order = sorted(hang.ranks, key=lambda seen: (seen.rank not in hang.stuck, seen.rank))
    lines += [f"  {_line(seen)}" for seen in order[:12]]
    lines += [f"  and {len(order) - 12} more"] if len(order) > 12 else []
    lines += [f"  stacks and last collectives of all ranks: {hang.folder}"] if hang.folder else []
    return "\n".join(lines)


def _line(seen: Seen) -> str:
    doing = f"in {seen.collective}" if seen.waits else f"after {seen.collectives} collectives"
    at = f", {seen.at}" if seen.at else ""
    micro = f", micro-batch {seen.micro}" if seen.micro else ""
    return (
        f"rank {seen.rank} ({seen.state}): step {seen.step}, {seen.phase}{micro}, {doing}, "
        f"quiet for {seen.quiet_seconds:.0f} s{at}"
    )


def failure(hang: Hang) -> FirstFailure:
    """As the failure that the others followed from."""
    said = f"{hang.what}\n  why: {hang.why}\n  fix: {hang.fix}\n  stacks and last collectives: {hang.folder}"
    return FirstFailure(
        rank=hang.rank, text=said, exit_code=EXIT_FAILED, step=hang.step, phase=hang.phase, expected=True,
        error=f"hang: {hang.phase}: {hang.why}",
    )  # fmt: skip


def write(path: Path, hang: Hang) -> None:
    """At once or not at all. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(hang))
    temporary.replace(path)


def found(logs: str | Path) -> Hang | None:
    """What a watcher left in a job's logs, or in a folder below a run's hangs/; None where nothing hung.

    Of several nodes' the first one that knows who it was. Raises: msgspec.DecodeError for a file that is not one.
    """
    left = [msgspec.json.decode(path.read_bytes(), type=Hang) for path in sorted(Path(logs).glob("hang-node-*.json"))]
    return left[0] if left else None
