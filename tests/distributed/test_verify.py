"""Parity over real processes: plans that are right pass, and every planted fault is caught with its likely cause."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shardwise.errors import PlanInfeasible, RecipeError
from shardwise.inputs.arch import PRESETS, Experts
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import BatchSpec, DataSpec, ModelSpec, Recipe, TrainSpec
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Decision, Plan
from shardwise.verify.mutations import PLANTED
from shardwise.verify.parity import parity

nightly = pytest.mark.nightly
ROOT = Path(__file__).parents[2]


def plan(mesh: str, zero: int = 0, *, factory: str | None = None, **more: object) -> Plan:
    """`mesh` as "pp2 tp2"; the decoder is tied, with grouped heads, and a dropout that parity turns off."""
    axes = {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz_")) for word in mesh.split()}
    shape = MeshShape(**axes)
    arch = msgspec.structs.replace(
        PRESETS["decoder-8m"], tied_embeddings=True, dropout=0.1, experts=more.pop("experts", None)
    )
    decision = Decision(mesh=shape, zero=zero, global_batch=64, micro_batch=1, accumulation=8, precision="bf16",
                        schedule=more.pop("schedule", "1f1b") if shape.pp > 1 else "none", **more)  # fmt: skip
    model = ModelSpec(given="a test") if factory is None else ModelSpec(factory=factory)
    recipe = Recipe(
        model=model, data=DataSpec(given="a test"), batch=BatchSpec(global_batch=64), train=TrainSpec(steps=9)
    )
    cluster = parse_cluster(f"{shape.world}xH100-SXM5-80GB")
    return Plan(recipe, cluster, decision, ("a test",), arch=None if factory else arch)


SPLITS = [
    pytest.param(plan("dp_shard3", 3), id="zero3"),
    pytest.param(plan("tp2"), id="tp"),
    pytest.param(plan("pp2", stage_blocks=(2, 4)), id="pp"),
    pytest.param(plan("pp2", schedule="zbv", stages_per_rank=2), id="zbv"),
    pytest.param(plan("dp_replicate3"), id="zero0", marks=nightly),
    pytest.param(plan("dp_replicate2 dp_shard2", 2, recompute="full"), id="hybrid-recompute", marks=nightly),
    pytest.param(plan("dp_shard2", 1, recompute="selective"), id="zero1-recompute", marks=nightly),
    pytest.param(plan("tp2 dp_shard2", 2), id="tp-zero2", marks=nightly),
    pytest.param(plan("pp2", schedule="interleaved-1f1b", stages_per_rank=2), id="interleaved", marks=nightly),
    pytest.param(plan("pp2", schedule="interleaved-zb", stages_per_rank=2), id="interleaved-zb", marks=nightly),
    pytest.param(plan("pp2", schedule="dualpipev", stages_per_rank=2), id="dualpipev", marks=nightly),
    pytest.param(plan("pp2 dp_shard2 tp2", 1), id="three axes", marks=nightly),
    pytest.param(plan("dp_shard3", 3, experts=Experts(64, 6, 256, 512, dense_layers=1)), id="experts", marks=nightly),
    pytest.param(plan("pp2 dp_replicate2 dp_shard2 tp2", 3), id="four axes", marks=nightly),
]


@pytest.mark.parametrize("split", SPLITS)
def test_a_plan_that_is_right_passes(split: Plan) -> None:
    found = parity(split)
    assert found.passed, (found.fault, found.skipped)
    assert {check.tier for check in found.checks} == {"logic", "rounding", "resume", "dropout", "samples"}
    assert found.probe.startswith("additive")


@nightly
def test_compiled_blocks_are_compared_where_they_are_asked_for() -> None:
    found = parity(plan("dp_replicate2", compile="blocks"), compiled=True)
    assert found.passed, (found.fault, found.skipped)


# The fault, the split in which it is planted, the axis it is blamed on, and a part of the cause.
CAUGHT = [
    ("drop-reduce", "dp_replicate2", 0, "dp_replicate", "not summed over dp_replicate"),
    ("average-shards", "dp_shard2", 3, "dp_shard", "divided by dp_shard"),
    ("scale-loss", "dp_replicate2", 0, "dp_replicate", "multiplied by dp_replicate"),
    ("average-micro-batches", "dp_replicate2", 0, "", "divided by accumulation"),
    ("drop-micro-batch", "dp_replicate2", 0, "", "micro-batch was dropped"),
    ("skip-norm-reduction", "dp_shard2", 3, "dp_shard", "squares are not summed over dp_shard"),
    ("norm-counts-copies", "dp_replicate2", 0, "dp_replicate", "replicated over dp_replicate"),
    ("same-samples", "dp_replicate2", 0, "dp_replicate", "read the same samples"),
    ("reuse-dropout-seed", "dp_replicate2", 0, "dp_replicate", "the seed leaves dp_replicate out"),
    ("repeat-dropout", "dp_replicate2", 0, "", "micro-batches draw the same mask"),
    ("evaluate-alone", "dp_replicate2", 0, "dp_replicate", "not agreed over dp_replicate"),
    ("untie-head", "dp_replicate2", 0, "", "came untied"),
    ("swap-blocks", "dp_replicate2", 0, "", "blocks.0 and blocks.1 are swapped"),
    ("one-layer", "dp_replicate2", 0, "", "only blocks.1 differs"),
    ("forget-states", "dp_replicate2", 0, "", "optimizer's states were not restored"),
    ("forget-position", "dp_replicate2", 0, "", "position in the data"),
    ("drop-tp-sum", "tp2", 0, "tp", "partial sum is not reduced over tp"),
    ("drop-tp-forward", "tp2", 0, "tp", "in blocks.0 a sum or a gather over tp"),
    ("drop-tie-sum", "pp2", 0, "pp", "came untied"),
    ("swap-stages", "pp2", 0, "pp", "swapped between the stages"),
    ("garble-crossing", "pp2", 0, "pp", "crosses from stage 0 to stage 1"),
    ("half-stage", "pp2", 0, "pp", "only stage 0"),
]
IN_CI = ("drop-reduce", "skip-norm-reduction", "reuse-dropout-seed", "drop-tp-sum", "drop-tie-sum", "swap-stages")


@pytest.mark.parametrize(
    ("mutation", "mesh", "zero", "axis", "cause"),
    [pytest.param(*one, id=one[0], marks=() if one[0] in IN_CI else nightly) for one in CAUGHT],
)
def test_a_planted_fault_is_caught_with_its_likely_cause(
    mutation: str, mesh: str, zero: int, axis: str, cause: str
) -> None:
    found = parity(plan(mesh, zero), mutation=mutation)
    assert not found.passed
    assert found.fault is not None
    assert cause in found.fault.cause, found.fault
    assert found.fault.axis == axis


def test_every_mutation_there_is_has_its_test() -> None:
    assert sorted(PLANTED) == sorted(one[0] for one in CAUGHT)


def test_a_users_module_is_cut_to_few_blocks_and_compared() -> None:
    found = parity(plan("dp_shard2", 3, factory="tests.distributed.verify_models:language_model"))
    assert found.passed, (found.fault, found.skipped)
    assert found.zero_gradients == ("layers.0.key_bias", "layers.1.key_bias")
    assert found.shrunk.endswith("5 micro-batches")


def test_a_module_that_is_no_language_model_is_said_and_not_passed() -> None:
    found = parity(plan("dp_replicate2", factory="tests.distributed.verify_models:classifier"))
    assert not found.passed
    assert "embedding" in found.skipped


def test_what_cannot_be_built_is_refused_with_its_fix() -> None:
    with pytest.raises(RecipeError, match="handed over as an object"):
        parity(msgspec.structs.replace(plan("dp_replicate2"), arch=None))
    with pytest.raises(PlanInfeasible):
        parity(plan("cp2"))


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-c", "from shardwise.cli import main; main()", "verify", *arguments]
    return subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


def test_the_command_proves_both_halves_and_ends_with_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    small = plan("dp_shard2", 3)
    path.write_bytes(small.to_json())
    done = command(str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan ")
    assert done.stdout.splitlines()[-1].startswith("verdict  passed: peak ")
    assert "2 ranks are one rank" in done.stdout


def test_the_command_fails_where_a_rank_does_not_hold_the_model(tmp_path: Path) -> None:
    big = msgspec.structs.replace(
        PRESETS["decoder-8m"], num_layers=2000, hidden_size=8192, num_heads=128, num_kv_heads=128
    )
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.structs.replace(plan("dp_shard2", 3), arch=big).to_json())
    done = command(str(path), "--half", "dry", "--json")
    assert done.returncode == 2, done.stdout
    assert json.loads(done.stdout)["error"] == "PlanInfeasible"
