"""After an attempt: whether another one begins, with which devices, after what pause; or that it ends, and why. Pure.

A cause decides, and each has its own budget; torchelastic counts all of them together, so inside an attempt it starts
nothing again.

    done, interrupted, preempted   it ends with its code; a preemption is never counted
    bad_input, out_of_memory       never tried again as it is: it would come again
    diverged                       never tried again as it is: the same steps diverge again
    crash, lost                    again, at most `crashes` times; a kill that nobody explains counts as a crash
    hang                           again, at most `hangs` times

A load that fails counts as a crash and against its checkpoint: in time an older one is taken, so it may come again.

An exit counts until the run has trained LASTING_SECONDS beyond it, into a checkpoint: a run of a month meets hundreds
of failures, and one that gets no further must end. Seconds and not steps: a step takes anything from 0.01 to 100 s.
A command that is started again has full budgets: whoever started it, a person or a queue, wanted another try.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from shardwise.errors import EXIT_REQUEUE
from shardwise.inputs.recipe import Restarts
from shardwise.launch.outcome import Cause, same_error

# Long enough that what fails at a fixed distance from its start does not go on for ever; failures of thousands of GPUs
# are some three hours apart (Llama 3: 419 unplanned in 54 days).
LASTING_SECONDS = 3600.0
LONGEST_PAUSE_SECONDS = 60.0
# Told to stop from outside or ended well: nothing went wrong.
ENDINGS: tuple[Cause, ...] = ("done", "interrupted", "preempted")
# Kinds of errors that come and go with the machine; all others, before anything was trained, come again.
PASSING = (
    *(
        "OSError",
        "TimeoutError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "BrokenPipeError",
    ),
    *("DistNetworkError", "DistStoreError", "DistBackendError"),
)

# Counted against the checkpoint that was loaded, and so no reason to end: another is taken after a few.
LOADING = "LoadFailed"

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class Device(NamedTuple):
    """A device by its place among a node's; "" is this machine, where it is alone."""

    node: str
    place: int


class Exit(msgspec.Struct, frozen=True):
    """How an attempt ended, and where the run stood.

    step: where it failed, None before the first; committed: after which a restart goes on; gained_seconds: trained in
    this attempt beyond where the run was before, into `committed`; device: of the first rank to fail, by its place
    among the devices of `node`; elsewhere: another node was told to stop, is gone or came, and this one goes on.
    """

    attempt: int
    cause: Cause
    code: int
    step: int | None = None
    committed: int = 0
    error: str = ""
    why: str = ""
    fix: str = ""
    device: int | None = None
    node: str = ""
    lost_steps: int = 0
    lost_seconds: Seconds = 0.0
    gained_seconds: Seconds = 0.0
    elsewhere: bool = False


class Restart(NamedTuple):
    """Another attempt. `counted`: "crash 1 of 3"; leave_out: devices that failed again, not to be used any more."""

    pause_seconds: float
    counted: str
    leave_out: frozenset[Device] = frozenset()


class Stop(NamedTuple):
    """The end: the exit code of the whole, and why nothing is tried again; empty where there is nothing to say."""

    code: int
    why: str = ""


def decide(history: Sequence[Exit], budgets: Restarts) -> Restart | Stop:
    """What follows the last exit of `history`, oldest first."""
    last = history[-1]
    if last.elsewhere and last.cause in ("preempted", "lost"):
        return Restart(0.0, "the nodes changed, not counted", left_out(history))
    if last.cause in ENDINGS:
        return Stop(last.code)
    if final := _final(last, history):
        return Stop(last.code, final)
    counting = [one for one in still_counted(history) if _budget_of(one.cause) == _budget_of(last.cause)]
    name, limit = ("hang", budgets.hangs) if last.cause == "hang" else ("crash", budgets.crashes)
    if len(counting) > limit:
        key = "hangs" if name == "hang" else "crashes"
        return Stop(last.code, f"{name} {len(counting)}, and train.restarts.{key} = {limit}")
    return Restart(pause_seconds(len(counting)), f"{name} {len(counting)} of {limit}", left_out(history))


