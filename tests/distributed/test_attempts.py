"""A run that outlives its ranks: killed, crashed and told to stop, in real processes; what is lost and what is not."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from shardwise.events.reader import read
from shardwise.events.values import AnyEvent, AttemptEnded, Resumed, RunStarted, Step
from shardwise.launch import local
from shardwise.launch.run_folder import attempts_path, events_path
from tests.distributed.listening import listens
from tests.distributed.test_command import LIMIT_SECONDS, SHARDWISE, last_json, recipe, run, start, weights

LIMIT = 2 * LIMIT_SECONDS


def pids_of(folder: Path, attempt: int) -> tuple[int, ...]:
    events = read(events_path(folder / "run", attempt))
    return next(event.pids for event in events if isinstance(event, RunStarted))


def ends(folder: Path) -> list[AttemptEnded]:
    return [event for event in read(attempts_path(folder / "run")) if isinstance(event, AttemptEnded)]


def kill_at_saves(command: Sequence[str], folder: Path, rank: int, steps: Sequence[int]) -> tuple[int, str, str]:
    """Run the command, and kill a rank as each of these steps is saved, one an attempt; code, output, errors."""
    seen, attempt = "", 1
    with start(list(command), folder) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            seen += line
            if attempt <= len(steps) and f"step {steps[attempt - 1]}: saved" in line:
                os.kill(pids_of(folder, attempt)[rank], signal.SIGKILL)
                attempt += 1
        out = process.stdout.read()
    return process.returncode, out, seen


def elastic(folder: Path) -> list[str]:
    """Three ranks, and two where one fails again; in fp64, where nothing but rounding differs between worlds."""
    return [*recipe(folder, steps=24, devices='"2:3"'), "--set", "train.precision=fp64"]


class Whole(NamedTuple):
    """A run that nothing disturbed."""

    folder: Path
    out: str


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    done = run(elastic(folder), folder)
    assert done.returncode == 0, done.stderr
    return Whole(folder, done.stdout)


def told(folder: Path) -> list[AnyEvent]:
    """Of all attempts, oldest first."""
    return [event for path in sorted((folder / "run" / "events").glob("attempt-*.jsonl")) for event in read(path)]


def losses(folder: Path) -> dict[int, float]:
    """By step; of one that was made again, the last."""
    return {event.step: event.loss for event in told(folder) if isinstance(event, Step)}


def test_a_killed_rank_costs_an_attempt_and_no_bit(tmp_path: Path, undisturbed: Whole) -> None:
    code, out, err = kill_at_saves(elastic(tmp_path / "cut"), tmp_path / "cut", rank=1, steps=[8])
    assert code == 0, err
    assert "rank 1" in err and "SIGKILL" in err and "attempt 2 begins after step" in err and "crash 1 of 3" in err
    assert weights(tmp_path / "cut") == weights(undisturbed.folder)
    for key in ("first_loss", "last_loss", "valid_loss"):
        assert last_json(out)[key] == last_json(undisturbed.out)[key]
    first, last = ends(tmp_path / "cut")
    assert (first.cause, first.begins, first.world) == ("lost", 2, 3)
    assert (last.cause, last.begins, last.exit_code) == ("done", None, 0)
    # What is said to be lost is what the second attempt makes again; a commit may have come before its event.
    made = [event.step for event in read(events_path(tmp_path / "cut" / "run", 1)) if isinstance(event, Step)]
    resumed = [event.step for event in read(events_path(tmp_path / "cut" / "run", 2)) if isinstance(event, Resumed)]
    assert first.committed <= resumed[0] and first.lost_steps == len([step for step in made if step > first.committed])


# A sum of a step has at most 96 tokens x 256 channels terms, each rounded by 2^-53; 24 steps make 6.5e-11 at worst.
BOUND = 1e-10


def test_a_rank_that_is_killed_twice_is_left_out_and_the_loss_is_that_of_the_run_that_never_was(
    tmp_path: Path, undisturbed: Whole
) -> None:
    folder = tmp_path / "cut"
    code, _, err = kill_at_saves(elastic(folder), folder, rank=1, steps=[4, 12])
    assert code == 0, err
    # Two deaths under one device: the supervisor plans anew for the two that are left.
    assert [(one.cause, one.world) for one in ends(folder)] == [("lost", 3), ("lost", 2), ("done", None)]
    started = [event for event in told(folder) if isinstance(event, RunStarted)]
    assert [event.world for event in started] == [3, 3, 2]
    found, expected = losses(folder), losses(undisturbed.folder)
    assert sorted(found) == list(expected) == list(range(1, 25))
    found = dict(sorted(found.items()))
    # On three ranks the bits are the same; on two, the same samples in the same steps give the same losses but for
    # rounding.
    switch = started[-1].step
    assert switch >= 12 and {n: found[n] for n in range(1, switch + 1)} == {
        n: expected[n] for n in range(1, switch + 1)
    }
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=BOUND)
    read_until = [{e.step: e.samples for e in told(at) if isinstance(e, Step)} for at in (folder, undisturbed.folder)]
    assert read_until[0] == read_until[1] == {step: 6 * step for step in range(1, 25)}
    once = run([SHARDWISE, "checkpoints", "ledger", "run"], folder)
    assert once.returncode == 0, once.stdout + once.stderr


AGAIN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shardwise as sw
from shardwise import ranks
x = torch.arange(256.0).reshape(64, 4) / 256
trainer = sw.Trainer(
    model=lambda: nn.Linear(4, 1), loss=lambda o, b: sw.Loss((o - b[1]).square().sum(), len(b[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), data=sw.Batches(TensorDataset(x, x.sum(1, True))),
    global_batch=8, run="run", checkpoint=sw.CheckpointPolicy(every_steps={every}))
for step in trainer.run(steps=8):
    if step.number == 5 and ranks.rank() == 1:
        raise ValueError(f"a fault of the user's at {{id(step)}}")
"""


