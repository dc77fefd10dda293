"""How long a process has between being told to stop and being ended, and whether a save fits into it. Pure."""

from typing import NamedTuple

# Where nothing says how long: what the field's shortest notices (15 to 30 s) leave after the launcher's own share.
UNKNOWN_SECONDS = 15.0
# Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
AWS_SPOT_SECONDS = 120.0
# Source: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (terminationGracePeriodSeconds)
KUBERNETES_SECONDS = 30.0
# What is kept for leaving: joining threads, closing the group, the launcher's own end.
LEAVING_SECONDS = 2.0


class Budget(NamedTuple):
    """Seconds from the signal to the end, and who says so."""

    seconds: float
    source: str


def budget_of(asked: float | None, launcher: float | None, in_pod: bool) -> Budget:
    """The notice that this process gets: as the recipe says, as its launcher says, or as its surroundings suggest."""
    if asked is not None:
        return Budget(asked, "checkpoint.notice_seconds")
    if launcher is not None:
        return Budget(launcher, "SHARDWISE_NOTICE_SECONDS")
    if in_pod:
        return Budget(KUBERNETES_SECONDS, "a pod's default grace period")
    return Budget(UNKNOWN_SECONDS, "nothing says how long the notice is")


class Flush(NamedTuple):
    """What a stop takes: the step that is under way, and its save until it is committed. Seconds."""

    step: float
    save: float

    @property
    def seconds(self) -> float:
        return self.step + self.save + LEAVING_SECONDS


def fits(flush: Flush, budget: Budget) -> bool:
    return flush.seconds <= budget.seconds


def told(flush: Flush, budget: Budget, loses: str) -> str:
    """One line for a person: the estimate against the budget, and what it means."""
    line = (
        f"a stop takes about {flush.seconds:.1f} s (a step {flush.step:.1f}, its save {flush.save:.1f}, leaving "
        f"{LEAVING_SECONDS:.0f}), and has {budget.seconds:.0f} s ({budget.source})"
    )
    return line if fits(flush, budget) else f"{line}: each preemption loses {loses}"
