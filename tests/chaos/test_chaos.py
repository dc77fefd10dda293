"""Faults at random moments of a real run: nothing torn, nothing lost, nothing doubled, nobody left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.verify.faults import kinds_at

RECIPE = """
schema_version = 1
[model]
preset = "decoder-2m"
[data]
text = ["text.txt"]
sequence_length = 16
valid_fraction = 0.1
[batch]
tokens_per_step = 96
[optimizer]
lr = 1e-3
[train]
steps = {steps}
plan = {{ zero = {zero} }}
hang_seconds = 5
[checkpoint]
every_steps = 3
"""
# A fault takes some ten seconds with what follows from it; a hundred on a busy machine an hour.
LIMIT_SECONDS = 3600


def chaos(folder: Path, faults: int, seed: int, devices: int, zero: int, steps: int, *more: str) -> dict[str, object]:
    (folder / "text.txt").write_text("".join(f"line {n} of a text to learn\n" for n in range(400)))
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps, zero=zero))
    command = [
        sys.executable, "-m", "shardwise", "dev", "chaos", "recipe.toml", "--faults", str(faults), "--seed", str(seed),
        "--devices", str(devices), "--out", "out", "--json", *more,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    found: dict[str, object] = json.loads(done.stdout)
    assert done.returncode == (0 if found["survived"] else 1)
    return found


def test_twenty_faults_of_every_kind_lose_nothing(tmp_path: Path) -> None:
    """Two of each kind. Every fault takes at most 12 steps to come, so all come before the run is over."""
    found = chaos(tmp_path, 2 * len(kinds_at("disk")), seed=5, devices=2, zero=0, steps=200)
    assert found["findings"] == []
    assert found["survived"] and found["same_bits"] and found["ledger_faults"] == []
    assert found["not_reached"] == [] and found["late"] != 0


STORE = ("--store", "s3", "--kind", "store errors", "--kind", "kill rank")


def test_a_store_that_answers_badly_loses_nothing(tmp_path: Path) -> None:
    """Errors while it trains, its rank killed as it commits, errors while it writes; none of them needs a new start."""
    found = chaos(tmp_path, 3, 74, 1, 0, 60, *STORE)
    assert found["findings"] == [] and found["not_reached"] == []
    assert found["survived"] and found["same_bits"] and found["harmed"] != 0


@pytest.mark.nightly
def test_a_store_that_answers_badly_while_a_run_opens_loses_nothing(tmp_path: Path) -> None:
    found = chaos(tmp_path, 12, 3, 3, 3, 250, *STORE)
    assert found["findings"] == [] and found["not_reached"] == []
    assert found["survived"] and found["same_bits"] and found["harmed"] != 0


@pytest.mark.nightly
@pytest.mark.parametrize(("devices", "zero"), [(3, 0), (4, 3)])
def test_two_hundred_faults_lose_nothing(tmp_path: Path, devices: int, zero: int) -> None:
    found = chaos(tmp_path, 100, seed=devices, devices=devices, zero=zero, steps=1300)
    assert found["findings"] == []
    assert found["survived"] and found["not_reached"] == []
