"""A user's module that its plan cannot cut: refused by the commands before any rank starts, by a rank before it joins
the others; and with the fix that is told, it trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ModelError
from shardwise.inputs import recipe as recipes
from shardwise.launch import before_ranks, local
from shardwise.plan import rule_of_thumb
from shardwise.plan.plan import Plan
from tests.distributed.test_command import SHARDWISE, run
from tests.unit import user_modules

RECIPE = """
schema_version = 1
run = "run"
[model]
factory = "models:sound"
[data]
text = ["text.txt"]
sequence_length = 16
[batch]
global_batch = 8
[train]
steps = 2
precision = "fp32"
guard_every_steps = 1
"""
SCRIPT = """
import sys, torch
import models, shardwise as sw
x = torch.arange(64 * 5).reshape(64, 5) % 257
def loss(outputs, batch):
    return sw.Loss(torch.nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), reduction="sum"),
                   batch[1].numel())
trainer = sw.Trainer(
    model=getattr(models, sys.argv[1]), loss=loss, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    data=sw.Batches(torch.utils.data.TensorDataset(x, x)), global_batch=8, precision="fp32", run="run",
    plan={"pp": 2})
for step in trainer.run(steps=2):
    pass
if sw.is_main():
    print(f"trained {step.number}")
"""


def commanded(verb: str, folder: Path, changes: tuple[str, ...], *more: str) -> "subprocess.CompletedProcess[str]":
    settings = [part for change in changes for part in ("--set", change)]
    return run([SHARDWISE, verb, "recipe.toml", *settings, *more], folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(user_modules.__file__, tmp_path / "models.py")
    (tmp_path / "text.txt").write_text("".join(f"line {n} of a text to learn\n" for n in range(300)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


# A fault, what is said of it, what to do, and that done. The first two are tried each time, the rest at night.
FAULTS = [
    (("model.factory=models:scattered", "train.plan.pp=2"), "0 blocks, and the pipeline 2 stages",
     'model.blocks = "the.path"', ("model.factory=models:sound", "train.plan.pp=2")),
    (("train.plan.tp=2",), "tp = 2 does not divide the heads", "the role 'replicated' for the layers",
     ("train.plan.tp=2", "model.roles={ 'blocks.*.attention.*' = 'replicated' }")),
    (("train.plan.pp=2", "model.blocks=bloks"), "model.blocks = 'bloks' is no ModuleList",
     'blocks = "blocks"', ("train.plan.pp=2", "model.blocks=blocks")),
    (("model.factory=models:short", "train.plan.pp=2", "train.plan.stages_per_rank=2"),
     "3 blocks, and the pipeline 4 stages", "train.plan.pp x train.plan.stages_per_rank of at most 3",
     ("model.factory=models:short", "train.plan.pp=2", "train.plan.stages_per_rank=1")),
    (("train.plan.tp=2",), "tp = 2 does not divide the heads of blocks.0.attention.q_proj: 3",
     "train.plan.tp = a divisor of them", ("train.plan.tp=3", "train.devices=3")),
    (("model.factory=models:functional", "train.plan.tp=3", "train.devices=3"),
     "computes with embed.weight, a weight of another", "tie the two",
     ("model.factory=models:tied", "train.plan.tp=3", "train.devices=3")),
    (("model.factory=models:absent", "train.plan.pp=2"), "has no function 'absent'", "my.module:function",
     ("model.factory=models:sound", "train.plan.pp=2")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("faulty", "says", "fix", "mended"),
    [*FAULTS[:2], *(pytest.param(*fault, marks=pytest.mark.nightly) for fault in FAULTS[2:])],
)
def test_the_launcher_s_look_at_it_refuses_it_and_the_fix_lifts_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, faulty: tuple[str, ...], says: str, fix: str, mended: tuple[str, ...]
) -> None:
    """In a process of its own, without ranks. What the fixes of tensor parallel train is in test_own_loops.py."""
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError) as caught:
        before_ranks.require_module(planned(faulty))
    assert says in caught.value.what + caught.value.why and fix in caught.value.fix
    assert before_ranks.require_module(planned(mended)) == ""


def planned(changes: tuple[str, ...]) -> Plan:
    recipe = recipes.load("recipe.toml", ("train.devices=2", *changes))
    return rule_of_thumb.plan(recipe, None, local.probe_cluster())


def test_what_no_plan_cuts_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("subprocess.run", None)
    assert before_ranks.require_module(planned(("model.factory=models:absent",))) == ""


def test_train_refuses_it_before_any_rank_and_trains_with_the_fix(folder: Path) -> None:
    faulty = commanded("train", folder, ("model.factory=models:between", "train.plan.pp=2", "train.devices=2"))
    assert faulty.returncode == 2, faulty.stderr + faulty.stdout
    assert "something lies between the two" in faulty.stderr and "sw.Split(before, blocks, after)" in faulty.stderr
    assert "fix:" in faulty.stderr and "Traceback" not in faulty.stderr
    assert not (folder / "run").exists(), "no rank was started"
    mended = commanded("train", folder, ("model.factory=models:as_split", "train.plan.pp=2", "train.devices=2"))
    assert mended.returncode == 0, mended.stderr
    assert (folder / "run" / "checkpoints").exists() and "not run in its parts" not in mended.stderr


def test_verify_refuses_it_too(folder: Path) -> None:
    result = commanded("verify", folder, ("model.factory=models:between", "train.plan.pp=2", "train.devices=2"))
    assert result.returncode == 2 and "something lies between the two" in result.stderr
    assert "parity" not in result.stdout and "dry run" not in result.stdout


def test_a_factory_that_raises_is_told_with_its_own_words(folder: Path) -> None:
    with (folder / "models.py").open("a") as models:
        models.write("\n\ndef broken():\n    raise OSError('no such weights')\n")
    result = commanded("train", folder, ("model.factory=models:broken", "train.plan.pp=2", "train.devices=2"))
    assert result.returncode == 2 and "no such weights" in result.stderr
    assert not (folder / "run").exists()


def test_a_rank_refuses_it_before_it_waits_for_the_others(folder: Path) -> None:
    """Rank 1 of 2 is alone: nobody listens at that address, so that joining would wait and never end well."""
    alone = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    result = run([sys.executable, "train.py", "between"], folder, env={**os.environ, **alone})
    assert result.returncode == 2, result.stderr
    assert "rank 1, step 0: The model cannot be cut into stages at blocks.2" in result.stderr
    assert "fix: describe the model as sw.Split" in result.stderr and "Traceback" not in result.stderr


def test_a_script_is_refused_under_the_launcher_with_the_same_code(folder: Path) -> None:
    refused = run([SHARDWISE, "run", "--devices", "2", "train.py", "between"], folder)
    assert refused.returncode == 2, refused.stderr
    assert "cannot be cut into stages" in refused.stderr and not (folder / "run").exists()


@pytest.mark.nightly
def test_a_script_runs_under_the_launcher_with_the_fix(folder: Path) -> None:
    """By day a recipe does, above."""
    mended = run([SHARDWISE, "run", "--devices", "2", "train.py", "as_split"], folder)
    assert mended.returncode == 0, mended.stderr
    assert "trained 2" in mended.stdout
