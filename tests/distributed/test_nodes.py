"""The meeting of a run's nodes in real processes: on loopback, and on two hosts whose link is cut."""

import contextlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.inputs.recipe import TrainSpec
from shardwise.launch import address, local, watch
from shardwise.launch.outcome import first_failure
from tests.distributed import listening
from tests.distributed.two_hosts import ADDRESSES, cut, two_hosts

LIMIT_SECONDS = 60
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a side of the meeting, in a network namespace where one is named; all end with the test."""
    with contextlib.ExitStack() as started:

        def begin(*words: object, within: str = "") -> "subprocess.Popen[str]":
            inside = ["ip", "netns", "exec", within] if within else []
            command = [*inside, sys.executable, "-m", "tests.distributed.meeting_process", *map(str, words)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield begin


def line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next thing that a process says; a test's own limit ends one that says nothing."""
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


def test_two_nodes_meet_get_their_parts_and_end_together(start: Start, tmp_path: Path) -> None:
    host = start("host", "127.0.0.1", 0, tmp_path, 1)
    where = line(host)["listens"]
    first = start("guest", *where, tmp_path, "a!")
    second = start("guest", *where, tmp_path, "b!")
    parts = sorted(line(one)["begin"] for one in (first, second))
    assert parts == [[0, 2, 0, 2, 4, '{"a":1}'], [1, 2, 2, 2, 4, '{"a":1}']]
    assert [line(one)["over"] for one in (first, second)] == ["done", "done"]
    assert [one.wait(LIMIT_SECONDS) for one in (first, second, host)] == [0, 0, 0]


def test_who_does_not_see_the_folder_is_refused_and_strangers_harm_nobody(start: Start, tmp_path: Path) -> None:
    host = start("host", "127.0.0.1", 0, tmp_path, 1)
    where = line(host)["listens"]
    with socket.create_connection(where) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(LIMIT_SECONDS)
        assert json.loads(stranger.makefile().readline())["says"] == "challenge"
        other = tmp_path / "other"
        other.mkdir()
        apart = start("guest", *where, other, "c")
        assert "run folder" in line(apart)["refused"]
        assert apart.wait(LIMIT_SECONDS) == 2
        guests = [start("guest", *where, tmp_path, f"{name}!") for name in "ab"]
        assert [one.wait(LIMIT_SECONDS) for one in (*guests, host)] == [0, 0, 0]


def test_a_stopped_node_is_given_up_and_a_stopped_host_ends_its_nodes_with_75(start: Start, tmp_path: Path) -> None:
    host = start("host", "127.0.0.1", 0, tmp_path, 2)
    where = line(host)["listens"]
    guests = [start("guest", *where, tmp_path, name) for name in "ab"]
    for one in guests:
        assert "begin" in line(one)
    os.kill(guests[1].pid, signal.SIGSTOP)
    told = line(host)
    assert (told["lost"], told["then"]) == ("b", "Restart")
    os.kill(host.pid, signal.SIGSTOP)
    assert "nothing was heard" in line(guests[0])["over"]
    assert guests[0].wait(LIMIT_SECONDS) == 75


# Every rank says what all ranks together know, and where it and its launcher listen; where it is told to, the last one
# raises.
RANKS = (
    inspect.getsource(listening)
    + """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
told = torch.tensor([10 ** dist.get_rank()])
dist.all_reduce(told)
print(dist.get_rank(), told.item(), *sorted(listens([os.getpid(), os.getppid()])), flush=True)
dist.barrier()
if len(sys.argv) > 1 and dist.get_rank() == dist.get_world_size() - 1:
    raise ValueError("planted")
dist.barrier()
"""
)
# Of the loopback interface, and not its first: what listens by default listens elsewhere.
MEETS = "127.0.0.2"


def jobs(folder: Path, *arguments: str, ranks: int = 2) -> list[local.Job]:
    """Two nodes on loopback, each with logs of its own."""
    (folder / "ranks.py").write_text(RANKS)
    port = address.free_port(MEETS)
    command = (str(folder / "ranks.py"), *arguments)
    return [
        local.Job(
            ranks=ranks, command=command, logs=str(folder / f"node-{node}"),
            place=local.Place(node, 2, MEETS, port, address.interface_of("127.0.0.1")),
        )
        for node in range(2)
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_of_two_nodes_are_one_group(tmp_path: Path, ranks: int) -> None:
    made = jobs(tmp_path, ranks=ranks)
    started = [local.start(job) for job in made]
    assert [one.wait(LIMIT_SECONDS) for one in started] == [0, 0]
    for job in made:
        folders = watch.rank_folders(Path(job.logs), job.first_rank)
        said = {rank: (folder / "stdout.log").read_text().split()[:2] for rank, folder in folders.items()}
        everyone = str(sum(10**rank for rank in range(job.world)))
        assert said == {rank: [str(rank), everyone] for rank in range(job.first_rank, job.first_rank + ranks)}


def where_listens(job: local.Job) -> set[str]:
    """What the ranks of a job said of themselves and their launcher."""
    folders = watch.rank_folders(Path(job.logs), job.first_rank)
    return {number for folder in folders.values() for number in (folder / "stdout.log").read_text().split()[2:]}


def test_ranks_meet_at_the_address_that_is_told_and_one_that_raises_is_named_with_its_number_among_all(
    tmp_path: Path,
) -> None:
    made = jobs(tmp_path, "raise")
    started = [local.start(job) for job in made]
    ended = [watch.Ended(one.wait(LIMIT_SECONDS), None, False) for one in started]
    failures = [
        first_failure(
            [], watch.exits(Path(job.logs), job.world, end, one.pid), watch.rank_logs(Path(job.logs), job.first_rank)
        )
        for job, one, end in zip(made, started, ended, strict=True)
    ]
    assert failures[1] is not None
    assert (failures[1].rank, failures[1].error) == (3, "ValueError: planted")
    assert failures[0] is None or failures[0].rank in (0, 1)
    # gloo listens at the interface's own address.
    assert [where_listens(job) for job in made] == [{MEETS, "127.0.0.1"}, {"127.0.0.1"}]


def test_an_address_has_the_interface_that_has_it() -> None:
    assert address.interface_of("127.0.0.1") == "lo"
    assert address.interface_of("203.0.113.9") == ""  # RFC 5737: nobody has it


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


def test_a_cut_link_ends_the_node_that_is_cut_off_before_the_host_gives_it_up(
    start: Start, hosts: tuple[str, str], tmp_path: Path
) -> None:
    here, there = hosts
    host = start("host", ADDRESSES[0], 0, tmp_path, 1, within=here)
    where = line(host)["listens"]
    stays = start("guest", *where, tmp_path, "a", within=here)
    leaves = start("guest", *where, tmp_path, "b", within=there)
    for one in (stays, leaves):
        assert "begin" in line(one)
    cut(there)
    alone, lost = line(leaves), line(host)
    assert "nothing was heard" in alone["over"] and leaves.wait(LIMIT_SECONDS) == 75
    assert (lost["lost"], lost["then"]) == ("b", "Restart")
    # The last beats of the two may lie a beat apart, on one clock of the machine.
    assert lost["at"] - alone["at"] >= TrainSpec().lost_seconds / 2 - 5.0
    assert line(stays)["over"] == "done" and stays.wait(LIMIT_SECONDS) == 0
