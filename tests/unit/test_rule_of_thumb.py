"""The rule of thumb: what it chooses, and that it obeys what the user fixed."""

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import RecipeError
from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import Cluster, MachineFacts, local_cluster, parse_cluster
from shardwise.inputs.recipe import OptimizerSpec, PlanRequest, Recipe, from_keys, load, with_overrides
from shardwise.plan import schedules
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Plan
from shardwise.plan.rough_memory import (
    activation_bytes,
    activation_bytes_per_sample,
    block_activation_bytes,
    bytes_at_rest,
    bytes_per_parameter,
    usable_bytes,
)
from shardwise.plan.rule_of_thumb import plan

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SMALL = preset("decoder-2m")


def cpu(cores: int, memory: int = 64 * 2**30) -> Cluster:
    return local_cluster(MachineFacts(cpus=cores, host_memory_bytes=memory))


def recipe(*overrides: str) -> Recipe:
    keys = {
        "model": {"preset": "decoder-2m"},
        "data": {"text": ["a.txt"]},
        "batch": {"global_batch": 64},
        "train": {"steps": 10},
        "run": "runs/test",
    }
    return from_keys(with_overrides(keys, overrides))


def test_the_quickstart_on_two_cores_is_data_parallel_in_fp32() -> None:
    decision = plan(load(QUICKSTART), SMALL, cpu(2)).decision
    assert (decision.mesh.dp_replicate, decision.mesh.world, decision.zero) == (2, 2, 0)
    assert (decision.precision, decision.compile, decision.global_batch) == ("fp32", "off", 16)


def test_the_quickstart_on_a_gpu_is_bf16_with_compiled_blocks() -> None:
    decision = plan(load(QUICKSTART), preset("decoder-8m"), parse_cluster("1xH200")).decision
    assert (decision.mesh.world, decision.zero) == (1, 0)
    assert (decision.precision, decision.compile) == ("bf16", "blocks")


@pytest.mark.parametrize(
    ("parameters", "cluster", "zero", "axes"),
    [
        (1_000_000_000, "8xH100", 0, {"dp_replicate"}),
        (7_000_000_000, "8xH100", 3, {"dp_shard"}),
        (70_600_000_000, "64xp5.48xlarge", 3, {"dp_shard"}),
        (400_000_000_000, "64xp5.48xlarge", 1, {"pp", "tp", "dp_shard"}),
    ],
)
def test_the_size_decides_between_copies_shards_and_three_axes(
    parameters: int, cluster: str, zero: int, axes: set[str]
) -> None:
    made = plan(recipe("batch.global_batch=1024"), parameters, parse_cluster(cluster))
    mesh = made.decision.mesh
    assert made.decision.zero == zero
    assert {name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(mesh, name) > 1} == axes
    assert mesh.world == parse_cluster(cluster).devices
    assert any(f"{parameters / 1e9:.3g}B parameters" in reason for reason in made.why)


LLAMA_405B = msgspec.structs.replace(
    SMALL,
    name="405b",
    vocab_size=128256,
    hidden_size=16384,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=53248,
    max_sequence_length=8192,
)
LONG = ("batch.global_batch=1024", "data.sequence_length=4096")


def test_a_model_of_405_billion_gets_uneven_stages_tensor_parallel_and_enough_micro_batches() -> None:
    made = plan(recipe(*LONG), LLAMA_405B, parse_cluster("64x8xH100"))
    decision = made.decision
    assert decision.mesh == MeshShape(pp=16, dp_shard=4, tp=8)
    assert (decision.zero, decision.schedule, decision.stages_per_rank) == (1, "1f1b", 1)
    assert decision.accumulation >= 4 * 16
    assert "stages of 8 and 7 blocks" in " ".join(made.why)
    states, kept = bytes_at_rest(made), activation_bytes(made)
    assert states is not None and kept is not None
    assert states + kept <= usable_bytes(made.cluster, 512)


@pytest.mark.parametrize(("batch", "micro", "count"), [(128, 8, 16), (64, 4, 16), (16, 1, 16), (6, 1, 6), (1, 1, 1)])
def test_a_pipeline_has_four_micro_batches_a_stage_where_the_batch_allows(batch: int, micro: int, count: int) -> None:
    decision = plan(recipe("train.plan.pp=4", f"batch.global_batch={batch}"), SMALL, cpu(4), world=4).decision
    assert (decision.micro_batch, decision.accumulation) == (micro, count)


@pytest.mark.parametrize(
    ("asked", "schedule", "stages"),
    [
        ([], "1f1b", 1),
        (["schedule=gpipe"], "gpipe", 1),
        (["stages_per_rank=2"], "interleaved-1f1b", 2),
        (["schedule=interleaved-1f1b"], "interleaved-1f1b", 2),
        (["schedule=interleaved-zb"], "interleaved-zb", 2),
        (["schedule=zbv"], "zbv", 2),
        (["schedule=dualpipev"], "dualpipev", 2),
        (["schedule=interleaved-zb", "stages_per_rank=1"], "interleaved-zb", 1),
    ],
)
@given(batch=st.integers(4, 70))
def test_a_schedule_is_interleaved_only_when_asked_and_gets_its_micro_batches(
    asked: list[str], schedule: str, stages: int, batch: int
) -> None:
    wished = recipe("train.plan.pp=2", f"batch.global_batch={batch}", *(f"train.plan.{one}" for one in asked))
    decision = plan(wished, SMALL, cpu(2), world=2).decision
    assert (decision.schedule, decision.stages_per_rank) == (schedule, stages)
    assert schedules.requires(schedule, 2, stages, decision.accumulation) == ""
    assert decision.micro_batch * decision.accumulation >= batch


