"""Where a step's time went: exclusive categories that sum to it, by unions of intervals.

A step goes from the later of its mark's begin and the end of the step before, to the later of its mark's end and the
end of the last device work that was launched in it: device work runs on after the host has gone to the next step.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.profiling.intervals import Stamps, Union, exclusive, union
from shardwise.profiling.trace import ON_DEVICE, Events, Kind, Trace

STEP = re.compile(r"^ProfilerStep#?\s*\d+$")
LOADER = re.compile(r"^enumerate\(DataLoader\)|torch/utils/data/dataloader\.py\(\d+\): __next__$")
# Kernels that move data between devices: of NCCL and RCCL by whatever prefix, and of libraries that are not called so.
COMMUNICATION = (
    r"nccl|rccl",
    r"deep_ep|^void ep::|internode|intranode",
    r"cross_device_reduce|custom_all_?reduce|all_?reduce_(one|two)shot|(one|two)_shot_all_?reduce|multimem_all",
    r"mscclpp|nvshmem|rocshmem",
)
# A forward that is made again for its activations: recorded where Python's functions are (with_stack = True).
RECOMPUTE = re.compile(r"torch/utils/checkpoint\.py\(\d+\): recompute_fn$|^CheckpointFunctionBackward$")
CATEGORIES = ("compute", "recompute", "communication", "memcpy", "data_loader", "host", "idle")


class Steps(NamedTuple):
    """m windows in ns, in order and disjoint. `marked`: the trace says where steps are; else one window is all."""

    names: tuple[str, ...]
    begins: Stamps
    ends: Stamps
    marked: bool


class Breakdown(NamedTuple):
    """`spent` [steps, categories] ns: each row sums to its step. `hidden` ns: communication under other kernels."""

    steps: Steps
    categories: tuple[str, ...]
    spent: Stamps
    hidden: int

    @property
    def shares(self) -> dict[str, float]:
        """Of all steps together, each in [0, 1]; they sum to 1."""
        whole = int(self.spent.sum())
        return {name: int(self.spent[:, at].sum()) / whole for at, name in enumerate(self.categories)} if whole else {}


def broken_down(trace: Trace, steps: Steps, more_communication: Sequence[str] = ()) -> Breakdown:
    """By what the device did, and where it did nothing by what the host did.

    compute: any kernel that moves nothing between devices runs. recompute: only such that make a forward again.
    communication: only kernels that move data between devices, so all of it is exposed. memcpy: only copies and fills.
    The device does nothing: data_loader: the host is in the loader. host: it is in a call or an operator. idle: in
    neither, as far as was recorded. `more_communication`: patterns of a user's own kernels.
    """
    events = trace.events
    moves = of_names(trace, re.compile("|".join((*COMMUNICATION, *more_communication)), re.IGNORECASE))[events.name]
    kernel = events.kind == Kind.KERNEL
    again = kernel & ~moves & recomputes(trace)
    compute, communication = _union(events, kernel & ~moves & ~again), _union(events, kernel & moves)
    copies = _union(events, (events.kind == Kind.MEMCPY) | (events.kind == Kind.MEMSET))
    loader = _union(events, of_names(trace, LOADER)[events.name] & ~on_device(events))
    works = np.isin(events.kind, (Kind.RUNTIME, Kind.OPERATOR)) & ~of_names(trace, STEP)[events.name]
    layers = (compute, _union(events, again), communication, copies, loader, _union(events, works))
    spent = exclusive(layers, steps.begins, steps.ends)
    alone = int(spent[:, CATEGORIES.index("communication")].sum())
    moved = int(exclusive((communication,), steps.begins, steps.ends)[:, 0].sum())
    return Breakdown(steps, CATEGORIES, spent, moved - alone)


def recomputes(trace: Trace) -> npt.NDArray[np.bool_]:
    """Of each event, whether it was launched, on the same thread, while a forward was made again."""
    events = trace.events
    found = np.zeros(len(events.start), dtype=bool)
    marks = of_names(trace, RECOMPUTE)[events.name] & ~on_device(events)
    work, calls = launches(events)
    for lane in np.unique(events.lane[marks]):
        windows = _union(events, marks & (events.lane == lane))
        at = np.searchsorted(windows.starts, events.start[calls], side="right") - 1
        inside = (at >= 0) & (events.start[calls] < windows.ends[np.maximum(at, 0)])
        found[work[inside & (events.lane[calls] == lane)]] = True
    return found


def launches(events: Events) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Work of the device, and the call that launched each, as indices; work without a recorded call is left out."""
    calls = np.flatnonzero((events.kind == Kind.RUNTIME) & (events.correlation != 0))
    work = np.flatnonzero(on_device(events) & (events.correlation != 0))
    if not len(calls) or not len(work):
        return work[:0], calls[:0]
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    at = np.minimum(np.searchsorted(events.correlation[calls], events.correlation[work]), len(calls) - 1)
    tied = events.correlation[calls[at]] == events.correlation[work]
    return work[tied], calls[at[tied]]


def steps_of(trace: Trace) -> Steps:
    """The steps that ProfilerStep marks, with their device work; where none is marked, the span of all work."""
    events = trace.events
    marks = np.flatnonzero(of_names(trace, STEP)[events.name] & ~on_device(events))
    if not len(marks):
        return _span(events)
    marks = marks[np.argsort(events.start[marks], kind="stable")]
    begins, ends = events.start[marks].copy(), events.end[marks].copy()
    launched, device_ends, first = _launched(events, begins, ends)
    previous = int(begins[0])
    if len(launched) and (launched == 0).any():
        # What ran before the first step's own work belongs to what came before.
        earlier = on_device(events) & (events.start < first)
        previous = max(previous, int(events.end[earlier].max(initial=previous)))
    for at in range(len(marks)):
        own = device_ends[launched == at]
        begins[at] = max(previous, int(begins[at]))
        ends[at] = max(int(ends[at]), int(own.max(initial=0)), int(begins[at]))
        previous = int(ends[at])
    return Steps(tuple(trace.names[name] for name in events.name[marks]), begins, ends, True)


def on_device(events: Events) -> npt.NDArray[np.bool_]:
    return np.isin(events.kind, ON_DEVICE)


def of_names(trace: Trace, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """For each of the trace's names, whether the pattern is found in it."""
    return np.array([pattern.search(name) is not None for name in trace.names], dtype=bool)


def device_span(trace: Trace) -> Steps:
    """One window: from the first to the last work of the device."""
    return _span(trace.events.where(on_device(trace.events)))


def _span(events: Events) -> Steps:
    if not len(events.start):
        return Steps((), np.empty(0, np.int64), np.empty(0, np.int64), False)
    return Steps(("all",), events.start.min()[None], events.end.max()[None], False)


def _launched(events: Events, begins: Stamps, ends: Stamps) -> tuple[npt.NDArray[np.int64], Stamps, int]:
    """Of device work whose launch was recorded in a step: that step's index and the work's end; and when the first work
    of the first step began.
    """
    work, calls = launches(events)
    when = events.start[calls]
    step = np.searchsorted(begins, when, side="right") - 1
    inside = (step >= 0) & (when <= ends[np.maximum(step, 0)])
    work, step = work[inside], step[inside]
    of_first = events.start[work[step == 0]]
    return step, events.end[work], int(of_first.min()) if len(of_first) else 0


def _union(events: Events, chosen: npt.NDArray[np.bool_]) -> Union:
    return union(events.start[chosen], events.end[chosen])
