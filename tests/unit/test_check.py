"""The rules of a plan: each is found, and each fix makes it go away."""

from collections.abc import Mapping

import msgspec
import pytest

from shardwise.errors import PlanInfeasible
from shardwise.inputs.arch import Arch, Experts, preset
from shardwise.inputs.hardware import Cluster, MachineFacts, local_cluster, parse_cluster
from shardwise.inputs.recipe import SHAPE_ALONE, Recipe, from_keys, with_overrides
from shardwise.plan.check import RULES, check, require
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Plan
from shardwise.plan.rule_of_thumb import plan
from shardwise.plan.violation import Violation

CPU = local_cluster(MachineFacts(cpus=4, host_memory_bytes=64 * 2**30))
KEYS: Mapping[str, object] = {
    "model": {"preset": "decoder-2m"},
    "data": {"text": ["a.txt"]},
    "batch": {"global_batch": 64},
    "train": {"steps": 10},
    "run": "runs/test",
}
SMALL = preset("decoder-2m")
LARGE = msgspec.structs.replace(
    SMALL,
    name="large",
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=28672,
)
GROUPED = msgspec.structs.replace(SMALL, num_heads=8, num_kv_heads=2, head_dim=20)
MIXED = msgspec.structs.replace(GROUPED, experts=Experts(count=8, per_token=2, ffn_size=64))
LONG = msgspec.structs.replace(LARGE, name="long", max_sequence_length=8192)

