"""Whole runs: resumed to the bit, stopped together, skipped together, refused together."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.pool import Pool

RUNS = "tests.distributed.runs"
# 22 samples in batches of 8: steps 3, 6, ... are the last of an epoch.
EPOCHS = 3


@pytest.mark.parametrize(
    ("world", "zero", "breaks"),
    [
        pytest.param(1, 0, [1], id="one process, first step of an epoch"),
        pytest.param(2, 0, [2], id="2 ranks, middle of an epoch"),
        pytest.param(3, 0, [3], id="3 ranks, last step of an epoch"),
        pytest.param(3, 3, [4, 5], id="3 ranks sharded, twice in one epoch"),
        pytest.param(4, 0, [1, 4, 8], id="4 ranks, three times"),
    ],
)
def test_a_resumed_run_gives_the_bits_of_one_that_was_never_stopped(
    pool: Pool, tmp_path: Path, world: int, zero: int, breaks: list[int]
) -> None:
    """With dropout, a random transform and draws of the loop's own: all of it must go on where it was."""
    arguments = {"epochs": EPOCHS, "zero": zero, "accumulation": 2 if world < 3 else 1}
    unbroken = pool.run(world, f"{RUNS}:train", folder=str(tmp_path / "a"), **arguments)
    broken = pool.run(world, f"{RUNS}:train", folder=str(tmp_path / "b"), breaks=breaks, **arguments)
    assert broken == unbroken


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_resumes_to_the_bit_too(pool: Pool, tmp_path: Path, precision: str) -> None:
    arguments = {"epochs": EPOCHS, "precision": precision}
    unbroken = pool.run(2, f"{RUNS}:train", folder=str(tmp_path / "a"), **arguments)
    broken = pool.run(2, f"{RUNS}:train", folder=str(tmp_path / "b"), breaks=[2], **arguments)
    assert broken == unbroken


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_one_rank_saves_and_ends_all_at_the_same_step(
    pool: Pool, tmp_path: Path, number: int, code: int
) -> None:
    arguments = {"folder": str(tmp_path / "run"), "epochs": EPOCHS}
    results = pool.run(3, f"{RUNS}:stopped_by_signal", number=int(number), at=2, **arguments)
    assert [result["code"] for result in results] == [code] * 3
    assert {tuple(result["steps"]) for result in results} == {(1, 2, 3)}
    resumed = pool.run(3, f"{RUNS}:train", folder=str(tmp_path / "run"), epochs=EPOCHS, draw=False)
    unbroken = pool.run(3, f"{RUNS}:train", folder=str(tmp_path / "other"), epochs=EPOCHS, draw=False)
    assert resumed[0]["digest"] == unbroken[0]["digest"]
    assert min(map(int, resumed[0]["losses"])) == 4


