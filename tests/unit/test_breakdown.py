"""Breakdowns of public traces against the figures that their sources give; see the traces' README in ../shared."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from shardwise.profiling import breakdown
from shardwise.profiling.breakdown import Breakdown, broken_down, device_span, steps_of
from shardwise.profiling.intervals import exclusive, union
from shardwise.profiling.trace import Kind, Trace, read

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside this checkout")

# kineto's own figures, us a step: of the loader, of kernels; then the shares in percent that its page shows.
KINETO = {
    "resnet50_num_workers_0": (
        [69317, 57669, 61257, 56453, 62690, 48185], [98598, 98570, 98596, 98623, 98504, 98641],
        [55.51, 1.08, 0.05, 1.64, 33.37, 7.70, 0.65], 177592,
    ),
    "resnet50_num_workers_4": (
        [4341, 0, 6, 0, 1370, 1400], None, [70.28, 2.24, None, 7.49, 0.84, 16.07, 3.01], 141068,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINETO)
def test_kinetos_figures_to_the_microsecond(name: str) -> None:
    """Its categories, in its order: Kernel, Memcpy, Memset, Runtime, DataLoader, CPU, Other."""
    loader, kernels, shares, mean = KINETO[name]
    trace = read(TRACES / f"{name}.pt.trace.json.gz")
    kind, steps = trace.events.kind, steps_of(trace)
    loads, marks = (breakdown.of_names(trace, one)[trace.events.name] for one in (breakdown.LOADER, breakdown.STEP))
    layers = [kind == Kind.KERNEL, kind == Kind.MEMCPY, kind == Kind.MEMSET, kind == Kind.RUNTIME, loads]
    spent = exclusive([covering(trace, one) for one in (*layers, (kind == Kind.OPERATOR) & ~marks)], *steps[1:3])
    assert steps.names == tuple(f"ProfilerStep#{n}" for n in range(5, 11))
    assert spent[:, 4].tolist() == [1000 * us for us in loader]
    assert kernels is None or spent[:, 0].tolist() == [1000 * us for us in kernels]
    assert int(spent.sum() / len(spent) / 1000) == mean
    for found, expected in zip(100 * spent.sum(0) / spent.sum(), shares, strict=True):
        assert expected is None or round(float(found), 2) == expected
    ours = broken_down(trace, steps)
    assert column(ours, "data_loader").tolist() == [1000 * us for us in loader]
    assert (column(ours, "compute") == spent[:, 0]).all(), "no kernel there moves data between devices"


# TraceLens's: ms of computation, exposed communication, exposed copies; it counts fills as computation.
TRACELENS = {
    "tracelens_h100_bert_small": (0.30719775, 0, 0.00223999, 3.907825),
    "tracelens_h100_timesformer": (154.96903125, 0, 3.46414183, 159.99242697),
}


@pytest.mark.parametrize("name", TRACELENS)
def test_tracelens_figures_to_a_thousandth(name: str) -> None:
    trace = read(TRACES / f"{name}.json.gz")
    kind = trace.events.kind
    layers = (np.isin(kind, (Kind.KERNEL, Kind.MEMSET)), kind == Kind.MEMCPY)
    window = device_span(trace)
    (spent,) = exclusive([covering(trace, one) for one in layers], window.begins, window.ends) / 1e6
    compute, communication, copies, whole = TRACELENS[name]
    assert communication == 0 and spent[:2] == pytest.approx([compute, copies], rel=1e-3)
    assert spent.sum() == pytest.approx(whole, rel=1e-6)


def test_a_step_with_recompute_and_communication_is_as_tracelens_has_it() -> None:
    """It looks at work whose launch was recorded, which is what our steps hold; recompute hides no communication there,
    and fills are not counted.
    """
    trace = read(TRACES / "tracelens_mi300_resnet.json.gz")
    events, steps = trace.events, steps_of(trace)
    found = broken_down(trace, steps)
    assert found.spent.sum() / 1e6 == pytest.approx(56.51760303, rel=1e-6)
    assert found.shares["compute"] == pytest.approx(0.26738384, abs=1e-3)
    moves = breakdown.of_names(trace, re.compile("nccl"))[events.name]
    kernel, again = events.kind == Kind.KERNEL, breakdown.recomputes(trace)
    layers = (kernel & ~moves & ~again, kernel & moves, (events.kind == Kind.MEMCPY) & ~again)
    shares = exclusive([covering(trace, one) for one in layers], steps.begins, steps.ends).sum(0) / found.spent.sum()
    assert shares == pytest.approx([0.26738384, 0.67842906, 0.02802015, 0.02616694], abs=1e-3)


def test_what_is_known_of_the_others() -> None:
    shares = {name: of(name).shares for name in ("hta_ns_resolution", "hta_df_index_resolver", "hta_nccl_data")}
    assert shares["hta_ns_resolution"]["compute"] > 0.96
    idle = {name: sum(each[one] for one in ("data_loader", "host", "idle")) for name, each in shares.items()}
    assert 0.42 < idle["hta_df_index_resolver"] < 0.46 and 0.75 < idle["hta_nccl_data"] < 0.78
    assert of("hta_df_index_resolver").hidden == 0, "nothing of its all-reduces lies under other kernels"
    hides = of("hta_trace_diff_test")
    moved = hides.hidden + int(column(hides, "communication").sum())
    assert 0.68 < hides.hidden / moved < 0.72 and 0.125 < hides.shares["memcpy"] < 0.135


def test_a_users_own_names_are_communication_too() -> None:
    trace = read(TRACES / "hta_ns_resolution.json.gz")
    name = trace.names[int(trace.events.name[trace.events.kind == Kind.KERNEL][0])]
    told = broken_down(trace, steps_of(trace), [re.escape(name)])
    assert column(told, "communication").sum() > 0 == column(of("hta_ns_resolution"), "communication").sum()


@cache
def of(name: str) -> Breakdown:
    trace = read(TRACES / f"{name}.json.gz")
    return broken_down(trace, steps_of(trace))


def column(found: Breakdown, name: str) -> npt.NDArray[np.int64]:
    return found.spent[:, found.categories.index(name)]


def covering(trace: Trace, chosen: npt.NDArray[np.bool_]) -> breakdown.Union:
    return union(trace.events.start[chosen], trace.events.end[chosen])