ODD = ["train.plan.pp=2", "data.sequence_length=251"]
# What breaks each rule: overrides, the model, the cluster, and how many ranks come (None: as planned).
BROKEN: list[tuple[str, list[str], Arch, Cluster, int | None]] = [
    ("degrees_make_the_world", ["train.plan.dp_replicate=2", "train.plan.dp_shard=1"], SMALL, CPU, 3),
    ("devices_exist", ["train.devices=9"], SMALL, parse_cluster("8xH100"), None),
    ("zero_matches_sharding", ["train.plan.zero=0", "train.plan.dp_shard=4"], SMALL, CPU, 4),
    ("zero_matches_sharding", ["train.plan.zero=3", "train.plan.dp_replicate=4"], SMALL, CPU, 4),
    ("cp_runs", ["train.plan.cp=2"], SMALL, CPU, 4),
    ("ep_runs", ["train.plan.ep=2", "train.plan.zero=3"], SMALL, CPU, 4),
    ("experts_run", ["train.plan.tp=2"], MIXED, CPU, 4),
    ("experts_run", ["train.plan.pp=2", "train.plan.schedule=1f1b", "train.plan.zero=1"], MIXED, CPU, 4),
    ("offload_runs", ["train.plan.offload=cpu"], SMALL, CPU, 2),
    ("compression_runs", ["train.plan.compression=powersgd"], SMALL, CPU, 2),
    ("buckets_need_whole_copies", ["train.plan.zero=3", "train.plan.bucket_cap_mb=25"], SMALL, CPU, 4),
    ("each_rank_has_a_sample", ["batch.global_batch=2", "train.devices=4"], SMALL, CPU, None),
    ("precision_exists", ["train.precision=bf16"], SMALL, parse_cluster("8xV100-SXM2-32GB"), None),
    ("precision_exists", ["train.precision=fp8"], SMALL, parse_cluster("8xH100"), None),
    ("precision_exists", ["train.precision=fp8"], SMALL, parse_cluster("8xA100"), None),
    ("trainable_runs", ["model.trainable={lora={rank=8}}"], SMALL, CPU, 2),
    ("trainable_runs", ['model.trainable={frozen=["embed_tokens.*"]}'], SMALL, CPU, 2),
    ("sequence_fits_the_model", ["data.sequence_length=2048"], SMALL, CPU, None),
    ("trackers_run", ['log=["wandb"]'], SMALL, CPU, None),
    ("heads_divide", ["train.plan.tp=2"], SMALL, CPU, 4),
    ("heads_divide", ["train.plan.tp=8", "train.plan.zero=3"], GROUPED, CPU, 8),
    ("sequence_divides", ["train.plan.pp=2", "train.plan.tp=5"], SMALL, CPU, 10),
    ("sequence_divides", [*ODD, "train.plan.tp=2"], GROUPED, CPU, 4),
    ("sequence_divides", [*ODD, "train.plan.tp=2", "model.sequence_parallel=true"], GROUPED, CPU, 4),
    ("each_stage_has_a_block", ["train.plan.pp=8"], SMALL, CPU, 8),
    ("each_stage_has_a_block", ["train.plan.pp=2", "train.plan.stages_per_rank=3"], SMALL, CPU, 2),
    ("schedule_belongs_to_a_pipeline", ["train.plan.schedule=gpipe"], SMALL, CPU, 2),
    ("schedule_belongs_to_a_pipeline", ["train.plan.stages_per_rank=2"], SMALL, CPU, 2),
    ("schedule_belongs_to_a_pipeline", ["train.plan.stage_blocks=[4]"], SMALL, CPU, 2),
    ("stages_share_the_blocks", ["train.plan.pp=2", "train.plan.stage_blocks=[2,3]"], SMALL, CPU, 2),
    ("stages_share_the_blocks", ["train.plan.pp=2", "train.plan.stage_blocks=[2,1,1]"], SMALL, CPU, 2),
    (
        "schedule_has_its_micro_batches",
        ["train.plan.pp=2", "train.plan.schedule=gpipe", "train.plan.stages_per_rank=2"],
        SMALL,
        CPU,
        2,
    ),
    (
        "schedule_has_its_micro_batches",
        ["train.plan.pp=2", "train.plan.schedule=interleaved-1f1b", "batch.global_batch=7", "batch.micro_batch=1"],
        SMALL,
        CPU,
        2,
    ),
    (
        "schedule_has_its_micro_batches",
        ["train.plan.pp=2", "train.plan.schedule=dualpipev", "batch.global_batch=3"],
        SMALL,
        CPU,
        2,
    ),
    (
        "combination_runs",
        ["train.plan.pp=2", "train.plan.zero=3", "train.plan.dp_shard=2", "train.plan.schedule=zbv"],
        SMALL,
        CPU,
        4,
    ),
    (
        "combination_runs",
        [
            "train.plan.pp=2",
            "train.plan.zero=2",
            "train.plan.dp_shard=2",
            "train.plan.schedule=zbv",
            "train.plan.recompute=selective",
            "train.plan.compile=blocks",
        ],
        SMALL,
        CPU,
        4,
    ),
    ("combination_runs", ["train.plan.tp=2", "train.plan.compile=blocks"], GROUPED, CPU, 4),
    ("combination_runs", ["train.plan.recompute=selective", "train.plan.compile=blocks"], SMALL, CPU, 2),
    ("tensor_parallel_stays_in_a_node", ["train.plan.tp=16"], LARGE, parse_cluster("2x8xH100"), None),
    ("states_fit", ["train.plan.zero=0"], LARGE, parse_cluster("64xp5.48xlarge"), None),
    (
        "activations_fit",
        ["data.sequence_length=8192", "train.plan.zero=3", "train.plan.dp_shard=64"],
        LONG,
        parse_cluster("8x8xH100"),
        None,
    ),
    (
        "activations_fit",
        [
            "data.sequence_length=8192",
            "batch.global_batch=8192",
            "batch.micro_batch=128",
            "train.plan.recompute=full",
            "train.plan.zero=3",
        ],
        LONG,
        parse_cluster("8x8xH100"),
        None,
    ),
]
# Only the user can choose a smaller model, another vocabulary, or another kind of model.
NO_APPLY = {"vocabulary_holds_the_tokens", "model_runs"}
# No recipe asks for the first: the search alone gives such plans, and tests/unit/test_uneven.py applies its fix. The
# second is of models of Hugging Face: below.
SEARCHED = {"shares_run", "adapters_stay_whole"}


def recipe(overrides: list[str], base: Mapping[str, object] = KEYS) -> Recipe:
    return from_keys(with_overrides(base, overrides))


def made(overrides: list[str], arch: Arch, cluster: Cluster, world: int | None) -> tuple[Plan, tuple[Violation, ...]]:
    planned = plan(recipe(overrides), arch, cluster, world=world)
    return planned, check(planned, world if world is not None else planned.decision.mesh.world)


