"""The space of plans: what is in it is valid by the rules that refuse one plan, and what those let through is in it."""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.inputs.arch import Arch, Experts, preset
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import Recipe, from_keys
from shardwise.plan import choice, engine, space, validity
from shardwise.plan.check import check
from shardwise.plan.plan import Plan
from shardwise.plan.space import Task

ARCH = msgspec.structs.replace(
    preset("decoder-2m"), name="small", num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32, hidden_size=256,
    max_sequence_length=8192,
)  # fmt: skip
MIXED: Arch = msgspec.structs.replace(ARCH, experts=Experts(count=8, per_token=2, ffn_size=128))
CLUSTER = parse_cluster("4x8xB200")
# What a plan needs and this engine lacks; the others say that a plan contradicts itself.
PLANNED_ONLY = {"cp_runs", "ep_runs", "experts_run", "offload_runs", "combination_runs"}
TASKS = st.builds(
    Task,
    arch=st.sampled_from([ARCH, MIXED]),
    sequence_length=st.sampled_from([1024, 1016]),
    global_batch=st.sampled_from([4, 7, 12, 64]),
    world=st.sampled_from([1, 2, 3, 8, 12]),
    devices_per_node=st.sampled_from([1, 2, 8]),
)


def recipe(task: Task) -> Recipe:
    return from_keys(
        {
            "model": {"preset": "decoder-2m"},
            "data": {"text": ["a.txt"], "sequence_length": task.sequence_length},
            "batch": {"global_batch": task.global_batch},
            "train": {"steps": 10},
            "run": "runs/test",
        }
    )


def broken(task: Task, row: dict[str, int]) -> set[str]:
    """The rules that a row breaks as a plan, by plan/check.py."""
    node = msgspec.structs.replace(CLUSTER.node, devices=task.devices_per_node)
    cluster = msgspec.structs.replace(CLUSTER, node=node, nodes=math.ceil(task.world / task.devices_per_node))
    decided = choice.decision(row, task.global_batch, "bf16")
    plan = Plan(recipe(task), cluster, decided, (), arch=task.arch)
    return {one.rule for one in check(plan, task.world)} - {"states_fit", "activations_fit"}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(task=TASKS, seed=st.integers(0, 999))
def test_a_plan_of_the_space_breaks_no_rule_but_those_of_what_the_engine_lacks(task: Task, seed: int) -> None:
    table = space.with_splits(task, space.with_pipelines(task, space.cores(task)))
    runs, length = engine.runs(table, task.arch), len(table["pp"])
    assert length == space.count(task, space.cores(task))
    for index in random.Random(seed).sample(range(length), min(20, length)):
        row = {name: int(column[index]) for name, column in table.items()}
        rules = broken(task, row)
        assert rules <= PLANNED_ONLY
        assert (rules == set()) == runs[index]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(task=TASKS, data=st.data())
def test_what_no_rule_refuses_is_in_the_space(task: Task, data: st.DataObject) -> None:
    """Degrees and options are drawn freely; sizes from those that the space grows by."""
    draw = data.draw
    degrees = {name: draw(st.sampled_from(space.divisors(task.world))) for name in ("pp", "dp_shard", "tp")}
    replicate, rest = divmod(task.world, math.prod(degrees.values()))
    count, micro = draw(
        st.sampled_from(space.batches(task, max(1, replicate) * degrees["dp_shard"], degrees["pp"]) or [(1, 1)])
    )
    row = {
        **degrees, "dp_replicate": max(1, replicate), "cp": 1, "ep": 1, "accumulation": count, "micro_batch": micro,
        "zero": draw(st.integers(0, 3)), "schedule": draw(st.integers(0, 5)), "recompute": draw(st.integers(0, 2)),
        "stages_per_rank": draw(st.sampled_from([1, 2, 3])), "compiled": draw(st.integers(0, 1)), "offload": 0,
        "sequence_parallel": int(degrees["tp"] > 1), "bucket_bytes": space.DEFAULT_BUCKET,
    }  # fmt: skip
    row["data_parallel"] = row["dp_replicate"] * row["dp_shard"]
    if rest or broken(task, row) - PLANNED_ONLY:
        return
    table = space.with_splits(task, space.with_pipelines(task, space.cores(task)))
    assert np.all([table[name] == row[name] for name in row], axis=0).sum() == 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(task=TASKS)
def test_no_plan_stands_in_the_space_twice_and_each_makes_the_world(task: Task) -> None:
    table = space.with_splits(task, space.with_pipelines(task, space.cores(task)))
    plans = np.stack(list(table.values()), axis=1)
    assert len(np.unique(plans, axis=0)) == len(plans)
    everything = space.everything(task)
    assert np.all(everything.world == task.world)
    assert np.all(everything.data_parallel * everything.micro_batch * everything.accumulation >= task.global_batch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp", 2), ("tp", 2), ("zero", 1), ("micro_batch", 2), ("accumulation", 4), ("recompute", 2), ("offload", 0),
        ("schedule", 2), ("stages_per_rank", 3), ("compiled", 1), ("sequence_parallel", 0), ("dp_shard", 4),
        ("data_parallel", 2), ("bucket_bytes", 7 * 2**20), ("cp", 1), ("dp_replicate", 1),
    ],
)  # fmt: skip
def test_what_is_fixed_is_all_that_is_left(name: str, value: int) -> None:
    free = Task(ARCH, 1024, 64, 8, 8)
    fixed = space.everything(Task(ARCH, 1024, 64, 8, 8, fixed={name: value}))
    assert 0 < len(fixed) < len(space.everything(free))
    assert np.all(getattr(fixed, name) == value)


def test_a_row_becomes_a_decision_and_comes_back() -> None:
    task = Task(ARCH, 1024, 64, 8, 8)
    table = space.with_splits(task, space.with_pipelines(task, space.cores(task)))
    for index in random.Random(0).sample(range(len(table["pp"])), 200):
        row = {name: int(column[index]) for name, column in table.items()}
        assert choice.row(choice.decision(row, 64, "bf16"), splits_sequence=True) == row


def test_the_space_grows_with_the_logarithm_of_the_world() -> None:
    sizes = []
    for world in (64, 1024, 16384):
        task = Task(preset("llama-3-405b"), 8192, 16384, world, 8)
        sizes.append(space.count(task, space.cores(task)))
    assert sizes[1] < 8 * sizes[0] and sizes[2] < 4 * sizes[1]  # worlds grow by 16


def test_predicates_take_numbers_and_arrays_alike() -> None:
    tp = np.array([1, 2, 3, 4, 8])
    assert list(validity.heads_divide(ARCH, tp)) == [validity.heads_divide(ARCH, int(one)) for one in tp]
    cp = np.array([1, 2, 3, 4, 8])
    assert list(validity.chunks_are_equal(1024, cp)) == [bool(validity.chunks_are_equal(1024, int(one))) for one in cp]
    split = np.array([False, True])
    assert list(validity.positions_divide(1023, 2, 2, split)) == [True, False]


def test_experts_are_shared_by_ranks_that_hold_different_samples_or_positions() -> None:
    found = space.everything(Task(MIXED, 1024, 64, 16, 8))
    assert set(np.unique(found.ep)) == {1, 2, 4, 8}
    assert np.all(found.dp_shard * found.cp % found.ep == 0)
    assert set(np.unique(space.everything(Task(ARCH, 1024, 64, 16, 8)).ep)) == {1}
