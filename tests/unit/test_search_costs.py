"""The bounds of the search, held against the cost model's own answers: no plan takes less than any bound says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost.floor import bytes_floor, data_floor, keeping_floor
from shardwise.cost.memory import memory
from shardwise.cost.step import step
from shardwise.cost.workload import Trainable, Workload
from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import parse_cluster
from shardwise.plan import automatic, bounds, space
from shardwise.plan.search import candidates, search
from shardwise.plan.space import Task
from shardwise.plan.subject import Subject
from tests.unit.test_search import ARCHS, assert_same, written_out

CLUSTERS = ("8xH100-SXM5-80GB", "4xp4d.24xlarge", "8xp5.48xlarge", "2x8xL4")
ROUNDING = 1 + 1e-9


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    arch=st.sampled_from([*sorted(ARCHS), "llama-3-70b"]),
    cluster=st.sampled_from(CLUSTERS),
    world=st.sampled_from([1, 2, 8, 12, 16]),
    batch=st.sampled_from([8, 13, 96]),
    length=st.sampled_from([1024, 8192]),
)
def test_no_plan_takes_less_than_its_bounds(arch: str, cluster: str, world: int, batch: int, length: int) -> None:
    shape, machines = ARCHS.get(arch) or preset(arch), parse_cluster(cluster)
    workload, task = Workload(shape, length, batch, "bf16"), Task(shape, length, batch, world, 8)
    cores = space.cores(task)
    cores["own"] = bounds.compute_floor(cores, step(workload, machines, candidates(bounds.mean_rank(cores))))
    cores = space.rows(cores, np.random.default_rng(0).permutation(len(cores["pp"]))[:60])
    pipelines = space.with_pipelines(task, cores)
    pipelines["floor"] = bounds.pipeline_floor(pipelines, pipelines["own"])
    copies = {**pipelines, "dp_replicate": pipelines["data_parallel"]}
    pipelines["own"] = bounds.without_split(step(workload, machines, candidates(copies)))
    plans = space.with_splits(task, pipelines)
    taken = step(workload, machines, candidates(plans))
    # Any options of the core give the same data floor, which the search asks for once.
    other = {**plans, "recompute": 0 * plans["pp"], "compiled": 1 + 0 * plans["pp"], "schedule": 0 * plans["pp"]}
    rows = candidates({**other, "stages_per_rank": 1 + 0 * plans["pp"]})
    data, keeping = data_floor(workload, machines, rows), keeping_floor(workload, machines, rows)
    assert np.all(data <= taken.parts["data_parallel"] * ROUNDING)
    assert np.all(keeping <= (taken.parts["optimizer"] + taken.parts["offload"]) * ROUNDING)
    data += keeping
    assert np.all(plans["floor"] + data <= taken.seconds * ROUNDING)
    assert np.all(plans["own"] + data <= taken.seconds * ROUNDING)


@pytest.mark.parametrize("offload", [1, 2])
def test_what_offload_takes_never_makes_data_parallel_faster(offload: int) -> None:
    arch, cluster = preset("llama-3-8b"), parse_cluster("2xp5.48xlarge")
    workload, task = Workload(arch, 4096, 64, "bf16"), Task(arch, 4096, 64, 16, 8)
    cores = space.cores(task)
    table = space.with_splits(task, space.with_pipelines(task, space.rows(cores, slice(0, 200, 7))))
    there = step(workload, cluster, candidates({**table, "offload": np.full_like(table["pp"], offload)}))
    here = step(workload, cluster, candidates({**table, "offload": np.zeros_like(table["pp"])}))
    assert np.array_equal(there.parts["data_parallel"], here.parts["data_parallel"])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    arch=st.sampled_from(sorted(ARCHS)),
    cluster=st.sampled_from(CLUSTERS),
    world=st.sampled_from([1, 2, 4, 12, 16]),
    batch=st.sampled_from([8, 13, 96]),
    gibibytes=st.floats(3, 80),
)
def test_with_the_cost_model_the_search_finds_what_the_space_written_out_holds(
    arch: str, cluster: str, world: int, batch: int, gibibytes: float
) -> None:
    workload, task = Workload(ARCHS[arch], 2048, batch, "bf16"), Task(ARCHS[arch], 2048, batch, world, 8)
    asked = Subject(workload, parse_cluster(cluster), task, gibibytes * 2**30)
    found = search(asked, automatic.costs(), 5)
    assert_same(found.best, written_out(asked, automatic.costs(), runs=False), 5)
    assert_same(found.running, written_out(asked, automatic.costs(), runs=True), 5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    arch=st.sampled_from([*sorted(ARCHS), "llama-3-70b"]),
    world=st.sampled_from([1, 2, 8, 12, 16]),
    kind=st.sampled_from([Trainable(), Trainable("frozen", share=0.1), Trainable("lora", rank=8, targets=("q", "v"))]),
)
def test_no_plan_holds_less_than_its_bounds(arch: str, world: int, kind: Trainable) -> None:
    shape, machines = ARCHS.get(arch) or preset(arch), parse_cluster("2x8xH100")
    task = Task(shape, 2048, 32, world, 8)
    workload = Workload(shape, 2048, 32, "bf16", trainable=kind)
    cores = space.rows(space.cores(task), slice(0, None, 7))
    first_rank = automatic.costs().first_rank
    pipelines = space.with_pipelines(task, cores)
    pipelines["samples"] = bounds.samples_floor(
        first_rank(workload, machines, candidates(bounds.least_split(pipelines)))
    )
    plans = space.with_splits(task, pipelines)
    held = memory(workload, machines, candidates(plans))
    assert np.all(held.low <= held.device) and np.all(held.device <= held.high)
    assert np.sum(list(held.parts.values()), axis=0) == pytest.approx(held.device, rel=1e-9)
    for live in (bounds.states_floor(workload, plans), plans["samples"] + bounds.least_states(workload, plans)):
        assert np.all(bytes_floor(machines, live) <= held.high * ROUNDING)
    assert np.all(bytes_floor(machines, held.logical) <= held.high * ROUNDING)
