"""What a person reads, and what a program reads."""

import io
import json
import math

import msgspec
import pytest

from shardwise.errors import PlanInfeasible
from shardwise.events.live import PLAIN_SECONDS, LiveLine, progress, sentence
from shardwise.events.values import (
    AnyEvent,
    Evaluated,
    Event,
    Failed,
    Fallback,
    Finished,
    NonFiniteLoss,
    Resumed,
    RunStarted,
    Saved,
    SettingsChanged,
    Step,
    Stopped,
)
from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import MachineFacts, local_cluster, parse_cluster
from shardwise.inputs.recipe import PlanRequest, from_keys
from shardwise.launch.outcome import FirstFailure
from shardwise.plan.check import check
from shardwise.plan.plan import Plan
from shardwise.plan.rule_of_thumb import plan
from shardwise.report import doctor, errors, summary
from shardwise.report import plan as plan_report

FACTS = MachineFacts(cpus=2, host_memory_bytes=8 * 2**30)
SMI = "0, GPU-a, NVIDIA H200, 143771\n"


def made(sequence_length: int = 256) -> Plan:
    recipe = from_keys(
        {
            "model": {"preset": "decoder-2m"},
            "data": {"text": ["a.txt"], "sequence_length": sequence_length},
            "batch": {"global_batch": 64},
            "train": {"steps": 600},
            "run": "runs/test",
        }
    )
    return plan(recipe, preset("decoder-2m"), local_cluster(FACTS))


def step(number: int, loss: float = 2.0, **more: float | None) -> Step:
    keys: dict[str, float | None] = {"tokens_per_second": 41234.0, "mfu": 0.231, "eta_seconds": 125.0, **more}
    return Step(
        step=number, steps=600, loss=loss, grad_norm=1.0, lr=1e-3, samples=64 * number, tokens=16384,
        step_seconds=0.4, **keys,
    )  # fmt: skip


def told() -> list[AnyEvent]:
    return [
        Evaluated(step=0, loss=5.6, count=1.0),
        step(1, 5.5),
        step(600, 1.9),
        Evaluated(step=600, loss=1.85, count=1.0),
        Finished(
            step=600, samples=38400, tokens=9830400, seconds=150.0, first_loss=5.5, last_loss=1.9,
            valid_loss=1.85, tokens_per_second=65000.0, checkpoint="runs/test/checkpoints/step-600",
            sample="def f():\n    pass",
        ),
        Stopped(step=600, reason="finished", exit_code=0),
    ]  # fmt: skip


def test_the_line_tells_step_loss_speed_utilisation_and_time_left() -> None:
    line = progress(step(120, 1.832))
    for part in ("step 120/600", "loss 1.832", "41.2k tokens/s", "MFU 23.1%", "2 min 05 s left"):
        assert part in line


def test_what_is_not_known_is_left_out_of_the_line() -> None:
    line = progress(step(1, tokens_per_second=None, mfu=None, eta_seconds=None))
    assert "MFU" not in line and "left" not in line and "tokens/s" not in line
    assert "0.4 s a step" in line


@pytest.mark.parametrize(
    ("event", "part"),
    [
        (
            RunStarted(run="r", attempt=2, world=2, pids=(1, 2), device="cpu", plan="2 ranks", step=0),
            "attempt 2",
        ),
        (Resumed(step=7, path="p"), "after step 7"),
        (Evaluated(step=7, loss=1.5, count=1.0, metrics={"accuracy": 0.5}), "accuracy 0.5"),
        (Saved(step=7, path="p", bytes=2**20, seconds=0.5, why="policy"), "1.0 MiB"),
        (NonFiniteLoss(step=7, loss=math.nan, grad_norm=None, in_a_row=2), "2 in a row"),
        (Fallback(what="a", why="b"), "a (b)"),
        (SettingsChanged(key="optimizer.lr", before="1", after="2"), "optimizer.lr was 1, is 2"),
        (Failed(rank=3, step=7, phase="forward", error="e", traceback="t"), "rank 3 failed at step 7"),
        (Stopped(step=7, reason="signal", exit_code=130), "after step 7"),
    ],
)
def test_what_matters_is_a_sentence_of_its_own(event: Event, part: str) -> None:
    text = sentence(event)
    assert text is not None and part in text


def test_off_a_terminal_there_is_a_line_every_ten_seconds_and_the_last_step() -> None:
    now, stream = [0.0], io.StringIO()
    live = LiveLine(stream, terminal=False, clock=lambda: now[0])
    for number in range(1, 601):
        live.emit(step(number))
        now[0] += 0.1
    live.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == pytest.approx(60 / PLAIN_SECONDS + 1, abs=1)
    assert lines[0].startswith("step 1/600") and lines[-1].startswith("step 600/600")
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_on_a_terminal_the_line_is_redrawn_and_text_stands_above_it() -> None:
    now, stream = [0.0], io.StringIO()
    live = LiveLine(stream, terminal=True, clock=lambda: now[0])
    live.emit(step(1))
    live.above("hello\n")
    now[0] += 1
    live.emit(step(2))
    live.close()
    text = stream.getvalue()
    assert text.count("\n") == 2, "one for the text above, one at the end"
    assert text.index("hello\n") < text.rindex("step 1/600") < text.index("step 2/600")