@pytest.mark.parametrize(("rule", "overrides", "arch", "cluster", "world"), BROKEN)
def test_a_broken_rule_is_found_and_its_fix_makes_it_go_away(
    rule: str, overrides: list[str], arch: Arch, cluster: Cluster, world: int | None
) -> None:
    _, found = made(overrides, arch, cluster, world)
    violation = next(one for one in found if one.rule == rule)
    assert violation.what and violation.why and violation.fix
    assert violation.apply is not None
    fixed = [*overrides, *(f"{key}={value}" for key, value in violation.apply.items())]
    again = recipe(fixed)
    # A fix that changes how many ranks are started is applied before they are.
    planned = plan(again, arch, cluster, world=None if "train.devices" in violation.apply else world)
    left = check(planned, planned.decision.mesh.world if world is None else world)
    assert rule not in {one.rule for one in left}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.plan.tp=3", "train.devices=3"], "train.plan.tp = 1 or 5"),
        (["train.plan.pp=5", "train.devices=5"], "train.plan.pp = 1"),
        (["train.plan.pp=2", "train.plan.stages_per_rank=4", "train.devices=2"], "stages_per_rank = 1"),
        (
            ["train.plan.pp=3", "train.plan.schedule=interleaved-1f1b", "batch.global_batch=2"],
            "1f1b",
        ),
        (["train.plan.pp=2", "train.plan.tp=5", "train.devices=10"], "model.sequence_parallel = false"),
        (["train.plan.pp=2", "train.plan.schedule=zbv", "train.plan.zero=3", "train.devices=4"], "'1f1b'"),
        (["train.plan.pp=2", "train.plan.schedule=dualpipev", "batch.global_batch=3", "train.devices=2"], '"1f1b"'),
    ],
)
def test_all_fixes_together_give_a_plan_that_runs(overrides: list[str], said: str) -> None:
    for _ in range(3):
        _, found = made(overrides, SMALL, CPU, None)
        if not found:
            break
        assert said in " ".join(one.fix for one in found)
        overrides = [*overrides, *(f"{key}={value}" for one in found for key, value in (one.apply or {}).items())]
        said = ""
    assert found == ()


def test_every_rule_is_broken_by_some_plan_here() -> None:
    broken = {rule for rule, *_ in BROKEN} | NO_APPLY | SEARCHED
    unbroken, _ = made([], SMALL, CPU, 4)
    assert all(rule(unbroken, 4) is None for rule in RULES)
    assert len(broken) == len(RULES)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", ["auto", 0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("micro", ["auto", 3])
def test_what_the_engine_runs_is_not_refused(world: int, zero: str | int, precision: str, micro: str | int) -> None:
    overrides = [f"train.plan.zero={zero}", f"train.precision={precision}", f"batch.micro_batch={micro}"]
    _, found = made(overrides, SMALL, CPU, world)
    assert found == ()


@pytest.mark.parametrize(
    ("overrides", "arch", "key", "value"),
    [
        (["train.plan.tp=8"], GROUPED, "train.plan.tp", 2),
        (["train.plan.tp=5", "train.plan.zero=3"], GROUPED, "train.plan.tp", 1),
        (["train.plan.pp=2", "train.plan.stages_per_rank=3"], SMALL, "train.plan.stages_per_rank", 1),
    ],
)
def test_a_fix_keeps_what_it_can(overrides: list[str], arch: Arch, key: str, value: int) -> None:
    _, found = made(overrides, arch, CPU, 40)
    assert any(one.apply and one.apply.get(key) == value for one in found if one.rule in KEEPS)


KEEPS = ("heads_divide", "each_stage_has_a_block")


def test_uneven_stages_ffn_and_vocabulary_are_no_reason_nor_is_a_sequence_that_stays_whole() -> None:
    odd = msgspec.structs.replace(GROUPED, num_layers=5, ffn_size=451, vocab_size=263)
    odd_length, whole = "data.sequence_length=251", "model.sequence_parallel=false"
    for more in (["train.plan.pp=3", odd_length, whole], ["train.plan.pp=3", "data.sequence_length=252"], [odd_length]):
        _, found = made([*more, "train.plan.tp=2"], odd, CPU, 6)
        assert found == ()


LLAMA_70B = msgspec.structs.replace(LONG, vocab_size=128256)
LLAMA_405B = msgspec.structs.replace(
    LLAMA_70B, hidden_size=16384, num_layers=126, num_heads=128, ffn_size=53248, head_dim=128
)


