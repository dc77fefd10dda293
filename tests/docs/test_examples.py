"""Every example runs as plain Python, one with two modules on two ranks too, and every recipe for a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.started import Starter

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.toml"))
LIMIT_SECONDS = 120


def command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [SHARDWISE, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_plain_python(name: str, tmp_path: Path, starter: Starter) -> None:
    ended = starter.run(ROOT / "examples" / name, tmp_path)
    assert ended.code == 0, ended.output
    assert "Warning" not in ended.output


def test_an_own_loop_with_two_modules_runs_on_two_ranks(tmp_path: Path) -> None:
    ended = command(["run", "--devices", "2", str(ROOT / "examples" / "gan.py")], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "generator loss" in ended.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_for_a_few_steps(name: str, tmp_path: Path) -> None:
    small = {
        "train.steps": "3",
        "train.evaluate_every_steps": "2",
        "train.devices": "1",
        "batch.tokens_per_step": "1024",
        "data.text": '["stdlib:json/*.py"]',
        "data.valid_fraction": "0.05",
        "run": str(tmp_path / "run"),
    }
    overrides = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    ended = command(["train", str(ROOT / "recipes" / name), *overrides], tmp_path)
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert (last["finished"], last["step"]) == (True, 3)
    assert last["valid_loss"] is not None
