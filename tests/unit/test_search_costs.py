"""The bounds of the search, held against the cost model's own answers: no plan takes less than any bound says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost.floor import data_floor
from shardwise.cost.step import step
from shardwise.cost.workload import Workload
from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import parse_cluster
from shardwise.plan import bounds, space
from shardwise.plan.search import candidates
from shardwise.plan.space import Task
from tests.unit.test_search import ARCHS

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
    data = data_floor(workload, machines, candidates({**other, "stages_per_rank": 1 + 0 * plans["pp"]}))
    assert np.all(data <= taken.parts["data_parallel"] * ROUNDING)
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