@pytest.mark.parametrize(("arch", "cluster"), [(LLAMA_70B, "8x8xH100"), (LLAMA_405B, "64x8xH100")])
@pytest.mark.parametrize("length", [4096, 8192])
def test_what_is_planned_for_a_large_model_runs_on_enough_gpus(arch: Arch, cluster: str, length: int) -> None:
    """Recompute is chosen so that activations fit beside the states; a shape alone, whose length is assumed, too."""
    overrides = ["batch.global_batch=1024", f"data.sequence_length={length}"]
    for base in (KEYS, {**KEYS, "data": {"given": SHAPE_ALONE}}):
        planned = plan(recipe(overrides, base), arch, parse_cluster(cluster))
        assert check(planned, planned.decision.mesh.world) == ()
        assert planned.decision.recompute != "none"


def test_a_vocabulary_below_the_bytes_is_found() -> None:
    small = msgspec.structs.replace(SMALL, vocab_size=256)
    assert "vocabulary_holds_the_tokens" in {one.rule for one in made([], small, CPU, 1)[1]}


def test_adapters_run_beside_a_model_of_hugging_face_and_are_not_split() -> None:
    adapted = {**KEYS, "model": {"hf": "some/model", "trainable": {"lora": {"rank": 8}}}}
    assert check(plan(recipe([], adapted), SMALL, CPU, world=2), 2) == ()
    (found,) = check(plan(recipe(["train.plan.tp=5"], adapted), SMALL, CPU, world=5), 5)
    assert found.rule == "adapters_stay_whole" and found.apply is not None and found.apply["train.plan.tp"] == 1
    fixed = recipe([f"{key}={value}" for key, value in found.apply.items()], adapted)
    assert check(plan(fixed, SMALL, CPU, world=5), 5) == ()
    quantised = recipe(["model.trainable.lora.base_bits=4"], adapted)
    (found,) = check(plan(quantised, SMALL, CPU, world=1), 1)
    assert found.rule == "trainable_runs" and "QLoRA" in found.why


def test_a_model_that_is_not_built_yet_is_found() -> None:
    asked = recipe([], {**KEYS, "model": {"hf": "some/model"}})
    biased = msgspec.structs.replace(SMALL, attention_bias=True)
    assert check(plan(asked, biased, CPU, world=1), 1) == (), "transformers builds what our decoder does not"
    sparse = msgspec.structs.replace(SMALL, experts=Experts(count=8, per_token=2, ffn_size=64))
    assert check(plan(asked, sparse, CPU, world=1), 1) == ()
    split = recipe(["train.plan.tp=5"], {**KEYS, "model": {"hf": "some/model"}})
    assert [one.rule for one in check(plan(split, sparse, CPU, world=5), 5)] == ["experts_run"]


def test_a_model_of_hugging_face_is_not_taken_for_our_decoder() -> None:
    """Its positions are not split unless asked for, and its own tokenizer is no bytes."""
    hf = {**KEYS, "model": {"hf": "some/model"}, "data": {"text": ["a.txt"], "sequence_length": 251}}
    split = recipe(["train.plan.pp=2", "train.plan.tp=2"], hf)
    assert check(plan(split, GROUPED, CPU, world=4), 4) == ()
    few = msgspec.structs.replace(SMALL, vocab_size=100)
    assert check(plan(recipe([], hf), few, CPU, world=1), 1) == ()
    by_bytes = plan(recipe(["data.tokenizer=bytes"], hf), few, CPU, world=1)
    assert [one.rule for one in check(by_bytes, 1)] == ["vocabulary_holds_the_tokens"]


def test_a_shape_that_the_decoder_cannot_build_is_found() -> None:
    biased = msgspec.structs.replace(SMALL, attention_bias=True)
    (found,) = made([], biased, CPU, 1)[1]
    assert found.rule == "model_runs" and "biases" in found.why


def test_any_change_of_a_degree_breaks_the_product() -> None:
    planned, _ = made([], SMALL, CPU, 4)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        mesh = msgspec.structs.replace(MeshShape(dp_replicate=4), **{axis: 3})
        changed = msgspec.structs.replace(planned, decision=msgspec.structs.replace(planned.decision, mesh=mesh))
        assert "degrees_make_the_world" in {one.rule for one in check(changed, 4)}


def test_requiring_a_broken_plan_raises_all_of_it_at_once() -> None:
    planned, found = made(["train.plan.compression=powersgd", "train.plan.offload=cpu"], SMALL, CPU, 2)
    assert len(found) == 2
    with pytest.raises(PlanInfeasible) as raised:
        require(planned, 2)
    for violation in found:
        assert violation.what in str(raised.value)
        assert violation.fix in str(raised.value)
    assert raised.value.exit_code == 2