def test_the_same_error_at_the_same_step_is_tried_twice_and_shown_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AGAIN.format(every=2))
    done = run([SHARDWISE, "run", "--devices", "2", "train.py"], tmp_path)
    assert done.returncode == 1
    assert "attempt 2 begins after step" in done.stderr and "the same error came at step 5 before" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert [one.cause for one in ends(tmp_path)] == ["crash", "crash"]


def test_a_script_that_keeps_nothing_is_not_started_again_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nopen('starts', 'a').write('x')\nraise SystemExit(1)\n")
    assert run([SHARDWISE, "run", "--devices", "1", "train.py"], tmp_path).returncode == 1
    assert (tmp_path / "starts").read_text() == "x"
    (tmp_path / "train.py").write_text("import os\nopen('starts', 'a').write('y')\nos.kill(os.getpid(), 9)\n")
    asked = run([SHARDWISE, "run", "--restarts", "1", "--devices", "1", "train.py"], tmp_path)
    assert asked.returncode == 1 and "train.restarts.crashes = 1" in asked.stderr
    assert (tmp_path / "starts").read_text() == "xyy"


def test_a_term_to_the_command_saves_and_leaves_with_75_and_begins_nothing(tmp_path: Path) -> None:
    command = recipe(tmp_path, steps=5000, devices=2)
    process = start(command, tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 4: saved" in line:
            break
    assert listens(local.tree_pids(process.pid)) == {"127.0.0.1"}
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, err
    assert "attempt 2" not in err and [one.cause for one in ends(tmp_path)] == ["preempted"]
    newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert newest == last_json(out)["step"] > 4


def test_checkpoints_that_are_damaged_or_cannot_be_read_are_named_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = recipe(tmp_path, steps=12, devices=1)
    assert run(command, tmp_path).returncode == 0
    oldest, middle, newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    held = middle / "rank-00000.safetensors"
    held.unlink()
    held.symlink_to(held.name)  # nobody can open it, root too
    raw = bytearray((newest / held.name).read_bytes())
    raw[-9] ^= 1
    (newest / held.name).write_bytes(raw)
    done = run([*command, "--set", "train.steps=14", "--set", "checkpoint.retries=0"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{newest.name} was passed over" in done.stderr and f"{middle.name} was passed over" in done.stderr
    assert [Path(event.path).name for event in told(tmp_path) if isinstance(event, Resumed)] == [oldest.name]
    once = run([SHARDWISE, "checkpoints", "ledger", "run"], tmp_path)
    assert once.returncode == 0, once.stdout + once.stderr


# Its average cannot be loaded as it was after step 8, and says so only when it is asked to.
FAILS_TO_LOAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shardwise as sw
class Average:
    steps = 0
    def state_dict(self): return {"steps": self.steps}
    def load_state_dict(self, state):
        if state["steps"] == 8: raise RuntimeError("an average of eight")
        self.steps = state["steps"]
x, average = torch.arange(256.0).reshape(64, 4) / 256, Average()
trainer = sw.Trainer(
    model=lambda: nn.Linear(4, 1), loss=lambda o, b: sw.Loss((o - b[1]).square().sum(), len(b[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), data=sw.Batches(TensorDataset(x, x.sum(1, True))),
    global_batch=8, run="run", checkpoint=sw.CheckpointPolicy(every_steps=4), state={"average": average})
for step in trainer.run(steps=int(__import__("os").environ["STEPS"])):
    average.steps = step.number
"""


@pytest.mark.nightly
def test_a_load_that_fails_three_times_is_given_up_for_the_checkpoint_before_within_the_budget(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_TO_LOAD)
    command = [SHARDWISE, "run", "--devices", "1", "train.py"]
    assert run(command, tmp_path, env={**os.environ, "STEPS": "8"}).returncode == 0
    done = run(command, tmp_path, env={**os.environ, "STEPS": "10"})
    assert done.returncode == 0, done.stderr
    assert (
        "an average of eight" in done.stderr
        and "crash 3 of 3" in done.stderr
        and "3 attempts failed from it" in done.stderr
    )
    assert [event.step for event in told(tmp_path) if isinstance(event, Resumed)] == [4]
