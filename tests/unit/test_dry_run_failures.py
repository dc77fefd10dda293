"""What would end a run ends a dry run as a violation: which rank, which phase, which layer, what to do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from shardwise.inputs.recipe import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.violation import Violation
from shardwise.train.loss import Loss
from shardwise.verify.dry_run import dry_run
from shardwise.verify.subject import Subject, like
from tests.unit.test_dry_run import made

ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    """`wrong`: what its second layer takes that the first one does not give. `fault`: what its forward does too."""

    def __init__(self, wrong: int = 0, fault: str = "") -> None:
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(8, 12), nn.Linear(12 + wrong, 8), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.fault == "branch" and hidden.mean() > 0:
            hidden = hidden * 2
        if self.fault == "selects":
            hidden = hidden[hidden[:, 0].nonzero()[:, 0]]
        if self.fault == "raises":
            raise LookupError("no row of this name\nand a second line")
        if self.fault == "first dim" and hidden.shape[0] > 1:
            hidden = hidden.reshape(5, -1)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, wrong: int = 0, fault: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(wrong, fault)])
        self.head = nn.Linear(8, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def squared(outputs: torch.Tensor, batch: Any) -> Loss:
    return Loss(outputs.square().sum(), outputs.shape[0])


def weighted(outputs: torch.Tensor, batch: Any) -> Loss:
    return Loss((outputs.sum(1) * batch["weights"]).sum(), outputs.shape[0])


def refuses(outputs: torch.Tensor, batch: Any) -> Loss:
    raise ZeroDivisionError("nothing was counted")


def wrong_size(outputs: torch.Tensor, batch: Any) -> Loss:
    return Loss((outputs - outputs.new_zeros(outputs.shape[0], 4)).square().sum(), outputs.shape[0])


def subject(build: Callable[[], nn.Module] = Model, **more: Any) -> Subject:
    taken = {"batch": like({"features": torch.zeros(1, 8)}), "loss": squared, **more}
    return Subject(build=build, optimizer=lambda module: torch.optim.AdamW(module.parameters()), **taken)


def own(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, arch=None)


COPIES = own(made({"dp_replicate": 2}, 0))
PIPELINE = own(made({"pp": 2}, 0, schedule="1f1b", accumulation=2))


def ended(plan: Plan, given: Subject) -> Violation:
    found = dry_run(plan, given)
    assert not found.passed
    assert not dist.is_initialized(), "a group was left behind"
    (violation,) = found.violations
    assert violation.fix
    return violation


# The subject, what is said of it, where it was raised, and what to do.
FAULTS: dict[str, tuple[Subject, str, str, str]] = {
    "a layer of another size": (
        subject(lambda: Model(wrong=1)), "reduction dim", "blocks.1", "compare the sizes"
    ),
    "a branch on numbers": (
        subject(lambda: Model(fault="branch")), "whole module", "blocks.1", "has shapes and no numbers"
    ),
    "rows chosen by numbers": (
        subject(lambda: Model(fault="selects")), "whole module", "blocks.1", "has shapes and no numbers"
    ),
    "a forward that raises": (
        subject(lambda: Model(fault="raises")), "LookupError: no row of this name", "blocks.1", "correct it"
    ),
    "a loss that raises": (
        subject(loss=refuses), "loss is computed from the outputs", "test_dry_run_failures.py", "correct it"
    ),
    "a loss of other sizes": (
        subject(loss=wrong_size), "loss is computed from the outputs", "test_dry_run_failures.py", "compare the sizes"
    ),
    "a key that the batch lacks": (
        subject(loss=weighted), "KeyError: 'weights'", "test_dry_run_failures.py", "a batch with"
    ),
    "a batch that forward does not take": (
        subject(batch=like({"rows": torch.zeros(1, 8)})),
        "forward takes features; the batch has rows", "", "inputs=lambda",
    ),
    "a module that cannot be built": (
        subject(lambda: Model(wrong="x")), "TypeError", "test_dry_run_failures.py", "correct it"  # type: ignore[arg-type]
    ),
    "an optimizer of nothing": (
        Subject(Model, like({"features": torch.zeros(1, 8)}), squared, lambda module: torch.optim.AdamW([])),
        "rank 0 (dp_replicate 0), while the optimizer is built", "test_dry_run_failures.py", "correct it",
    ),
    "a forward that only some numbers of samples pass": (
        subject(lambda: Model(fault="first dim")), "rank 0 (dp_replicate 0), while the step is in its forward",
        "blocks.1", "compare the sizes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_torchs_or_the_users_is_a_violation_with_its_place_and_a_fix(name: str) -> None:
    given, what, where, fix = FAULTS[name]
    found = ended(COPIES, given)
    assert what in found.what
    assert where in found.why
    assert fix in found.fix
    assert "\n" not in found.what


def test_what_ends_one_stage_names_its_rank() -> None:
    def fails_when_trained(outputs: torch.Tensor, batch: Any) -> Loss:
        if torch.is_grad_enabled():
            raise ValueError("not on this stage")
        return squared(outputs, batch)

    found = ended(PIPELINE, subject(loss=fails_when_trained))
    assert found.what.startswith("rank 1 (pp 1), while the step is in its forward: ValueError: not on this stage")


def test_the_same_module_without_a_fault_passes() -> None:
    for plan in (COPIES, PIPELINE, own(made({"dp_shard": 2}, 3))):
        assert dry_run(plan, subject()).passed


@pytest.mark.parametrize("mesh", [{"dp_shard": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_module_of_ones_own_is_counted_by_hand(mesh: dict[str, int]) -> None:
    """All ranks together hold every number once under a pipeline, padded to equal rows where sharded.

    Under a tensor group they hold each number twice: no layer of this module has a role that would split it.
    """
    zero = 3 if "dp_shard" in mesh else 0
    schedule = {"schedule": "1f1b", "accumulation": 2} if "pp" in mesh else {}
    found = dry_run(own(made(mesh, zero, **schedule)), subject())
    assert found.passed, found.violations
    held = sum(run.stands_for * run.phases[-1].live.parameters for run in found.ranks)
    size = torch.float64.itemsize
    if "dp_shard" in mesh:
        padded = [-(-p.shape[0] // 3) * 3 * p[0].numel() for p in Model().parameters()]
        assert held == size * sum(padded)
    else:
        assert held == size * sum(p.numel() for p in Model().parameters()) * mesh.get("tp", 1)


# Through the command: the model is a factory in a file of the user's.

FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, wrong=0, branch=False):
        super().__init__()
        self.embed, self.head, self.branch = nn.Embedding(257, 8), nn.Linear(8 + wrong, 257), branch
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x * 2 if self.branch and x.mean() > 0 else x)

def sound():
    return Model()

def mismatched():
    return Model(wrong=1)

def branches():
    return Model(branch=True)
"""
RECIPE = """
schema_version = 1
[model]
factory = "users_model:{factory}"
[data]
text = ["stdlib:**/*.py"]
sequence_length = 16
[batch]
global_batch = 8
[optimizer]
name = "adamw"
[train]
steps = 1
devices = 2
"""


