"""What was predicted beside what is measured: who has a prediction, who has a reason instead, and what is told."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from shardwise.cli import plan as plan_verb
from shardwise.errors import RecipeError
from shardwise.events.values import Compared
from shardwise.inputs.arch import PRESETS
from shardwise.inputs.hardware import file
from shardwise.inputs.recipe import CheckpointPolicy, Recipe, from_keys
from shardwise.launch import local
from shardwise.models.decoder import Decoder
from shardwise.plan import automatic
from shardwise.plan.prediction import predict, why_none
from shardwise.report import summary
from shardwise.train import setup
from shardwise.train.before_ranks import before_joining
from tests.unit.measured_machine import FACTS, probed


def small_recipe(**train: object) -> Recipe:
    return from_keys(
        {
            "model": {"preset": "decoder-2m"},
            "data": {"text": ["stdlib:*.py"], "sequence_length": 256},
            "batch": {"global_batch": 16},
            "train": {"steps": 5, **train},
        }
    )


def test_every_plan_of_a_known_shape_has_a_prediction_whoever_decided_it() -> None:
    """What the search chose keeps its estimate; the same choice by hand is predicted the same seconds."""
    cluster = probed(FACTS)
    chosen = automatic.plan(small_recipe(), PRESETS["decoder-2m"], cluster)
    assert chosen.estimate is not None
    assert predict(chosen) == chosen.estimate
    again = predict(msgspec.structs.replace(chosen, estimate=None))
    assert again is not None
    assert again.step_seconds == pytest.approx(chosen.estimate.step_seconds, rel=1e-9)
    by_hand = automatic.plan(small_recipe(plan={"zero": 3, "dp_shard": 2}), PRESETS["decoder-2m"], cluster)
    assert by_hand.estimate is None
    assert predict(by_hand) is not None
    assert why_none(by_hand) == ""


def test_a_module_of_unknown_shape_has_a_reason_instead() -> None:
    made = automatic.plan(small_recipe(), 1_000_000, probed(FACTS))
    assert predict(made) is None
    assert "shape is not known" in why_none(made)


@pytest.mark.parametrize(("measured", "inside"), [(0.25, True), (0.5, False)])
def test_the_summary_and_its_line_set_prediction_beside_measurement(measured: float, inside: bool) -> None:
    event = Compared(
        predicted_step_seconds=0.2, step_seconds_interval=(0.15, 0.3), measured_step_seconds=measured, steps=7,
        predicted_memory_bytes=2**30, memory_bytes_interval=(2**29, 2**31), probed=True,
    )  # fmt: skip
    told = json.loads(summary.last_line([event], "runs/x", 0))["prediction"]
    assert told["step_seconds"]["ratio"] == pytest.approx(0.2 / measured)
    assert told["step_seconds"]["inside"] is inside
    assert told["memory_bytes"]["inside"] is None
    text = summary.text(automatic.plan(small_recipe(), PRESETS["decoder-2m"], probed(FACTS)), [event], "runs/x")
    assert ("inside" if inside else "outside") in text
    assert "no prediction: because" in summary.text(
        automatic.plan(small_recipe(), 10**6, probed(FACTS)), [Compared(why_none="because")], "runs/x"
    )


def test_a_trainer_s_token_data_has_a_known_length_and_is_searched() -> None:
    """What a Trainer makes of its keywords; on data of any length the rule of thumb decides, no estimate."""
    given = {
        "model": "m", "blocks": "auto", "global_batch": 16, "tokens_per_step": None, "micro_batch": "auto",
        "precision": "auto", "clip_norm": 1.0, "seed": 0, "plan": "auto", "run": "runs/x",
        "checkpoint": CheckpointPolicy(), "log": (), "fp32_modules": (), "evaluate_every_steps": 0,
        "sync_batchnorm": False, "mixes_samples": "refuse", "unused_parameters": (), "roles": {},
        "sequence_parallel": "auto", "guard_every_steps": 0,
    }  # fmt: skip
    known = setup.Settings(data="d", tokens_per_sample=128, **given).recipe()  # type: ignore[arg-type]
    unknown = setup.Settings(data="d", tokens_per_sample=None, **given).recipe()  # type: ignore[arg-type]
    assert known.data.sequence_length == 128
    with torch.device("meta"):
        decoder = Decoder(PRESETS["decoder-2m"])
    assert setup.make_plan(known, decoder).estimate is not None
    other = setup.make_plan(unknown, decoder)
    assert other.estimate is None
    assert "length of the samples" in why_none(other) or "shape" in why_none(other)


def test_an_own_loop_is_planned_by_the_measured_file_that_it_names(tmp_path: Path) -> None:
    """In a process of its own: init joins a group."""
    path = tmp_path / "mine.toml"
    path.write_text(file.as_toml(probed(FACTS, local.probe_cluster())))
    said = f"import shardwise as sw; print(sw.init(cluster={str(path)!r}).cluster.measured.by)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == FACTS.by, done.stderr


def test_a_module_is_rehearsed_by_the_file_that_its_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    asked = small_recipe(plan={"tp": 2}, cluster=str(tmp_path / "nowhere.toml"))
    with pytest.raises(RecipeError, match="There is no cluster file"):
        before_joining(lambda: torch.nn.Linear(2, 2), asked, None, [], "auto")


def test_a_recipe_that_names_a_measured_file_is_planned_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    here = local.probe_cluster()
    path.write_text(file.as_toml(probed(FACTS, here)))
    with torch.device("meta"):
        decoder = Decoder(PRESETS["decoder-2m"])
    made = setup.make_plan(small_recipe(cluster=str(path)), decoder)
    assert made.cluster.measured == FACTS
    assert made.estimate is not None
    assert setup.make_plan(small_recipe(), decoder).cluster.measured is None
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npreset = "decoder-2m"\n[data]\ntext = ["x"]\n[batch]\nglobal_batch = 16\n'
        f'[train]\nsteps = 5\ncluster = "{path}"\n'
    )
    plan_verb.plan(plan_verb.Asked(str(recipe), "", (), None, False))
    assert "measured values are used: a probe" in capsys.readouterr().out