def test_a_step_that_came_too_soon_is_shown_at_the_end() -> None:
    stream = io.StringIO()
    live = LiveLine(stream, terminal=False, clock=lambda: 0.0)
    live.emit(step(1))
    live.emit(step(2))
    live.close()
    live.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 1/600", "step 2/600"]


def test_the_plan_is_told_with_every_reason() -> None:
    planned = made()
    text = plan_report.text(planned)
    assert all(reason in text for reason in planned.why)
    assert "decoder-2m" in text and "zero 0" in text and "64 samples a step" in text


def test_an_alias_is_told_beside_the_name_that_it_means() -> None:
    recipe = made().recipe
    text = plan_report.text(plan(recipe, preset("decoder-2m"), parse_cluster("8xH100")))
    assert "8xH100-SXM5-80GB (8xH100)" in text


def test_a_plan_and_its_violations_are_one_json_object() -> None:
    planned = made(sequence_length=2048)
    found = check(planned, planned.decision.mesh.world)
    value = json.loads(plan_report.as_json(planned, found))
    assert [one["rule"] for one in value["violations"]] == ["sequence_fits_the_model"]
    assert value["plan"]["decision"]["global_batch"] == 64
    assert found[0].fix in plan_report.violations(found)


def test_the_summary_tells_plan_losses_speed_run_and_sample() -> None:
    text = summary.text(made(), told(), "runs/test")
    for part in (
        "2 ranks",
        "5.5000 -> 1.9000",
        "5.6000 (step 0) -> 1.8500",
        "65k tokens/s",
        "runs/test",
        "| def f():",
    ):
        assert part in text


def test_the_last_line_is_json_with_the_held_out_loss() -> None:
    value = json.loads(summary.last_line(told(), "runs/test", 0))
    assert value["valid_loss"] == 1.85
    assert (value["step"], value["finished"], value["exit_code"]) == (600, True, 0)


def test_a_sample_cannot_move_the_cursor() -> None:
    assert summary.printable("a\x1b[2Jb\r\bé\n\tc\u2028") == "a·[2Jb··é\n\tc·"


def test_a_run_that_told_nothing_still_ends_with_json() -> None:
    value = json.loads(summary.last_line([], "runs/test", 1))
    assert value["valid_loss"] is None and value["step"] is None and value["finished"] is False


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    line = summary.last_line([step(1, math.nan), Evaluated(step=1, loss=math.inf, count=1.0)], "r", 1)
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert value["valid_loss"] is None and value["last_loss"] is None


def test_an_error_is_told_with_why_and_fix_in_text_and_json() -> None:
    error = PlanInfeasible("What.", why="because", fix="do this")
    assert errors.text(error) == "error: What.\n  why: because\n  fix: do this"
    value = json.loads(errors.as_json(error))
    assert (value["error"], value["why"], value["fix"], value["exit_code"]) == (
        "PlanInfeasible",
        "because",
        "do this",
        2,
    )


def test_a_failure_names_rank_step_and_phase_and_shows_one_traceback() -> None:
    raised = FirstFailure(rank=1, text="Traceback ...\nValueError: x", exit_code=1, step=3, phase="forward")
    text = errors.failure(raised, "runs/test/logs")
    assert text.count("Traceback") == 1
    assert "rank 1, step 3 (forward) failed" in text and "runs/test/logs" in text
    expected = FirstFailure(rank=0, text="The loss is a scalar.", exit_code=2, expected=True)
    assert errors.failure(expected, "l").startswith("error: rank 0: The loss is a scalar.")


def test_doctor_finds_what_is_missing_and_how_to_mend_it() -> None:
    versions = {"shardwise": "0.1.0", "numpy": "2.0"}
    well = doctor.findings(FACTS, "2.13.0", versions)
    assert all(one.ok for one in well)
    without = {one.name: one for one in doctor.findings(FACTS, None, versions)}
    assert not without["torch"].ok and without["torch"].fix
    hidden = MachineFacts(cpus=2, host_memory_bytes=2**33, nvidia_smi=SMI, torch_has_cuda=False)
    unused = {one.name: one for one in doctor.findings(hidden, "2.13.0+cpu", versions)}
    assert not unused["GPUs"].ok and "MISSING" in doctor.text(tuple(unused.values()))
    assert doctor.values(well)["numpy"]["found"] == "2.0"


def test_a_pipeline_is_told_with_its_schedule_its_stages_and_its_fullest_rank() -> None:
    wished = msgspec.structs.replace(made().recipe.train, plan=PlanRequest(pp=3, recompute="full"))
    recipe = msgspec.structs.replace(made().recipe, train=wished)
    text = plan_report.text(plan(recipe, preset("decoder-2m"), parse_cluster("3xH100")))
    assert "1f1b, 3 stages, 1 a rank, of 2 or 1 blocks" in text
    assert "1 data-parallel rank x" in text and "recompute  full" in text and "on the fullest rank" in text
