"""A slow disk for one command: the same bytes, late while it is slow and only then, and nobody waits for the dead."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.verify import chaos_disk
from shardwise.verify.chaos_disk import SYNC_SECONDS, SlowDisk

# It writes and syncs a file when it is told to, and says how long both took; what it starts does the same.
WRITES = """
import os, sys, time
path, size = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
while sys.stdin.readline():
    began = time.monotonic()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(handle, b"x" * size, 0)
    os.fsync(handle)
    os.close(handle)
    print(time.monotonic() - began, flush=True)
"""
BYTES = 2**20
# What a slow disk takes for one round at least; a machine that is busy only adds to it.
SLOW = SYNC_SECONDS + BYTES / chaos_disk.BYTES_PER_SECOND


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    if reason := chaos_disk.why_not():
        pytest.skip(reason)
    with SlowDisk() as made:
        yield made


def start(disk: SlowDisk, path: Path) -> "subprocess.Popen[str]":
    """Below a shell, as ranks are below a launcher."""
    line = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-S", "-c", WRITES, str(path), str(BYTES)]
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=disk.begin, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ask(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def took(process: "subprocess.Popen[str]") -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def test_what_waits_for_the_disk_is_late_while_it_is_slow_and_only_then(disk: SlowDisk, tmp_path: Path) -> None:
    with start(disk, tmp_path / "file") as process:
        ask(process)
        took(process)
        assert disk.delayed == 0
        disk.slow(600.0)
        ask(process)
        assert took(process) >= SLOW and disk.delayed == 2
        disk.slow(0.0)
        ask(process)
        took(process)
        assert disk.delayed == 2 and (tmp_path / "file").read_bytes() == b"x" * BYTES
        process.communicate()


def test_who_is_killed_while_it_waits_is_gone_and_others_go_on(disk: SlowDisk, tmp_path: Path) -> None:
    with start(disk, tmp_path / "one") as one, start(disk, tmp_path / "other") as other:
        disk.slow(600.0)
        ask(one)
        ask(other)
        os.killpg(one.pid, signal.SIGKILL)
        assert one.wait(30) == -signal.SIGKILL
        assert took(other) >= SLOW
        other.communicate()


def test_a_machine_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_disk.platform, "machine", lambda: "toaster")
    assert "toaster" in chaos_disk.why_not()
