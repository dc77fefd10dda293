"""Whether a trace can be believed: what it lacks is counted and said, and below a coverage nothing is concluded."""

import re
from typing import NamedTuple

import numpy as np

from shardwise.profiling.breakdown import Steps, launches, of_names, on_device
from shardwise.profiling.trace import Doubts, Kind, Trace

# Calls after which a kernel or a copy must have run. Fills are not among them: profilers leave small ones out.
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|ModuleLaunch|GraphLaunch|Memcpy\w*Async")
LEAST_COVERAGE = 0.9
MOST_FAULTS = 0.1


class Trust(NamedTuple):
    """`launches` of kernels and copies that were recorded, `lost` of them without their work; `work`: the device's
    events; `events`: all that were read; `steps`: as marked, 0 where none is.
    """

    launches: int
    lost: int
    work: int
    events: int
    steps: int
    doubts: Doubts

    @property
    def coverage(self) -> float:
        """Of the launches, the part whose work is there; 1 where none was recorded."""
        return 1.0 - self.lost / self.launches if self.launches else 1.0

    @property
    def faults(self) -> float:
        """The part of the events that have no time, or one that cannot be."""
        wrong = self.doubts.malformed + self.doubts.absurd
        return wrong / (wrong + self.events) if wrong else 0.0

    @property
    def refusal(self) -> str:
        """Why nothing can be concluded; empty where something can."""
        if not self.work:
            recorded = f"{self.launches} launches were recorded, none of their work" if self.launches else "no launch"
            return f"no work of a device is in the trace ({recorded}): profile with ProfilerActivity.CUDA"
        if self.coverage < LEAST_COVERAGE:
            return (
                f"the profiler lost {self.lost} of {self.launches} launches' work ({1 - self.coverage:.0%}): what "
                "looks idle may have been busy; profile again, with more warmup or fewer steps"
            )
        if self.faults > MOST_FAULTS:
            return f"{self.faults:.0%} of the events have no time, or one that cannot be: profile again"
        return ""

    @property
    def said(self) -> tuple[str, ...]:
        """What a reader must know beside the figures."""
        doubts, found = self.doubts, []
        if doubts.truncated:
            found.append("the file is cut off: what comes after is not known")
        if self.lost:
            found.append(f"{self.lost} of {self.launches} launches have no work in the trace")
        if doubts.absurd:
            found.append(f"{doubts.absurd} events with times that cannot be were left out")
        if doubts.malformed:
            found.append(f"{doubts.malformed} events without a time were left out")
        if self.work and not self.steps:
            found.append("no steps are marked (profiler.step()): figures are of the whole trace, its begin and end too")
        return tuple(found)


def trust_of(trace: Trace, steps: Steps) -> Trust:
    """What the trace lacks. A launch near the end may have run after the profiler stopped: only those are asked for
    that were called before the last work of the device began.
    """
    events = trace.events
    device = on_device(events)
    last = int(events.start[device].max()) if device.any() else np.iinfo(np.int64).max
    asked = (events.kind == Kind.RUNTIME) & of_names(trace, LAUNCH)[events.name] & (events.start <= last)
    _, calls = launches(events)
    answered = np.zeros(len(events.start), dtype=bool)
    answered[calls] = True
    return Trust(
        launches=int(asked.sum()),
        lost=int((asked & ~answered).sum()),
        work=int(device.sum()),
        events=len(events.start),
        steps=len(steps.begins) if steps.marked else 0,
        doubts=trace.doubts,
    )
