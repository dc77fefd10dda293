"""The commands as a user meets them: real processes, real signals, what the screen says and which code comes back."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.events.reader import read
from shardwise.events.values import Failed

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
LIMIT_SECONDS = 120
RECIPE = """
schema_version = 1
run = "run"
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
schedule = {{ name = "cosine", warmup_steps = 2 }}
[train]
steps = {steps}
devices = {devices}
[checkpoint]
every_steps = 4
"""


def recipe(folder: Path, *, steps: int, devices: int | str = 2) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("".join(f"line {n} of a text to learn\n" for n in range(300)))
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps, devices=devices))
    return [SHARDWISE, "train", "recipe.toml"]


def run(command: list[str], folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS, **more)


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: "subprocess.Popen[str]", text: str) -> str:
    """Read the command's stderr up to the line that holds `text`."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def last_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def weights(folder: Path) -> Any:
    """The manifest's digests of everything in the newest checkpoint but what tells runs apart."""
    newest = max((folder / "run" / "checkpoints").glob("step-*/manifest.json"), key=lambda path: path.parent.name)
    manifest = json.loads(newest.read_text())
    return manifest["manifest"]["tensors"]


def test_interrupted_and_started_again_ends_in_the_same_bits(tmp_path: Path) -> None:
    command = recipe(tmp_path / "whole", steps=40)
    whole = run(command, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    recipe(tmp_path / "cut", steps=40)
    cut = start(command, tmp_path / "cut")
    wait_for(cut, "step 1/40")
    cut.send_signal(signal.SIGINT)
    out, err = cut.communicate(timeout=LIMIT_SECONDS)
    assert cut.returncode == 130, err
    assert "the same command goes on" in err and "Traceback" not in err
    assert last_json(out)["step"] < 40
    again = run(command, tmp_path / "cut")
    assert again.returncode == 0, again.stderr
    assert "resumed after step" in again.stderr
    for key in ("first_loss", "last_loss", "valid_loss"):
        assert last_json(again.stdout)[key] == last_json(whole.stdout)[key]
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    third = run(command, tmp_path / "cut")
    assert third.returncode == 0 and "is finished" in third.stdout


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    command = recipe(tmp_path, steps=5000, devices=1)
    first = start(command, tmp_path)
    wait_for(first, "step 1/5000")
    second = run(command, tmp_path)
    assert second.returncode == 2
    assert "in use" in second.stderr and "fix:" in second.stderr
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=LIMIT_SECONDS)
    assert first.returncode == 130


def test_a_fork_goes_on_in_the_store_that_its_run_keeps_its_checkpoints_in(tmp_path: Path) -> None:
    command = [*recipe(tmp_path, steps=4, devices=1), "--set", "checkpoint.store=kept"]
    first = run(command, tmp_path)
    assert first.returncode == 0, first.stderr
    there = {path.name for path in (tmp_path / "kept").iterdir()}
    forked = [*command, "--fork", "other", "--set", "seed=1", "--set", "train.steps=6"]
    second = run(forked, tmp_path)
    assert second.returncode == 0, second.stderr
    assert "resumed after step 4" in second.stderr and last_json(second.stdout)["step"] == 6
    assert there < {path.name for path in (tmp_path / "kept").iterdir()}, "the run has what it had"
    assert not (tmp_path / "other" / "checkpoints").exists()
    third = run(forked, tmp_path)
    assert third.returncode == 0 and "is finished" in third.stdout, third.stderr


FAILING = """
import sys, torch
from torch import nn
from torch.utils.data import TensorDataset
import shardwise as sw
from shardwise import ranks
x = torch.randn(64, 4)
trainer = sw.Trainer(
    model=lambda: nn.Linear(4, 1), loss=lambda o, b: sw.Loss((o - b[1]).square().sum(), len(b[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    data=sw.Batches(TensorDataset(x, x.sum(1, keepdim=True))), global_batch=8, run="run")
for step in trainer.run(steps=50):
    if step.is_main:
        print(f"my own print {step.number}")
    if step.number == 3 and ranks.rank() == 1:
        raise ValueError("a fault of the user's")
"""