def test_without_a_pipeline_there_is_no_schedule() -> None:
    decision = plan(recipe(), SMALL, cpu(2)).decision
    assert (decision.schedule, decision.stages_per_rank) == ("none", 1)


def test_a_pipeline_that_is_asked_for_shards_states_alone_and_counts_its_own_part() -> None:
    cluster = parse_cluster("8x8xH100")
    arch = msgspec.structs.replace(LLAMA_405B, hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28672)
    sharded = plan(recipe("train.plan.pp=2", "train.plan.tp=8", *LONG), arch, cluster).decision
    assert (sharded.mesh, sharded.zero) == (MeshShape(pp=2, dp_shard=4, tp=8), 1)
    whole = plan(recipe("train.plan.pp=8", "train.plan.tp=8", *LONG), arch, cluster).decision
    assert (whole.mesh, whole.zero) == (MeshShape(pp=8, tp=8), 0)


def test_each_recompute_keeps_less_and_the_least_that_fits_is_chosen() -> None:
    kept = [block_activation_bytes(LLAMA_405B, 4096, "bf16", option) for option in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    cluster = parse_cluster("64x8xH100")
    short = plan(recipe("batch.global_batch=1024"), LLAMA_405B, cluster)
    long = plan(recipe("batch.global_batch=1024", "data.sequence_length=8192"), LLAMA_405B, cluster)
    assert (short.decision.recompute, long.decision.recompute) == ("none", "full")
    assert any("recompute full" in reason for reason in long.why)


@given(pp=st.integers(2, 8), schedule=st.sampled_from(["gpipe", "1f1b"]), batch=st.integers(8, 64))
def test_a_pipeline_in_flight_keeps_more_the_more_micro_batches_there_are(pp: int, schedule: str, batch: int) -> None:
    arch = msgspec.structs.replace(SMALL, num_layers=16)
    overrides = [f"train.plan.pp={pp}", f"batch.global_batch={batch}", "batch.micro_batch=1"]
    kept = activation_bytes(plan(recipe(*overrides, f"train.plan.schedule={schedule}"), arch, cpu(8), world=pp))
    one = math.ceil(16 / pp) * block_activation_bytes(arch, 256, "fp32", "none")
    assert kept is not None
    assert kept >= one * (batch if schedule == "gpipe" else min(pp, batch))
    logits = 8 * 256 * arch.vocab_size
    assert kept <= one * (batch if schedule == "gpipe" else min(pp, batch)) + logits


def test_tensor_parallel_stays_inside_a_node() -> None:
    cluster = parse_cluster("64xp5.48xlarge")
    mesh = plan(recipe("batch.global_batch=1024"), 400_000_000_000, cluster).decision.mesh
    assert mesh.tp <= cluster.node.devices


def test_what_fits_on_one_device_goes_on_fitting_when_it_shrinks() -> None:
    zeros = [plan(recipe(), size * 10**9, parse_cluster("8xH100")).decision.zero for size in (1, 2, 3, 4, 8, 16)]
    assert zeros == sorted(zeros)


@pytest.mark.parametrize(("devices", "world"), [(None, 1), (1, 1), (3, 3)])
def test_the_world_that_came_is_obeyed(devices: int | None, world: int) -> None:
    overrides = [] if devices is None else [f"train.devices={devices}"]
    assert plan(recipe(*overrides), SMALL, cpu(4), world=world).decision.mesh.world == world


def test_ranks_are_not_more_than_samples_nor_than_the_memory_holds() -> None:
    assert plan(recipe("batch.global_batch=3"), SMALL, cpu(8)).decision.mesh.world == 3
    few = plan(recipe(), SMALL, cpu(64, memory=4 * 2**30))
    assert 1 <= few.decision.mesh.world < 8
    assert any("host memory" in reason for reason in few.why)


def test_one_rank_splits_nothing_even_where_sharding_is_asked_for() -> None:
    made = plan(recipe("train.plan.zero=3"), SMALL, cpu(1))
    assert (made.decision.zero, made.decision.mesh.world) == (0, 1)
    assert any("nothing to shard" in reason for reason in made.why)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_a_precision_that_is_asked_for_is_obeyed(precision: str) -> None:
    for cluster in (cpu(2), parse_cluster("2xH100")):
        assert plan(recipe(f"train.precision={precision}"), SMALL, cluster).decision.precision == precision


def test_a_gpu_without_bf16_units_gets_fp16() -> None:
    assert plan(recipe(), SMALL, parse_cluster("8xV100-SXM2-32GB")).decision.precision == "fp16"


@given(
    dp=st.integers(1, 4),
    zero=st.sampled_from([0, 3]),
    batch=st.integers(4, 40),
    micro=st.one_of(st.just("auto"), st.integers(1, 9)),
)
def test_degrees_and_batches_that_are_asked_for_are_obeyed(dp: int, zero: int, batch: int, micro: int | str) -> None:
    asked = recipe(f"train.plan.zero={zero}", f"batch.global_batch={batch}", f"batch.micro_batch={micro}")
    decision = plan(asked, SMALL, cpu(4), world=dp).decision
    mesh = decision.mesh
    assert mesh.world == dp
    assert decision.zero == (0 if dp == 1 else zero)
    assert (mesh.dp_shard == 1) == (decision.zero == 0)
    assert decision.global_batch == batch
    if micro != "auto":
        assert decision.micro_batch <= int(micro)
    # Every sample has its place, and the micro-batch is the largest of the even cells.
    cells = mesh.data_parallel * decision.accumulation
    assert decision.micro_batch == math.ceil(batch / cells)
    assert cells * (decision.micro_batch - 1) < batch <= cells * decision.micro_batch


def test_fixed_degrees_make_the_world_that_is_started() -> None:
    made = plan(recipe("train.plan.dp_replicate=1", "train.plan.dp_shard=3", "train.plan.zero=3"), SMALL, cpu(2))
    assert made.decision.mesh.world == 3


def test_options_that_are_asked_for_reach_the_decision() -> None:
    asked = recipe(
        "train.plan.recompute=full",
        "train.plan.offload=cpu",
        "train.plan.compression=int8",
        "train.plan.compile=blocks",
        "train.plan.bucket_cap_mb=25",
    )
    decision = plan(asked, SMALL, cpu(2)).decision
    assert (decision.recompute, decision.offload, decision.compression) == ("full", "cpu", "int8")
    assert (decision.compile, decision.bucket_cap_mb) == ("blocks", 25)


def test_tokens_that_are_no_whole_number_of_samples_show_the_nearest() -> None:
    keys = {"batch": {"tokens_per_step": 1000}}
    base = msgspec.to_builtins(recipe())
    with pytest.raises(RecipeError) as raised:
        plan(from_keys({**base, **keys}), SMALL, cpu(2))
    assert raised.value.fix == "batch.tokens_per_step = 768 or 1024"


def test_adamw_takes_sixteen_bytes_a_parameter_in_fp32_and_mixed_and_the_double_in_fp64() -> None:
    adamw = OptimizerSpec()
    assert [bytes_per_parameter(p, adamw).total for p in ("fp32", "bf16", "fp16", "fp64")] == [16, 16, 16, 32]
    assert bytes_per_parameter("fp32", OptimizerSpec(name="sgd")).total == 8
    assert bytes_per_parameter("fp32", OptimizerSpec(name="sgd", momentum=0.9)).total == 12


def test_full_sharding_divides_what_a_rank_keeps_by_the_ranks() -> None:
    whole = plan(recipe("train.plan.zero=0"), SMALL, cpu(4))
    sharded = plan(recipe("train.plan.zero=3"), SMALL, cpu(4))
    at_rest, part = bytes_at_rest(whole), bytes_at_rest(sharded)
    assert at_rest == 16 * SMALL.parameters()
    assert part == math.ceil(at_rest / 4)


def test_the_micro_batch_fits_beside_the_states_and_shrinks_with_the_memory() -> None:
    arch = msgspec.structs.replace(SMALL, hidden_size=2048, num_layers=24, max_sequence_length=4096)
    micros = []
    for name in ("8xL4", "8xA100", "8xH200"):
        cluster = parse_cluster(name)
        made = plan(recipe("batch.global_batch=4096", "data.sequence_length=2048"), arch, cluster)
        one = activation_bytes_per_sample(arch, 2048, "bf16")
        at_rest = bytes_at_rest(made)
        assert at_rest is not None
        assert at_rest + made.decision.micro_batch * one <= usable_bytes(cluster, 8)
        micros.append(made.decision.micro_batch)
    assert micros == sorted(micros)
    assert micros[0] < micros[-1]


def test_a_model_of_unknown_size_is_taken_whole_and_the_plan_says_so() -> None:
    made = plan(recipe(), None, cpu(2))
    assert made.decision.zero == 0
    assert any("not known before it is built" in reason for reason in made.why)


def test_a_plan_request_without_wishes_is_the_automatic_plan() -> None:
    asked = recipe()
    empty = msgspec.structs.replace(asked, train=msgspec.structs.replace(asked.train, plan=PlanRequest()))
    for world in (1, 2, 4):
        assert plan(asked, SMALL, cpu(4), world=world).decision == plan(empty, SMALL, cpu(4), world=world).decision


def test_a_plan_comes_back_from_json_and_refuses_unknown_keys() -> None:
    made = plan(load(QUICKSTART), SMALL, cpu(2))
    assert Plan.from_json(made.to_json()) == made
    with pytest.raises(msgspec.ValidationError):
        Plan.from_json(made.to_json().replace(b'"decision"', b'"decisions"'))
