"""Hangs of real ranks: who is named, what is told, and that nothing is left of them."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.events.reader import read
from shardwise.events.values import Hung
from shardwise.launch import hang, local, processes
from tests.distributed.test_command import last_json, recipe, start, wait_for

LIMIT = 120
HANG_SECONDS = 2.0
# A loop of the user's own, in plain torchrun; rank 1 meets a fault in its step 6. `child` outlives its parent.
LOOP = """
import ctypes, os, signal, subprocess, sys, time
import torch, torch.distributed as dist
import shardwise as sw
fault = sys.argv[1]
dist.init_process_group("gloo")
def meet():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.write(1, b"CHILD %d\\n" % child.pid)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "loop":
        while True: pass
    if fault == "gil":
        lock, library = (ctypes.c_char * 64)(), ctypes.PyDLL(None)
        library.pthread_mutex_lock(lock); library.pthread_mutex_lock(lock)
with sw.Watchdog("run", hang_seconds=2.0) as watchdog:
    for step in range(1, 10000):
        watchdog.step(step)
        if step == 6 and dist.get_rank() == 1:
            meet()
        dist.all_reduce(torch.ones(4))
"""


def torchrun(folder: Path, ranks: int, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}", *arguments,
    ]  # fmt: skip


def told(folder: Path) -> hang.Hang:
    found = hang.found(next((folder / "run" / "hangs").glob("attempt-*")))
    assert found is not None
    return found


def gone(pids: list[int]) -> bool:
    """Waits until none of them is alive, up to the bound that is promised."""
    deadline = time.monotonic() + 30
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)  # readable once the process has ended
            try:
                if not select.select([ended], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return False
            finally:
                os.close(ended)
    return True


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("stopped", "is stopped"),
        ("loop", "outside of any collective, at loop.py:13 in meet"),
        ("gil", "native code holds the GIL, at loop.py:16 in meet"),
    ],
)
def test_the_stuck_rank_of_a_plain_loop_is_named_and_all_are_ended(tmp_path: Path, fault: str, why: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = torchrun(tmp_path, 3, "loop.py", fault)
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False
    )
    found = told(tmp_path)
    assert ended.returncode != 0
    assert (found.rank, found.stuck, found.step, found.phase) == (1, (1,), 6, "step"), found
    assert why in found.why
    assert found.since_seconds <= 2 * HANG_SECONDS  # the clock of a watcher that gets no processor stands still
    assert hang.text(found).splitlines()[0] in ended.stderr
    for rank in (0, 2):
        said = Path(found.folder, f"rank-{rank}.txt").read_text()
        assert "in all_reduce" in said and "gloo:all_reduce (scheduled)" in said
    child = int(ended.stdout.split("CHILD ")[1].split()[0])
    assert gone([child, *(seen.pid for seen in found.ranks)])
    assert not found.left


def heard_of(path: Path) -> None:
    """Waits until a node has told how it is some times, so that the others have seen it speak."""
    deadline, count = time.monotonic() + LIMIT, 0
    while count < 20:
        assert time.monotonic() < deadline, f"{path} does not grow older"
        with contextlib.suppress(OSError, ValueError):
            count = json.loads(path.read_text())["view"]["count"]
        threading.Event().wait(0.05)  # no processor for this: the node's own watcher needs it


def test_a_node_that_falls_silent_is_lost_and_the_others_end(tmp_path: Path) -> None:
    """Two agents of torchrun are two nodes; one of them is stopped with all that is below it, sockets left open."""
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                "--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1", "--nproc-per-node=1",
                "loop.py", "none",
            ],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    silent: list[int] = []
    try:
        assert agents[1].stdout is not None
        assert any("CHILD" in line for line in agents[1].stdout)  # rank 1 is in its step 6
        for node in (0, 1):
            heard_of(tmp_path / "run" / "hangs" / "nodes" / f"node-0000{node}.json")
        silent = processes.tree([agents[1].pid])
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        agents[0].communicate(timeout=LIMIT)
        found = told(tmp_path)
        assert (found.stuck, found.state) == ((1,), "lost"), found
        assert "has not been heard of" in found.why
        assert gone([seen.pid for seen in found.ranks if seen.rank == 0])
    finally:
        for pid in silent:
            os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_checkpoints_signals_and_watchdog_alone_in_a_plain_loop(tmp_path: Path) -> None:
    example = str(Path(__file__).resolve().parents[2] / "examples" / "plain_loop.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = [
        subprocess.run(
            torchrun(tmp_path, 2, example), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
            env=environment, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    assert "begun after step 0" in said[0] and "begun after step 40" in said[1]
    assert not (tmp_path / "runs" / "plain" / "hangs").exists()


def pids(folder: Path) -> list[int]:
    found: list[int] = json.loads((folder / "run" / "events" / "attempt-001.jsonl").read_text().splitlines()[0])["pids"]
    return found


def hung_recipe(folder: Path, **more: Any) -> list[str]:
    command = recipe(folder, steps=5000, **more)
    return [*command, "--set", f"train.hang_seconds={HANG_SECONDS}", "--set", "train.restarts.hangs=0"]


def test_a_stopped_rank_of_a_run_is_told_by_the_command_and_by_the_events(tmp_path: Path) -> None:
    process = start(hung_recipe(tmp_path), tmp_path)
    wait_for(process, "step 4: saved")
    ranks = pids(tmp_path)
    os.kill(ranks[1], signal.SIGSTOP)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, err
    assert "Rank 1 on" in err and "is stopped" in err and "Traceback" not in err
    assert err.count("has made no progress") == 1, err
    hung = [event for event in read(tmp_path / "run" / "events" / "attempt-001.jsonl") if isinstance(event, Hung)]
    assert [(one.rank, one.state) for one in hung] == [(1, "stopped")]
    assert last_json(out)["finished"] is False
    assert gone(ranks)


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_launcher_that_is_stopped_before_any_rank_is_there_is_told_and_ended(tmp_path: Path) -> None:
    """Nobody watches yet: found by `shardwise dev chaos`, which stopped one while a run was resumed."""
    process = start(hung_recipe(tmp_path), tmp_path)
    until = time.monotonic() + LIMIT
    while not (below := [pid for pid in local.tree_pids(process.pid)[1:] if b"torchrun" in command_line(pid)]):
        assert time.monotonic() < until and process.poll() is None
    os.kill(below[0], signal.SIGSTOP)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1, err
    assert "its launcher, process" in err and "is stopped" in err and f"kill -CONT {below[0]}" in err
    assert gone(below)


SLOW = """
import time, torch
from torch import nn
from torch.utils.data import TensorDataset
import shardwise as sw
def slow(outputs, batch):
    if not outputs.requires_grad:
        end = time.monotonic() + 0.5
        while time.monotonic() < end: pass
    return sw.Loss((outputs - batch[1]).square().sum(), len(batch[1]))
