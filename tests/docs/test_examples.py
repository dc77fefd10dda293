"""Every example runs as plain Python, one with two modules on two ranks too, and every recipe for a few steps."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.started import Starter

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.toml"))
LIMIT_SECONDS = 120
SMALL = {
    "train.steps": "3",
    "train.evaluate_every_steps": "2",
    "train.devices": "1",
    "batch.tokens_per_step": "1024",
    "data.text": '["stdlib:json/*.py"]',
    "data.valid_fraction": "0.05",
    "run": "run",
}


Commands = dict[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module", autouse=True)
def commands(own_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """What goes through the command, started at once: each spends seconds on imports, and the tests go on meanwhile."""
    asked = {"gan.py": ["run", "--devices", "2", str(ROOT / "examples" / "gan.py")]}
    for name in RECIPES:
        overrides = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
        asked[name] = ["train", str(ROOT / "recipes" / name), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = {
        name: subprocess.Popen(
            [SHARDWISE, *arguments], cwd=tmp_path_factory.mktemp("command"), env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name, arguments in asked.items()
    }  # fmt: skip
    yield started
    for process in started.values():
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_plain_python(name: str, tmp_path: Path, starter: Starter) -> None:
    ended = starter.run(ROOT / "examples" / name, tmp_path)
    assert ended.code == 0, ended.output
    assert "Warning" not in ended.output


def test_an_own_loop_with_two_modules_runs_on_two_ranks(commands: Commands) -> None:
    stdout, stderr = commands["gan.py"].communicate(timeout=LIMIT_SECONDS)
    assert commands["gan.py"].returncode == 0, stderr
    assert "generator loss" in stdout


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_for_a_few_steps(name: str, commands: Commands) -> None:
    stdout, stderr = commands[name].communicate(timeout=LIMIT_SECONDS)
    assert commands[name].returncode == 0, stderr
    last = json.loads(stdout.splitlines()[-1])
    assert (last["finished"], last["step"]) == (True, 3)
    assert last["valid_loss"] is not None