def test_stop_on_one_rank_ends_all_after_that_step(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(3, f"{RUNS}:stopped_by_one_rank", folder=str(tmp_path / "run"), at=5)
    assert {tuple(result["steps"]) for result in results} == {(1, 2, 3, 4, 5)}
    assert len({result["digest"] for result in results}) == 1
    # The dropped step's samples are read again: the run that goes on is the run that never stopped.
    assert results[0]["later"] == list(range(6, 13))
    assert results[0]["end"] == pool.run(3, f"{RUNS}:unbroken", folder=str(tmp_path / "other"))[0]


def test_a_non_finite_loss_of_one_rank_is_skipped_on_all(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(3, f"{RUNS}:non_finite", folder=str(tmp_path / "run"), bad=[2, 3, 5], steps=6)
    for result in results:
        assert result["applied"] == [True, False, False, True, False, True]
        assert result["digests"][1] == result["digests"][2] == result["digests"][0] != result["digests"][3]
    assert len({tuple(result["digests"]) for result in results}) == 1
    assert results[0]["told"] == 3


def test_three_non_finite_losses_in_a_row_stop_the_run_with_its_checkpoint_kept(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, f"{RUNS}:non_finite", folder=str(tmp_path / "run"), bad=[3, 4, 5], steps=9)
    for result in results:
        assert result["error"].startswith(
            "NonFinite: The loss or the gradient was not finite 3 steps in a row, to step 5"
        )
    assert list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("scalar loss", ["LossError", "bare scalar", "mean_per_sample"]),
        ("no count", ["LossError", "counts 0 items"]),
        ("batch norm", ["ModelError", "BatchNorm", "sync_batchnorm"]),
        ("contrastive", ["LossError", "mixes samples", "mixes_samples"]),
        ("router", ["ModelError", "router", "mixes_samples"]),
        ("uninitialised", ["ModelError", "scale"]),
        ("unused", ["ModelError", "spare.bias", "unused_parameters"]),
        ("empty data", ["DataError", "empty"]),
        ("foreign optimizer", ["ModelError", "parameters that the model has not"]),
        ("degrees", ["PlanInfeasible", "7"]),
        ("context parallel", ["PlanInfeasible", "cp"]),
        ("unknown plan key", ["RecipeError", "zerro", "zero"]),
        ("two batch sizes", ["RecipeError", "exactly one"]),
        ("nothing to evaluate on", ["RecipeError", "evaluate_every_steps = 2", "valid="]),
    ],
)
def test_bad_input_is_refused_on_every_rank_with_its_fix(
    pool: Pool, tmp_path: Path, case: str, expected: list[str]
) -> None:
    for message in pool.run(2, f"{RUNS}:refused", folder=str(tmp_path / "run"), case=case):
        for part in expected:
            assert part in message
        assert "fix:" in message or case == "no count"


@pytest.mark.parametrize(("world", "zero", "accumulation"), [(1, 0, 3), (3, 0, 1), (3, 0, 2), (2, 3, 2)])
def test_named_losses_are_averaged_each_by_its_own_count(
    pool: Pool, tmp_path: Path, world: int, zero: int, accumulation: int
) -> None:
    """fp64: only rounding may differ (see test_parity)."""
    one = pool.run(1, f"{RUNS}:named_losses", out="", zero=0, accumulation=1)[0]
    many = pool.run(world, f"{RUNS}:named_losses", out="", zero=zero, accumulation=accumulation)
    for result in many:
        np.testing.assert_allclose(result["loss"], one["loss"], rtol=1e-10)
        for name, gradient in one["gradients"].items():
            np.testing.assert_allclose(result["gradients"][name], gradient, rtol=1e-8, atol=1e-12)


def test_evaluation_is_one_value_everywhere_and_leaves_the_training_alone(pool: Pool, tmp_path: Path) -> None:
    seen: list[Any] = []
    for world, zero in ((1, 0), (3, 0), (4, 3)):
        results = pool.run(world, f"{RUNS}:evaluated", folder=str(tmp_path / f"{world}-{zero}"), zero=zero)
        assert all(result == results[0] for result in results)
        seen.append([row[:2] for row in results[0]["results"]])
    # fp32 rounding of sums of at most 22 terms
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5)
    np.testing.assert_allclose(seen[2], seen[0], rtol=1e-5)


def test_one_trainer_runs_again_from_where_its_run_stands_and_never_past_the_end(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, f"{RUNS}:run_again", folder=str(tmp_path / "run"))
    assert [result["steps"] for result in results] == [[[1, 2, 3], [], [], [4], [5, 6]]] * 2
    assert not (tmp_path / "run.1").exists(), "a second run() of a fresh Trainer moved the first one's run aside"


def test_weights_that_no_checkpoint_holds_are_never_taken_for_a_beginning(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(2, f"{RUNS}:again_without_a_checkpoint", folder=str(tmp_path / "run")):
        assert ["not open yet" in one for one in said] == [True, True, False, False]
        assert said[2].startswith("LookupError")
        assert "has made 1 steps that no checkpoint holds" in said[3]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("names", "dtypes"),
    [
        (["inner"], ["float32", "float32"]),
        (["inner.0"], ["float32", "bfloat16"]),
        (["inner.0.linear", "inner.0", "inner.0"], ["float32", "bfloat16"]),
        (["inner.1.linear"], ["bfloat16", "float32"]),
    ],
)
def test_a_module_kept_in_fp32_keeps_the_blocks_in_it_and_may_be_one(
    pool: Pool, tmp_path: Path, names: list[str], dtypes: list[str], zero: int
) -> None:
    seen = pool.run(2, f"{RUNS}:kept_in_fp32", folder=str(tmp_path / "run"), names=names, zero=zero)
    assert seen == [[f"torch.{dtype}" for dtype in dtypes]] * 2


