"""What binds one rank's steps: the largest loss, its evidence, and what its end would gain at most.

Utilization is the share of the steps in which a kernel computes; a forward that is made again counts, communication and
copies do not. It is not nvidia-smi's, which counts any kernel, a waiting one too.
"""

from typing import Literal, NamedTuple

from shardwise.profiling.breakdown import Breakdown
from shardwise.profiling.trust import Trust

Verdict = Literal[
    "data_loader", "host", "communication", "straggler", "pipeline_bubble", "memcpy", "stall", "small_batch", "compute",
    "unknown",
]  # fmt: skip
Status = Literal["excellent", "acceptable", "poor", "critical"]
EXCELLENT, ACCEPTABLE, POOR = 0.85, 0.70, 0.50
# What is lost, by the categories of a breakdown that make it. A device that waits while the host is in nothing that was
# recorded waits for Python, so that is the host's too.
LOSSES: dict[Verdict, tuple[str, ...]] = {
    "data_loader": ("data_loader",),
    "host": ("host", "idle"),
    "communication": ("communication",),
    "memcpy": ("memcpy",),
}
# A loss below it explains nothing that can be measured from one run to the next.
LEAST_SHARE = 0.03


class Loss(NamedTuple):
    """`share` of the steps' time that is lost to `kind`, `seconds` a step. `gain`: steps are at most so many times as
    fast without it, were nothing else to take its place.
    """

    kind: Verdict
    share: float
    seconds: float

    @property
    def gain(self) -> float:
        return 1 / (1 - self.share) if self.share < 1 else float("inf")


class Judged(NamedTuple):
    """`why`: the reason of an "unknown". `losses` from the largest on. `hidden`: of all communication, the part that
    lies under other kernels; None where there is none.
    """

    verdict: Verdict
    why: str
    utilization: float | None
    status: Status | None
    step_seconds: float | None
    losses: tuple[Loss, ...]
    hidden: float | None


def judge(found: Breakdown, trust: Trust) -> Judged:
    """compute from a utilization of 85 % on; else whatever loses most. unknown where the trace cannot be believed."""
    why = trust.refusal or ("" if found.spent.sum() else "the steps have no length")
    if why:
        return Judged("unknown", why, None, None, None, (), None)
    shares, seconds = found.shares, int(found.spent.sum()) / len(found.spent) / 1e9
    used = shares["compute"] + shares["recompute"]
    lost = [(kind, sum(shares[one] for one in parts)) for kind, parts in LOSSES.items()]
    losses = [Loss(kind, share, share * seconds) for kind, share in lost if share >= LEAST_SHARE]
    losses.sort(key=lambda loss: -loss.share)
    moved = found.hidden + shares["communication"] * int(found.spent.sum())
    return Judged(
        verdict="compute" if used >= EXCELLENT else losses[0].kind,
        why="",
        utilization=used,
        status=status_of(used),
        step_seconds=seconds,
        losses=tuple(losses),
        hidden=found.hidden / moved if moved else None,
    )


def status_of(utilization: float) -> Status:
    if utilization >= EXCELLENT:
        return "excellent"
    if utilization >= ACCEPTABLE:
        return "acceptable"
    return "poor" if utilization >= POOR else "critical"