def command(folder: Path, factory: str, *more: str) -> "subprocess.CompletedProcess[str]":
    (folder / "users_model.py").write_text(FACTORY)
    (folder / "recipe.toml").write_text(RECIPE.format(factory=factory))
    program = [sys.executable, "-c", "from shardwise.cli import main; main()", "verify", "recipe.toml", "--half", "dry"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return subprocess.run([*program, *more], capture_output=True, text=True, cwd=folder, env=env, check=False)


def test_the_command_verifies_a_factory(tmp_path: Path) -> None:
    done = command(tmp_path, "sound", "--json")
    assert done.returncode == EXIT_DONE, done.stderr
    said = json.loads(done.stdout)
    assert said["passed"]
    assert said["dry"]["ranks"][0]["phases"]


@pytest.mark.parametrize(("factory", "words"), [
    ("mismatched", ("while a batch goes through the whole module", "raised in head", "fix: compare the sizes")),
    ("branches", ("while a batch goes through the whole module", "fix: a dry run has shapes and no numbers")),
])  # fmt: skip
def test_the_command_ends_with_one_and_a_fix_and_shows_no_traceback(
    tmp_path: Path, factory: str, words: tuple[str, ...]
) -> None:
    done = command(tmp_path, factory)
    assert done.returncode == EXIT_FAILED, done.stdout + done.stderr
    assert all(one in done.stdout for one in words), done.stdout
    assert "verdict  FAILED" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_command_says_of_a_factory_that_is_not_there_what_to_write(tmp_path: Path) -> None:
    done = command(tmp_path, "nowhere")
    assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "fix" in done.stdout + done.stderr


def test_a_factory_in_a_plan_is_what_a_dry_run_builds() -> None:
    factory = msgspec.structs.replace(COPIES.recipe.model, given=None, factory="tests.unit.user_modules:sound")
    assert isinstance(factory, ModelSpec)
    plan = msgspec.structs.replace(COPIES, recipe=msgspec.structs.replace(COPIES.recipe, model=factory))
    assert dry_run(plan).passed