def test_batches_that_were_read_are_an_error_not_an_empty_loop(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, f"{RUNS}:batches_read_twice", folder=str(tmp_path)) == ["2 steps, then DataError"] * 2


def test_a_run_folder_that_the_ranks_do_not_share_is_refused(pool: Pool, tmp_path: Path) -> None:
    messages = pool.run(2, f"{RUNS}:in_folders_of_their_own", folder=str(tmp_path))
    for message in messages:
        assert message.startswith("RunFolderError|") and "cannot see what rank 0 writes" in message
        assert "fix:" in message


@pytest.mark.parametrize("world", [1, 3])
def test_an_uneven_stream_never_hangs_and_resumes_to_the_bit(pool: Pool, tmp_path: Path, world: int) -> None:
    """Shards of 5, 9 and 13 samples, two a step: ranks run out at different steps of an epoch."""
    unbroken = pool.run(world, f"{RUNS}:streamed", folder=str(tmp_path / "a"), steps=11, breaks=[])
    broken = pool.run(world, f"{RUNS}:streamed", folder=str(tmp_path / "b"), steps=11, breaks=[2, 7, 8])
    assert broken == unbroken
    assert all(result["losses"] == unbroken[0]["losses"] for result in unbroken)


def test_keywords_beside_a_plan_count_and_contradictions_are_refused(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(2, f"{RUNS}:keywords_beside_a_plan", folder=str(tmp_path / "run")):
        assert result["kept"] == [True, 5, 0.25]
        assert result["batch"].startswith("PlanInfeasible|") and "global_batch" in result["batch"]
        assert result["precision"].startswith("PlanInfeasible|") and "precision" in result["precision"]


@pytest.mark.parametrize("case", ["rank", "micro-batch"])
def test_metrics_that_not_every_micro_batch_gives_are_refused(pool: Pool, tmp_path: Path, case: str) -> None:
    for message in pool.run(2, f"{RUNS}:metric_names", folder=str(tmp_path / "run"), case=case):
        assert message.startswith("LossError|") and "extra" in message and "fix:" in message


def test_metrics_are_summed_by_name_whatever_their_order(pool: Pool) -> None:
    assert pool.run(3, f"{RUNS}:metric_order") == [{"one": 1.0, "two": 2.0}] * 3


def test_plain_batches_draw_other_dropout_at_every_step(pool: Pool) -> None:
    assert len(set(pool.run(1, f"{RUNS}:plain_batches")[0])) == 3


def test_stop_needs_no_reason(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, f"{RUNS}:stopped_without_a_reason", folder=str(tmp_path / "run")) == [[1, 2]] * 2


def test_counting_named_losses_beforehand_leaves_running_statistics_alone(pool: Pool, tmp_path: Path) -> None:
    for one, two in pool.run(2, f"{RUNS}:statistics_of_named_losses", folder=str(tmp_path)):
        assert one == two


@pytest.mark.parametrize("names", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_weight_shared_with_a_module_kept_in_fp32_is_refused_where_it_would_be_half(
    pool: Pool, names: list[str]
) -> None:
    for said in pool.run(2, f"{RUNS}:tied_to_a_module_in_fp32", names=names):
        assert "one weight" in said and "train.plan.zero = 0" in said


@pytest.mark.parametrize("zero", [0, 3])
def test_generate_leaves_modes_and_shards_as_they_were(pool: Pool, zero: int) -> None:
    for left in pool.run(2, f"{RUNS}:generated", zero=zero):
        assert left["same modes"]
        assert left["held"] == left["all"] if zero == 0 else left["held"] <= left["all"] * 0.6
