"""A stop that comes in another phase than a step: it is agreed, kept short, and nothing is lost."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.events.reader import read
from shardwise.events.values import FlushLate, Saved, Stopped
from tests.distributed.pool import Pool

WORK = "tests.distributed.stopping_work"


@pytest.mark.parametrize("in_body", [False, True], ids=["by the run", "in the loop's body"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_cuts_an_evaluation_short_and_loses_nothing(
    pool: Pool, tmp_path: Path, number: int, code: int, in_body: bool
) -> None:
    folder = str(tmp_path / "a")
    results = pool.run(3, f"{WORK}:cut_in_evaluation", folder=folder, number=int(number), in_body=in_body)
    for one in results:
        assert (one["code"], one["seen"], one["number"], one["saved"]) == (code, [1, 2, 3], 3, 1)
        # Each rank has 32 of the 96, two or three of a global batch: what it is at, and what answers one batch later.
        assert 2 <= one["read"] <= 9
    resumed = pool.run(3, f"{WORK}:to_the_end", folder=folder)
    whole = pool.run(3, f"{WORK}:to_the_end", folder=str(tmp_path / "b"))
    assert [one["seen"] for one in resumed] == [[4, 5, 6]] * 3
    assert [one["digest"] for one in resumed] == [one["digest"] for one in whole]


@pytest.mark.parametrize("trained", [0, 2])
def test_a_signal_while_a_run_is_opened_ends_it_and_saves_nothing_again(
    pool: Pool, tmp_path: Path, trained: int
) -> None:
    results = pool.run(3, f"{WORK}:told_before_the_first_step", folder=str(tmp_path / "run"), trained=trained)
    expected = {"code": 75, "seen": [], "number": trained, "saved": 1 if trained else 0}
    assert results == [expected] * 3


SCRIPT = """
import sys
import torch
import shardwise as sw

class Slow(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        if "trainer" in globals() and trainer.opened and trainer.number + 1 == {stuck}:
            Slow.calls += 1
            if Slow.calls == 4 // {micro}:
                print("stuck", flush=True)
                sys.stdin.readline()
        return super().forward(x)

x = torch.arange(16.0).reshape(16, 1)
trainer = sw.Trainer(
    model=lambda: Slow(1, 1),
    loss=lambda outputs, batch: sw.Loss((outputs - batch[1]).square().sum(), len(batch[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-4),
    data=sw.Batches(torch.utils.data.TensorDataset(x, 2 * x), workers={workers}),
    global_batch=4, micro_batch={micro}, run="run",
    checkpoint=sw.CheckpointPolicy(every_steps=0, notice_seconds=0.4),
)
for step in trainer.run(steps=6):
    pass
"""
LIMIT_SECONDS = 60


@contextlib.contextmanager
def started(folder: Path, stuck: int, workers: int = 0, micro: int = 4) -> "Iterator[subprocess.Popen[str]]":
    """A run that waits for a line inside the forward of its step `stuck`, of its last micro-batch."""
    (folder / "train.py").write_text(SCRIPT.format(stuck=stuck, workers=workers, micro=micro))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "train.py"]
    with subprocess.Popen(command, cwd=folder, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert any(line == "stuck\n" for line in process.stdout)
        yield process


def told(folder: Path) -> list[object]:
    return list(read(folder / "run" / "events" / "attempt-001.jsonl"))


def test_where_nothing_is_new_a_stop_does_not_wait_for_the_step(tmp_path: Path) -> None:
    """As in a compilation: the forward never returns, and the process ends within its notice."""
    with started(tmp_path, 1) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) == 75
    (stopped,) = [event for event in told(tmp_path) if isinstance(event, Stopped)]
    assert (stopped.step, stopped.exit_code) == (0, 75)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_save_that_comes_too_late_for_its_notice_is_told_and_still_made(tmp_path: Path) -> None:
    with started(tmp_path, 3) as process:
        process.send_signal(signal.SIGUSR1)
        while not (late := [event for event in told(tmp_path) if isinstance(event, FlushLate)]):
            assert process.poll() is None
        process.communicate("go on\n", LIMIT_SECONDS)
        assert process.returncode == 75
    assert (late[0].step, late[0].saved_step) == (2, 0)
    saved = [event for event in told(tmp_path) if isinstance(event, Saved)]
    assert [one.step for one in saved] == [3]


@pytest.mark.parametrize("micro", [4, 1], ids=["in a step", "in its last of four micro-batches"])
def test_a_signal_to_the_whole_job_with_data_workers_alive_is_saved(tmp_path: Path, micro: int) -> None:
    """As a scheduler sends it: the workers get it too, and must not take with them the batch that a step waits for.

    What was accumulated is the step's, which is saved whole.
    """
    with started(tmp_path, 2, workers=2, micro=micro) as process:
        os.killpg(process.pid, signal.SIGTERM)
        # What is told after the notice shows that it came: the thread that sees signals may wait for its turn longer
        # than a step takes.
        while not any(isinstance(event, FlushLate) for event in told(tmp_path)):
            assert process.poll() is None
        process.communicate("go on\n", LIMIT_SECONDS)
        assert process.returncode == 75
    assert [event.step for event in told(tmp_path) if isinstance(event, Saved)] == [2]
