"""A stop's budget: who says how long it is, whether a save fits, and what is known of that before training."""

import msgspec
import pytest

from shardwise.environment import notice_seconds
from shardwise.errors import RecipeError
from shardwise.events.live import sentence
from shardwise.events.values import RunStarted, Saved, Step, StopNotice
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import PRESETS
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.hardware.measured import Measured
from shardwise.plan import rule_of_thumb
from shardwise.resilience.budget import LEAVING_SECONDS, UNKNOWN_SECONDS, Budget, Flush, budget_of, fits, told
from shardwise.train.stopping import expected


def test_the_recipe_says_before_the_launcher_and_the_launcher_before_the_surroundings():
    assert budget_of(90.0, 60.0, in_pod=True).seconds == 90.0
    assert budget_of(None, 60.0, in_pod=True).seconds == 60.0
    assert budget_of(None, None, in_pod=True).seconds == 30.0
    assert budget_of(None, None, in_pod=False).seconds == UNKNOWN_SECONDS == 15.0


@pytest.mark.parametrize("said", ["", "soon", "0", "-3", "inf", "nan"])
def test_a_notice_that_is_no_time_is_refused(monkeypatch, said):
    monkeypatch.setenv("SHARDWISE_NOTICE_SECONDS", said)
    with pytest.raises(RecipeError, match="SHARDWISE_NOTICE_SECONDS"):
        notice_seconds()


def test_a_stop_fits_where_step_save_and_leaving_do():
    budget = Budget(10.0, "x")
    assert fits(Flush(3.0, 5.0), budget) and LEAVING_SECONDS == 2.0
    assert not fits(Flush(3.0, 5.001), budget)
    assert "loses an hour" in told(Flush(3.0, 6.0), budget, "an hour")
    assert "loses" not in told(Flush(3.0, 5.0), budget, "an hour")


def plan_of(measured=None):
    keys = {
        "model": {"preset": "llama-3-8b"}, "data": {"given": recipes.SHAPE_ALONE, "sequence_length": 4096},
        "batch": {"global_batch": 64}, "train": {"steps": 1, "plan": {"zero": 3}}, "run": "runs/x",
    }  # fmt: skip
    made = rule_of_thumb.plan(
        recipes.from_keys(keys, "test"), PRESETS["llama-3-8b"], parse_cluster("1x8xH100-SXM5-80GB")
    )
    return msgspec.structs.replace(made, cluster=msgspec.structs.replace(made.cluster, measured=measured))


def test_before_training_a_stop_is_known_from_earlier_attempts_or_from_a_measured_disk():
    assert expected(plan_of(), 2.0, []) == (None, "")
    disk = Measured(by="x", disk_write_bytes_per_second=1e9)
    flush, known = expected(plan_of(disk), 2.0, [])
    assert flush is not None and known == "predicted"
    # 8.03e9 parameters of 12 bytes at 1 GB/s.
    assert (flush.step, flush.save) == (2.0, pytest.approx(96.4, rel=0.01))
    began = RunStarted(run="r", attempt=1, world=1, pids=(1,), device="cpu", plan="", step=0)
    steps = [
        Step(step=n, steps=9, loss=1.0, grad_norm=1.0, lr=1.0, samples=n, tokens=None, step_seconds=float(n))
        for n in (1, 2, 9)
    ]
    saved = [Saved(step=9, path="p", bytes=1, seconds=4.0, why="policy")]
    assert expected(plan_of(disk), 2.0, [[began, *steps, *saved]]) == (Flush(2.0, 4.0), "as in earlier attempts")


def test_what_is_told_before_training_says_what_a_preemption_will_lose():
    notice = StopNotice(
        notice_seconds=15.0, source="nothing says", step_seconds=10.0, save_seconds=30.0, known="predicted", fits=False
    )
    assert "will lose" in (sentence(notice) or "")
    unknown = StopNotice(notice_seconds=15.0, source="x", step_seconds=None, save_seconds=None, known="", fits=None)
    assert "known after the first save" in (sentence(unknown) or "")
