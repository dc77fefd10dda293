"""`shardwise train --nodes` on two hosts, which are network namespaces: who comes, who is cut off, what is lost."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.events.reader import read
from shardwise.events.values import RunStarted
from shardwise.launch.address import free_port
from shardwise.launch.meeting import ENDED_SECONDS
from shardwise.launch.run_folder import events_path
from tests.distributed.test_attempts import LIMIT, ends, pids_of
from tests.distributed.test_command import SHARDWISE, last_json, recipe, run, start, wait_for
from tests.distributed.two_hosts import ADDRESSES, cut, join, two_hosts

LOST_SECONDS = 10.0


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


def node(folder: Path, nodes: str, name: str, host: str = "", port: int = 29400) -> "subprocess.Popen[str]":
    """The command on one node: the same on all but for its name."""
    where = ADDRESSES[0] if host else "127.0.0.1"
    command = [SHARDWISE, "train", "recipe.toml", "--nodes", nodes, "--rendezvous", f"{where}:{port}"]
    command += ["--set", "checkpoint.every_steps=10", "--set", f"train.lost_seconds={LOST_SECONDS}"]
    inside = ["ip", "netns", "exec", host] if host else []
    return start([*inside, *command, "--node-name", name], folder)


def worlds(folder: Path, attempts: int) -> list[int]:
    told = [event for number in range(1, attempts + 1) for event in read(events_path(folder / "run", number))]
    return [len(event.pids) for event in told if isinstance(event, RunStarted)]


def require_each_sample_once(folder: Path) -> None:
    told = run([SHARDWISE, "checkpoints", "ledger", "run"], folder)
    assert told.returncode == 0, told.stdout + told.stderr


def test_a_node_comes_later_and_is_cut_off_in_mid_step_and_the_other_goes_on_to_the_end(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    recipe(tmp_path, steps=150, devices=1)
    cut(hosts[1])
    with node(tmp_path, "1:2", "a", hosts[0]) as stays, node(tmp_path, "1:2", "b", hosts[1]) as leaves:
        err = wait_for(stays, "step 10: saved")
        join(hosts[1])
        err += wait_for(stays, "attempt 2 begins") + wait_for(stays, ": saved")
        cut(hosts[1])
        _, told = leaves.communicate(timeout=LIMIT)
        assert leaves.returncode == 75, told
        assert "nothing was heard of the host" in told
        out, rest = stays.communicate(timeout=LIMIT)
    assert stays.returncode == 0, err + rest
    came, lost, done = ends(tmp_path)
    assert (came.cause, came.world, lost.cause, lost.world, done.cause) == ("preempted", 2, "lost", 1, "done")
    assert "b came" in came.error and "lost: b" in lost.error and "not counted" in lost.then
    assert worlds(tmp_path, 3) == [1, 2, 1] and last_json(out)["step"] == 150
    require_each_sample_once(tmp_path)


def test_where_the_host_is_cut_off_all_nodes_end_in_the_bound_and_go_back_into_the_queue(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    recipe(tmp_path, steps=5000, devices=1)
    with node(tmp_path, "2", "a", hosts[0]) as host, node(tmp_path, "2", "b", hosts[1]) as other:
        wait_for(host, "step 10: saved")
        cut(hosts[0])
        began = time.monotonic()
        _, told = other.communicate(timeout=LIMIT)
        other_took = time.monotonic() - began
        _, err = host.communicate(timeout=LIMIT)
        took = time.monotonic() - began
    assert (host.returncode, other.returncode) == (75, 75), err + told
    assert "1 node left, and --nodes asks for at least 2" in err
    assert other_took < LOST_SECONDS / 2 + ENDED_SECONDS and took < LOST_SECONDS + ENDED_SECONDS
    require_each_sample_once(tmp_path)


@pytest.mark.nightly
def test_a_device_of_one_node_that_fails_twice_is_left_out_and_every_node_gives_a_rank_less(tmp_path: Path) -> None:
    recipe(tmp_path, steps=60, devices='"1:2"')
    port = free_port("127.0.0.1")
    with node(tmp_path, "2", "a", port=port) as host, node(tmp_path, "2", "b", port=port) as other:
        for attempt in (1, 2):
            wait_for(host, ": saved")
            os.kill(pids_of(tmp_path, attempt)[3], signal.SIGKILL)
        out, err = host.communicate(timeout=LIMIT)
        other.communicate(timeout=LIMIT)
    assert (host.returncode, other.returncode) == (0, 0), err
    assert [(end.cause, end.world) for end in ends(tmp_path)] == [("lost", 4), ("lost", 2), ("done", None)]
    assert worlds(tmp_path, 3) == [4, 4, 2] and last_json(out)["step"] == 60
    require_each_sample_once(tmp_path)


@pytest.mark.nightly
def test_a_node_that_is_told_to_stop_saves_and_the_other_goes_on(tmp_path: Path) -> None:
    recipe(tmp_path, steps=5000, devices=1)
    port = free_port("127.0.0.1")
    with node(tmp_path, "1:2", "a", port=port) as stays:
        assert "waiting for 1 to 2 nodes" in wait_for(stays, "holds the meeting")
        with node(tmp_path, "1:2", "b", port=port) as leaves:
            wait_for(stays, "step 10: saved")
            leaves.terminate()
            assert leaves.wait(LIMIT) == 75
        err = wait_for(stays, "attempt 2 begins") + wait_for(stays, ": saved")
        stays.terminate()
        _, rest = stays.communicate(timeout=LIMIT)
    assert stays.returncode == 75, err + rest
    told, last = ends(tmp_path)
    assert (told.cause, told.world, told.lost_steps, last.cause) == ("preempted", 1, 0, "preempted")
    assert "b was told to stop" in told.error and worlds(tmp_path, 2) == [2, 1]
    require_each_sample_once(tmp_path)
