"""A process killed at any operation of a save leaves the old checkpoint or the new one, whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpointer, LocalStore
from shardwise.events import Events
from shardwise.inputs.recipe import CheckpointPolicy
from tests.unit.test_checkpoint_store import FaultyStore

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("how", ["waited for", "in the background"])
def test_a_save_killed_at_any_operation_leaves_a_whole_checkpoint(how: str, tmp_path: Path) -> None:
    # A process of its own forks once for each operation: torch is imported once.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, str(tmp_path), how],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = [int(step) for step in done.stdout.split()]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 12


def main(root: Path, how: str) -> None:
    """Prints the step that is resumed after a kill at the first operation, the second, and so on."""
    at, finished = 0, False
    while not finished:
        at += 1
        run = root / str(at)
        training(run, 1).save(1)
        finished = killed_save(run, at, how) == 0
        print(resumed(run), flush=True)


def training(run: Path, value: int, at: int = 0) -> Checkpointer:
    """A training whose every weight and moment is `value`, over a store that kills at operation `at`."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
    for tensor in [*module.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]:
        tensor.detach().fill_(value)
    store = FaultyStore(LocalStore(run / "checkpoints"), at, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    policy = CheckpointPolicy(every_steps=1, keep=1)
    return Checkpointer(run, module, optimizer, state={"value": value}, store=store, policy=policy, events=Events())


def killed_save(run: Path, at: int, how: str) -> int:
    """The exit status of a process that saves step 2 and is killed at operation `at`; 0 if it lived."""
    child = os.fork()
    if child == 0:
        try:
            save(training(run, 2, at), how)
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(status)
    return status


def save(checkpointer: Checkpointer, how: str) -> None:
    """Step 2; in the background, training changes every value while it is written."""
    if how == "waited for":
        checkpointer.save(2)
        return
    checkpointer.begin(2)
    for tensor in everything(checkpointer):
        tensor.detach().fill_(5)
    checkpointer.settle()


def resumed(run: Path) -> int:
    """The step that is resumed, once its state is seen to be of that step throughout, and saving goes on."""
    checkpointer = training(run, 7)
    step = checkpointer.resume()
    found = torch.cat([tensor.reshape(-1) for tensor in everything(checkpointer)])
    if not bool((found == step).all()) or checkpointer.state["value"] != step or checkpointer.skipped:
        raise SystemExit(f"step {step} holds {found} and skipped {checkpointer.skipped}")
    checkpointer.save(3)
    folders = list((run / "checkpoints").iterdir())
    if training(run, 7).resume() != 3 or len(folders) != 1:
        raise SystemExit(f"after step {step} the next save left {folders}")
    return step


def everything(checkpointer: Checkpointer) -> list[torch.Tensor]:
    subject = checkpointer._shared.subject
    moments = [state["momentum_buffer"] for state in subject.optimizers[""].state.values()]
    return [*subject.modules[""].parameters(), *moments]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
