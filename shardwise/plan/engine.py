"""Which plans of a space this engine runs, as a mask; the others are planned only. No torch.

The same answer as `plan/check.py` gives for one plan, which also says why; tests/unit/test_search_space.py compares.
"""

import functools
import itertools

import numpy as np
from numpy.typing import NDArray

from shardwise.inputs.arch import Arch
from shardwise.plan import combinations
from shardwise.plan.combinations import COMPILE, DATA, RECOMPUTE, SCHEDULES, TENSOR, Cell
from shardwise.plan.plan import Decision
from shardwise.plan.planned_only import against_experts
from shardwise.plan.space import Column, Table

Flags = NDArray[np.bool_]
LATER = {"cp": "context parallel", "ep": "expert parallel"}


@functools.cache
def _composes() -> Flags:
    """The table of combinations, an axis a part: schedule, data, recompute, compile, tensor."""
    parts = (SCHEDULES, DATA, RECOMPUTE, COMPILE, TENSOR)
    verdicts = [isinstance(combinations.verdict(Cell(*cell)), str) for cell in itertools.product(*parts)]
    return np.array(verdicts).reshape([len(part) for part in parts])


def runs(table: Table, arch: Arch) -> Flags:
    """Of plans with their splits: degrees and options that the engine has, in a combination that it runs."""
    data = _data_kind(table)
    composed = _composes()[
        table["schedule"], data, table["recompute"], table["compiled"], (table["tp"] > 1).astype(np.int64)
    ]
    return np.asarray(composed & _axes_run(table, arch) & (table["offload"] == 0))


def may_run(table: Table, arch: Arch) -> Flags:
    """Of cores or pipelines: whether some split, and some schedule where none is given, runs."""
    tensor = (table["tp"] > 1).astype(np.int64)
    options = (table["recompute"], table["compiled"], tensor)
    if "schedule" in table:
        some = np.any(_composes(), axis=1)[table["schedule"], *options]
    else:
        some = np.any(_composes(), axis=(0, 1))[*options]
    return np.asarray(some & _axes_run(table, arch))


def reasons(decision: Decision, arch: Arch) -> tuple[str, ...]:
    """Why this engine does not run a decision: empty where it does."""
    found = [
        f"{name} = {degree}: {LATER[name]} is planned only"
        for name in LATER
        if (degree := getattr(decision.mesh, name)) > 1
    ]
    against = against_experts(decision, arch)
    found += [f"{name} = {getattr(decision.mesh, name)}: {why}" for name, why in against.items()]
    if decision.offload != "none":
        found.append(f"offload = {decision.offload}: no offload yet")
    if decision.shares != "equal":
        found.append("uneven shares of the batch")
    return (*found, *(one.why for one in combinations.refusals(combinations.cell_of(decision))))


def _axes_run(table: Table, arch: Arch) -> Flags:
    found = (table["cp"] == 1) & (table["ep"] == 1)
    if arch.experts is not None:
        found &= (table["tp"] == 1) & (table["pp"] == 1)
    return np.asarray(found)


def _data_kind(table: Table) -> Column:
    """Index into DATA: one rank, a ZeRO stage, or hybrid with its stage."""
    hybrid = (table["dp_replicate"] > 1) & (table["dp_shard"] > 1)
    kind = np.where(hybrid, DATA.index("hybrid1") - 1, DATA.index("zero0")) + table["zero"]
    return np.where(table["data_parallel"] == 1, DATA.index("one"), kind)
