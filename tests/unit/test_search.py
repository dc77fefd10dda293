"""The search: exactly the best plans of the space written out, and few of them costed."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost.workload import Trainable, Workload
from shardwise.inputs.arch import Experts, preset
from shardwise.inputs.hardware import parse_cluster
from shardwise.plan import bounds, engine, space
from shardwise.plan.search import DISTINCT, CostModel, Found, Ranked, candidates, search
from shardwise.plan.space import Task
from shardwise.plan.subject import Subject
from tests.unit.roofline import ROOFLINE

CLUSTER = parse_cluster("8xp5.48xlarge")
BASE = msgspec.structs.replace(
    preset("llama-3-8b"), name="two", num_layers=12, num_heads=16, num_kv_heads=4, hidden_size=2048, ffn_size=5632
)
MOE = msgspec.structs.replace(BASE, name="moe", experts=Experts(count=8, per_token=2, ffn_size=2816))
ARCHS = {"dense": BASE, "experts": MOE}


def subject(
    arch: str, world: int, batch: int, length: int, gibibytes: float, fixed: dict[str, int] | None = None
) -> Subject:
    workload = Workload(ARCHS[arch], length, batch, "bf16")
    task = Task(ARCHS[arch], length, batch, world, 8, fixed=fixed or {})
    return Subject(workload, CLUSTER, task, gibibytes * 2**30)


def written_out(asked: Subject, model: CostModel, runs: bool) -> dict[tuple[int, ...], float]:
    """Every plan of the space costed: the fewest seconds of each distinct kind that fits."""
    table = space.with_splits(asked.task, space.with_pipelines(asked.task, space.cores(asked.task)))
    rows = candidates(table)
    keep = model.memory(asked.workload, asked.cluster, rows).high <= asked.limit
    if runs:
        keep &= engine.runs(table, asked.task.arch)
    seconds = model.step(asked.workload, asked.cluster, rows).seconds
    best: dict[tuple[int, ...], float] = {}
    for index in np.flatnonzero(keep):
        kind = tuple(int(table[name][index]) for name in DISTINCT)
        best[kind] = min(best.get(kind, np.inf), float(seconds[index]))
    return best


def assert_same(ranked: Ranked, best: dict[tuple[int, ...], float], top: int) -> None:
    """The same seconds in the same order, and each plan told is of a kind that takes these.

    To the last digits: NumPy's own sums depend on how long an array is.
    """
    assert list(ranked.seconds) == pytest.approx(sorted(best.values())[:top], rel=1e-12)
    for index, seconds in enumerate(ranked.seconds):
        assert best[tuple(int(ranked.table[name][index]) for name in DISTINCT)] == pytest.approx(seconds, rel=1e-12)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    arch=st.sampled_from(sorted(ARCHS)),
    world=st.sampled_from([1, 2, 4, 6, 8, 16]),
    batch=st.sampled_from([8, 13, 32, 96]),
    length=st.sampled_from([1024, 4096]),
    gibibytes=st.floats(0.5, 80),
    top=st.sampled_from([1, 3, 8]),
)
def test_the_search_finds_what_the_whole_space_written_out_holds(
    arch: str, world: int, batch: int, length: int, gibibytes: float, top: int
) -> None:
    asked = subject(arch, world, batch, length, gibibytes)
    found = search(asked, ROOFLINE, top)
    assert found.searched == len(space.everything(asked.task))
    assert_same(found.best, written_out(asked, ROOFLINE, runs=False), top)
    assert_same(found.running, written_out(asked, ROOFLINE, runs=True), top)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(arch=st.sampled_from(sorted(ARCHS)), world=st.sampled_from([2, 8, 12]), batch=st.sampled_from([13, 32]))
def test_no_bound_is_above_what_the_model_says(arch: str, world: int, batch: int) -> None:
    asked = subject(arch, world, batch, 2048, 80)
    workload, cores = asked.workload, space.cores(asked.task)
    cores["floor"] = bounds.compute_floor(cores, ROOFLINE.step(workload, CLUSTER, candidates(bounds.mean_rank(cores))))
    pipelines = space.with_pipelines(asked.task, cores)
    pipelines["floor"] = bounds.pipeline_floor(pipelines, pipelines["floor"])
    plans = space.with_splits(asked.task, pipelines)
    seconds = ROOFLINE.step(workload, CLUSTER, candidates(plans)).seconds
    held = ROOFLINE.memory(workload, CLUSTER, candidates(plans)).device
    samples = bounds.samples_floor(ROOFLINE.memory(workload, CLUSTER, candidates(bounds.least_split(plans))))
    rounding = 1 + 1e-12
    assert np.all(plans["floor"] <= seconds * rounding)
    assert np.all(bounds.states_floor(workload, plans) <= held * rounding)
    assert np.all(bounds.least_states(workload, plans) + samples <= held * rounding)


@pytest.mark.parametrize("kind", [Trainable(), Trainable("frozen", share=0.1), Trainable("lora", rank=8)])
def test_what_is_not_trained_keeps_no_gradients_and_no_states(kind: Trainable) -> None:
    asked = subject("dense", 8, 32, 2048, 80)
    plans = space.with_splits(asked.task, space.with_pipelines(asked.task, space.cores(asked.task)))
    trained = bounds.states_floor(msgspec.structs.replace(asked.workload, trainable=kind), plans)
    full = bounds.states_floor(asked.workload, plans)
    assert np.all(trained <= full)
    whole = (plans["zero"] == 0) & (plans["offload"] == 0) & (plans["pp"] * plans["tp"] == 1)
    expected = {"full": 16.0, "frozen": 0.1 * 16 + 0.9 * 2, "lora": 2.0}[kind.kind] * BASE.parameters()
    assert trained[whole] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "gpus", "batch"),
    [("llama-3-70b", 64, 1024), ("llama-3-405b", 2048, 2048), ("llama-3-405b", 16384, 16384)],
)
def test_what_is_searched_is_far_more_than_what_is_costed(model: str, gpus: int, batch: int) -> None:
    """However many GPUs: what a search takes follows from what it costs out (seconds: benchmarks/search.py)."""
    arch, cluster = preset(model), parse_cluster(f"{gpus // 8}xp5.48xlarge")
    asked = Subject(
        Workload(arch, 8192, batch, "bf16"), cluster, Task(arch, 8192, batch, gpus, 8), cluster.device.hbm_bytes
    )
    found = search(asked, ROOFLINE)
    assert found.searched > 50 * found.costed > 0
    assert len(found.best.seconds)


def test_nothing_is_found_where_nothing_fits_or_nothing_is_valid() -> None:
    for asked in (subject("dense", 8, 32, 2048, 0.1), subject("dense", 8, 32, 2048, 80, {"tp": 5})):
        found = search(asked, ROOFLINE)
        assert len(found.best.seconds) == len(found.running.seconds) == 0


def test_a_subject_that_the_engine_does_not_build_has_no_running_plan() -> None:
    asked = subject("dense", 8, 32, 2048, 80)
    assert len(search(asked, ROOFLINE).running.seconds)
    assert not len(search(asked._replace(runs=False), ROOFLINE).running.seconds)


@pytest.mark.parametrize("name", ["pp", "tp", "zero", "recompute"])
def test_fixing_what_is_best_leaves_the_best(name: str) -> None:
    asked = subject("dense", 8, 64, 2048, 40)
    best: Found = search(asked, ROOFLINE)
    fixed = {name: int(best.best.table[name][0])}
    again = search(subject("dense", 8, 64, 2048, 40, fixed), ROOFLINE)
    assert again.best.seconds[0] == pytest.approx(best.best.seconds[0], rel=1e-12)
    assert again.searched < best.searched


def test_the_same_search_gives_the_same_plans() -> None:
    asked = subject("experts", 16, 96, 4096, 40)
    first, second = search(asked, ROOFLINE), search(asked, ROOFLINE)
    assert all(np.array_equal(first.best.table[name], second.best.table[name]) for name in first.best.table)