x = torch.randn(16, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = sw.Trainer(
    model=lambda: nn.Linear(4, 1), loss=slow, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.01),
    data=sw.Batches(data), valid=sw.Batches(data), global_batch=2, micro_batch=2, run="run", hang_seconds=1.0)
for step in trainer.run(steps=6):
    if step.number == 4:
        print("evaluated", trainer.evaluate().count)
        end = time.monotonic() + 2.0
        while time.monotonic() < end: pass
"""


def test_what_is_slow_and_goes_on_is_left_alone(tmp_path: Path) -> None:
    """An evaluation of 4 s and a pass through the loop's body of 2 s, under a bound of 1 s."""
    (tmp_path / "train.py").write_text(SLOW)
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "evaluated 16" in ended.stdout
    assert not (tmp_path / "run" / "hangs").exists()


WORKER = """
import os, time, torch
from torch import nn
import shardwise as sw
class Data(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        if index > 60:
            print("WORKER", os.getpid(), flush=True)
            while True: time.sleep(1)
        x = torch.full((4,), float(index))
        return x, x.sum().reshape(1)
trainer = sw.Trainer(model=lambda: nn.Linear(4, 1), loss=lambda o, b: sw.Loss((o - b[1]).square().sum(), len(b[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), 1e-9),
    data=sw.Batches(Data(), workers=1, shuffle=False), global_batch=2, run="run", hang_seconds=1.0)
for step in trainer.run(steps=400): pass
"""


def test_a_data_worker_that_hangs_is_told_with_its_own_stack_and_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    found = told(tmp_path)
    assert (found.rank, found.phase) == (0, "data"), ended.stderr
    said = Path(found.folder, "rank-0.txt").read_text()
    assert "below rank 0" in said and "in __getitem__" in said
    worker = int(ended.stdout.split("WORKER ")[1].split()[0])
    assert gone([worker, found.ranks[0].pid])


@pytest.mark.parametrize("victims", ["command", "command and torchrun"])
def test_nothing_is_left_of_a_run_whose_launcher_is_killed(tmp_path: Path, victims: str) -> None:
    asked = ["--set", "checkpoint.notice_seconds=2"]  # without torchrun nothing can be saved: its store is gone
    process = start([*recipe(tmp_path, steps=100000), *asked], tmp_path)
    wait_for(process, "step 4: saved")
    everything = processes.tree([process.pid])[1:]
    ranks = pids(tmp_path)
    torchrun = processes.stat(ranks[0])
    assert set(ranks) < set(everything) and torchrun is not None
    os.kill(process.pid, signal.SIGKILL)
    if victims != "command":
        os.kill(torchrun.parent, signal.SIGKILL)
    process.communicate(timeout=LIMIT)
    assert gone(everything)