def test_one_traceback_is_shown_of_the_rank_that_raised_first(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    result = run([SHARDWISE, "run", "--devices", "3", "train.py"], tmp_path)
    ended = time.time()
    assert result.returncode == 1
    assert "my own print 3" in result.stdout
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert "a fault of the user's" in result.stderr
    assert "rank 1" in result.stderr and "step 3" in result.stderr
    failed = [event for path in (tmp_path / "run" / "events").glob("failed-*") for event in read(path)]
    first = min((event for event in failed if isinstance(event, Failed)), key=lambda event: event.time)
    assert first.rank == 1 and ended - first.time < 15


def test_the_same_script_starts_under_plain_torchrun_and_plain_python(tmp_path: Path) -> None:
    script = FAILING.replace("raise ValueError", "pass; ValueError").replace("steps=50", "steps=4")
    (tmp_path / "train.py").write_text(script)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    many = run([torchrun, "--standalone", "--nproc-per-node", "2", "train.py"], tmp_path)
    assert many.returncode == 0, many.stderr
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "train.py").write_text(script)
    one = run([sys.executable, "train.py"], tmp_path / "alone")
    assert one.returncode == 0, one.stderr
    assert "my own print 4" in one.stdout and "my own print 4" in many.stdout


HUNGRY = """
import resource, torch
from torch import nn
from torch.utils.data import TensorDataset
import shardwise as sw
x = torch.randn(4096, 256)
trainer = sw.Trainer(
    model=lambda: nn.Sequential(nn.Linear(256, 32768), nn.ReLU(), nn.Linear(32768, 1)),
    loss=lambda o, b: sw.Loss((o - b[1]).square().sum(), len(b[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    data=sw.Batches(TensorDataset(x, x.sum(1, keepdim=True))), global_batch=4096, run="run"{more})
with open("/proc/self/statm") as f:
    now = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + {room}, now + {room}))
for step in trainer.run(steps=2):
    print(f"trained {{step.number}}")
"""


def test_out_of_memory_names_rank_step_phase_and_a_fix_that_works(tmp_path: Path) -> None:
    """4096 x 32768 fp32 activations are 512 MiB, twice: more than 800 MiB; of 256 samples they are 32 MiB.

    The limit is on address space, of which each thread that autograd or a save starts reserves 64 MiB and a stack.
    """
    (tmp_path / "train.py").write_text(HUNGRY.format(more="", room=800 * 2**20))
    result = run([sys.executable, "train.py"], tmp_path)
    assert result.returncode == 1
    assert "rank 0" in result.stderr.lower() and "step 1" in result.stderr and "forward" in result.stderr
    assert "batch.micro_batch = 2048" in result.stderr
    (tmp_path / "train.py").write_text(HUNGRY.format(more=", micro_batch=256", room=800 * 2**20))
    fixed = run([sys.executable, "train.py"], tmp_path)
    assert fixed.returncode == 0, fixed.stderr
    assert "trained 2" in fixed.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["--set", "optimizer.lrr=1"], ["optimizer.lrr", "optimizer.lr"]),
        (["--set", "data.text=[\"nothing/*.txt\"]"], ["nothing/*.txt"]),
        (["--set", "data.sequence_length=100000"], ["100000"]),
        (["--set", "train.plan={ dp_replicate = 3, dp_shard = 1 }"], ["3", "2"]),
        (["--set", "train.plan={ tp = 2 }"], ["tp"]),
        (["--set", "batch.tokens_per_step=100"], ["tokens_per_step", "96"]),
        (["--set", "run=text.txt"], ["text.txt"]),
    ],
)  # fmt: skip
def test_bad_input_ends_before_any_rank_starts(tmp_path: Path, changes: list[str], expected: list[str]) -> None:
    result = run([*recipe(tmp_path, steps=3), *changes], tmp_path)
    assert result.returncode == 2, result.stderr + result.stdout
    for part in expected:
        assert part in result.stderr
    assert "fix:" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "events").exists()
