"""Plans of Hugging Face models, held up before ranks: searched, dry run in their own sizes, compared at small ones."""

from pathlib import Path

import pytest

from shardwise.errors import RecipeError
from shardwise.inputs.arch import arch_of
from shardwise.inputs.hardware import MachineFacts, local_cluster, parse_cluster
from shardwise.inputs.recipe import Recipe, from_keys
from shardwise.plan import automatic
from shardwise.plan.check import check
from shardwise.plan.plan import Plan
from shardwise.verify.dry_run import dry_run
from shardwise.verify.parity import parity
from tests.distributed import hf_work

nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


def recipe(folder: Path, plan: object = "auto", **model: object) -> Recipe:
    return from_keys(
        {
            "model": {"hf": str(folder), **model},
            "data": {"text": ["a.txt"], "sequence_length": 16},
            "batch": {"global_batch": 8},
            "train": {"steps": 1, "plan": plan, "precision": "fp32"},
            "run": "runs/test",
        }
    )


def planned(folder: Path, plan: object = "auto", **model: object) -> Plan:
    asked = recipe(folder, plan, **model)
    cluster = local_cluster(MachineFacts(cpus=4, host_memory_bytes=2**34))
    return automatic.plan(asked, arch_of(asked.model, "cpu"), cluster)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("llama", {"dp_shard": 2, "zero": 3}),
        ("qwen3", {"tp": 2, "pp": 2}),
        pytest.param("gpt2", {"tp": 2}, marks=nightly),
        pytest.param("gemma3_text", {"pp": 2, "dp_replicate": 2}, marks=nightly),
    ],
)
def test_a_dry_run_has_the_model_in_its_own_sizes(family: str, split: dict[str, int], root: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = hf_work.write(family, root / family)
    found = dry_run(planned(folder, split))
    assert found.passed, (found.violations, found.mismatches)
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder, use_kernels=False).parameters())
    held = [run.peak.live.parameters for run in found.ranks]
    # Together the ranks hold all fp32 numbers, and none holds more than all of them.
    assert sum(run.stands_for * each for run, each in zip(found.ranks, held, strict=True)) >= 4 * size
    assert max(held) <= 4 * size
    if "zero" in split:
        assert max(held) < 4 * size * 0.6


def test_what_is_frozen_has_no_states_in_a_dry_run_and_is_not_compared(root: Path) -> None:
    folder = hf_work.write("llama", root / "frozen")
    part = planned(folder, {"dp_replicate": 2, "dp_shard": 1}, trainable={"frozen": ["model.*"]})
    (run, *_), (whole, *_) = dry_run(part).ranks, dry_run(planned(folder, {"dp_replicate": 2, "dp_shard": 1})).ranks
    assert run.peak.live.parameters == whole.peak.live.parameters
    head = hf_work.VOCABULARY * 32 * 4
    assert run.peak.live.states == pytest.approx(2 * head, rel=0.01)  # AdamW's two moments, and a count
    with pytest.raises(RecipeError, match="frozen parts") as caught:
        parity(part)
    assert "--half dry" in caught.value.fix


def test_a_plan_that_is_searched_for_a_model_of_hugging_face_runs(root: Path) -> None:
    """Also where our own decoder could not be built: biases, LayerNorm, learned positions."""
    folder = hf_work.write("gpt2", root / "searched")
    made = planned(folder)
    assert made.arch is not None and made.arch.engine_problem() and not made.ours
    assert check(made, made.decision.mesh.world) == ()
    asked = recipe(folder)
    large = automatic.plan(asked, arch_of(asked.model, "gpu"), parse_cluster("8xH100"))
    assert large.estimate is not None and check(large, 8) == ()


@nightly
@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("qwen3", {"tp": 2}),
        ("llama", {"dp_shard": 3, "zero": 3}),
        ("gemma3_text", {"pp": 2}),
        ("gpt2", {"dp_replicate": 2}),
        ("gpt_neox", {"tp": 2, "pp": 2}),
        ("phi3", {"dp_shard": 2, "zero": 2}),
    ],
)
def test_parity_trains_a_small_model_of_the_same_make(family: str, split: dict[str, int], root: Path) -> None:
    folder = hf_work.write(family, root / f"{family}-parity", num_hidden_layers=6, hidden_size=128)
    found = parity(planned(folder, split))
    assert found.passed, (found.fault, found.skipped)


@nightly
def test_parity_tells_a_fault_of_a_model_of_hugging_face(root: Path) -> None:
    folder = hf_work.write("llama", root / "fault")
    found = parity(planned(folder, {"dp_replicate": 2, "dp_shard": 1}), mutation="drop-reduce")
    assert found.fault is not None and "not summed over dp_replicate" in found.fault.cause
