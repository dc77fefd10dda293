"""What each kind of fault does to a run: signals, limits, bytes in files, and what stands between it and its stores."""

import os
import resource
import signal
from pathlib import Path
from typing import NamedTuple

from shardwise.launch import local
from shardwise.verify.chaos_disk import SlowDisk
from shardwise.verify.chaos_store import BadStore
from shardwise.verify.chaos_watch import committed
from shardwise.verify.faults import DAMAGE, PLANTED, Fault

# A file that a rank may still write once its disk is full: its logs and events go on elsewhere.
FULL_DISK_BYTES = 4096
# How long a disk stays full, until somebody makes room; how long it is slow, and a store bad: well within the half
# minute for which a store's requests are tried again.
FULL_DISK_SECONDS, SLOW_DISK_SECONDS, STORE_SECONDS = 3.0, 5.0, 5.0


class Around(NamedTuple):
    """What stands between a run and what it writes to: None where nothing does."""

    disk: SlowDisk | None = None
    store: BadStore | None = None


def befall(fault: Fault, command: int, folder: Path, around: Around) -> bool:
    """Let the fault come; False where what it needs is not there."""
    if fault.kind == "slow disk" and around.disk is not None:
        around.disk.slow(SLOW_DISK_SECONDS)
        return True
    if fault.kind == "store errors" and around.store is not None:
        around.store.harm(STORE_SECONDS, fault.draw)
        return True
    rank = chosen(fault, command) if ranks_below(command) else None
    below = local.tree_pids(command)[1:]
    if fault.kind in DAMAGE:
        return rank is not None and _damage(fault, folder) and _kill(rank, signal.SIGKILL)
    if fault.kind == "full disk":
        return rank is not None and _fill(rank)
    if fault.kind in PLANTED:
        return False
    target, number = {
        "kill rank": (rank, signal.SIGKILL),
        "stop rank": (rank, signal.SIGSTOP),
        "terminate rank": (rank, signal.SIGTERM),
        "kill launcher": (below[0] if below else None, signal.SIGKILL),
        "kill command": (command, signal.SIGKILL),
        "terminate command": (command, signal.SIGTERM),
        "interrupt command": (command, signal.SIGINT),
    }[fault.kind]
    return target is not None and _kill(target, number)


def _kill(pid: int, number: int) -> bool:
    os.kill(pid, number)
    return True


def chosen(fault: Fault, command: int) -> int:
    """The process of the rank that this fault is for."""
    workers = ranks_below(command)
    return workers[int(fault.draw * len(workers))]


def make_room(rank: int) -> None:
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _fill(rank: int) -> bool:
    """The kernel refuses this rank's files beyond a few KiB, as a full disk does."""
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.RLIM_INFINITY))
    return True


def _damage(fault: Fault, folder: Path) -> bool:
    """In a file of the newest committed checkpoint: one bit is another, or its end is gone."""
    found = committed(folder)
    if len(found) < 2:
        return False  # Of a single checkpoint nothing could be gone back to: that is an error by design.
    files = sorted(path for path in found[-1].iterdir() if path.is_file())
    path = files[int(fault.draw * len(files))]
    size = path.stat().st_size
    at = int((fault.draw * 7919) % 1 * size)
    with path.open("r+b") as file:
        if fault.kind == "truncate file":
            file.truncate(at)
            return True
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << int(fault.draw * 8))
        file.seek(at)
        file.write(bytes([byte]))
    return True


def ranks_below(command: int) -> list[int]:
    """The ranks' processes below the command, lowest process first; not the watcher that the first one starts, nor a
    launcher that has started none yet.
    """
    below = local.tree_pids(command)[1:]
    for pid in below:  # parents first: the launcher comes before its ranks
        if found := [one for one in local.worker_pids(pid) if one != pid]:
            return sorted(found) if _is_launcher(pid) else [pid]
    return [] if below and _is_launcher(below[0]) else below[:1]


def _is_launcher(pid: int) -> bool:
    return "shardwise.torchrun" in _command_of(pid)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs still; one that waits for its parent to take note of its end does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