def _budget_of(cause: Cause) -> str:
    return "hangs" if cause == "hang" else "crashes"


def _final(last: Exit, history: Sequence[Exit]) -> str:
    """Why this is never tried again as it is; empty where it may be."""
    if last.cause == "bad_input":
        return "the input would be as bad again"
    if last.cause == "out_of_memory":
        return f"it would not fit again either; {last.fix or 'change the plan or the batch first'}"
    if last.cause == "diverged":
        return "the same steps would diverge again; change something, or go on from an earlier checkpoint"
    if last.cause == "lost":
        return ""  # a KILL has no words of its own: two of them are not known to be the same
    if last.error.partition(":")[0] == LOADING:
        return ""
    if last.step in (None, 0) and last.cause == "crash" and len(history) == 1 and not passes(last.error):
        return "nothing was trained yet, and it would come again"
    if any(_same(one, last) for one in history[:-1]):
        return f"the same error came at step {last.step or 0} before: it would come again"
    return ""


def _same(one: Exit, other: Exit) -> bool:
    return (one.cause, one.step, same_error(one.error)) == (other.cause, other.step, same_error(other.error))


def passes(error: str) -> bool:
    """Whether an error is of a kind that comes and goes: of files, of the network; and what has no error to name."""
    kind = error.partition(":")[0]
    return not kind.isidentifier() or kind in PASSING


def still_counted(history: Sequence[Exit]) -> list[Exit]:
    """The exits that count against a budget: those since which the run has not made lasting progress."""
    counted: list[Exit] = []
    gained = 0.0
    for one in reversed(history):
        if gained < LASTING_SECONDS and one.cause not in ENDINGS and not one.elsewhere:
            counted.append(one)
        gained += one.gained_seconds
    return counted[::-1]


def pause_seconds(count: int) -> float:
    """None before the first of a budget, then 1, 2, 4 s and on: what is broken gets time, a lone failure costs none."""
    return 0.0 if count < 2 else min(LONGEST_PAUSE_SECONDS, 2.0 ** (count - 2))


def left_out(history: Sequence[Exit]) -> frozenset[Device]:
    """The devices under which a rank was killed or crashed twice since the last lasting progress.

    Once is chance, and any error of the user's own comes on the first rank; so only deaths from outside count.
    """
    lost = [one for one in still_counted(history) if one.cause == "lost"]
    failed = [Device(one.node, one.device) for one in lost if one.device is not None]
    return frozenset(device for device in failed if failed.count(device) > 1)


class Span(NamedTuple):
    """How many devices a run takes: at least and at most."""

    least: int
    most: int


def world_of(span: Span, here: int | None, gone: int) -> int | None:
    """How many ranks start: as many as asked for and left. None where that is fewer than the least.

    here: devices that are visible, None where ranks are not bound to devices (CPU cores can be shared); gone: of those
    asked for, left out because they failed again.
    """
    there = span.most - gone if here is None else min(span.most, here - gone)
    return there if there >= span.least else None


def too_few(span: Span, left: int) -> Stop:
    """Not this run's fault: back into the queue, where other machines may be."""
    return Stop(EXIT_REQUEUE, f"{left} devices are left, and train.devices asks for at least {span.least}")


class Shape(NamedTuple):
    """So many nodes, with so many ranks on each."""

    nodes: int
    ranks: int

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


def shapes(free: Sequence[int], nodes: Span, ranks: Span) -> list[Shape]:
    """What nodes can make together, the most ranks first, of equals on fewer nodes; as many on each, as a mesh has.

    free: how many ranks each could give. The first, which holds the meeting, always takes part.
    """
    most, others = free[0], sorted(free[1:], reverse=True)
    found = []
    for count in range(nodes.least, min(nodes.most, len(free)) + 1):
        each = min([ranks.most, most, *others[: count - 1]])
        if each >= ranks.least:
            found.append(Shape(count, each))
    return sorted(found, key=lambda shape: (-shape.world, shape.nodes))
