"""This machine: what it has, and how ranks are started on it.

`render` is pure: torchrun's command line, or plain Python for one rank. `probe_cluster` and `start` are thin.
"""

import ctypes
import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from shardwise.environment import JOB_LOGS, child_environment, usable_cpus, visible_devices
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import Cluster, MachineFacts, local_cluster, parse_cluster
from shardwise.launch.address import written

# A rank that died must not be waited for by others that cannot see it: torchrun's own default is 30 s.
SHUTDOWN_SECONDS = 10
LOOPBACK = "127.0.0.1"
# What a step frees, the next one takes again. glibc by its defaults gives it back to the kernel, which clears each page
# anew: 75,000 faults and 0.2 of 2.0 seconds in a step of a decoder of 11 million parameters (benchmarks/RESULTS.md).
# Blocks of 32 MiB, the most that glibc allows here, and larger ones still go back. Source: mallopt(3).
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
_PR_SET_PDEATHSIG = 1  # Source: prctl(2)
_LIBC = ctypes.CDLL(None)
QUERY = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]


class Place(msgspec.Struct, frozen=True):
    """Where a job's ranks stand among those of several nodes, each with as many.

    address, port: where the first node's torchrun holds the ranks' store and nowhere else, new for every attempt, 0 for
    any of a node that is alone; interface: of this node, by which the others are reached.
    """

    node_rank: int
    nodes: int
    address: str
    port: int
    interface: str


class Job(msgspec.Struct, frozen=True):
    """Ranks on this machine. `command` follows `python`: a script, or "-m" and a module, and arguments.

    shutdown_seconds: between a TERM from torchrun and its KILL, as long as a save may take. devices: names of the GPUs,
    one a rank; empty: as they are visible. tells: the file in which the Trainer says where its run lies. on_cpu: what a
    step makes lies in host memory. place: None where all ranks are on this machine. hang_seconds: a process of it that
    is stopped for so long is a hang; 0 is never.
    """

    ranks: int
    command: tuple[str, ...]
    logs: str
    cores: int = 1
    watched: bool = False
    shutdown_seconds: int = SHUTDOWN_SECONDS
    devices: tuple[str, ...] = ()
    tells: str = ""
    on_cpu: bool = False
    place: Place | None = None
    hang_seconds: float = 60.0

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.ranks if self.place is None else self.place.nodes * self.ranks

    @property
    def first_rank(self) -> int:
        return 0 if self.place is None else self.place.node_rank * self.ranks


def render(job: Job) -> list[str]:
    """The command line that starts the job's ranks.

    Raises: RecipeError where there is nothing to start.
    """
    if not job.command or job.ranks < 1:
        raise RecipeError("There is nothing to start.", fix="shardwise run train.py, with at least one device")
    if job.world == 1:
        return [sys.executable, *job.command]
    return [
        sys.executable,
        *("-m", "shardwise.torchrun"),
        *_rendezvous(job.place or Place(0, 1, LOOPBACK, 0, "lo")),
        f"--nproc-per-node={job.ranks}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--shutdown-timeout={job.shutdown_seconds}",
        f"--log-dir={job.logs}",
        "--redirects=3",
        *job.command,
    ]


def _rendezvous(place: Place) -> list[str]:
    """Who takes part is known beforehand, so nothing is agreed on (shardwise/torchrun.py)."""
    return [
        f"--nnodes={place.nodes}",
        "--rdzv-backend=shardwise",
        f"--rdzv-endpoint={written((place.address, place.port))}",
        f"--rdzv-conf=rank={place.node_rank}",
    ]


def variables(job: Job) -> dict[str, str]:
    """What the ranks' environment gets on top of this process's."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(job.devices)} if job.devices else {}
    tells = {"SHARDWISE_TELL_RUN": job.tells} if job.tells else {}
    return {"PYTHONUNBUFFERED": "1", "SHARDWISE_WATCHED": "1" if job.watched else "0", JOB_LOGS: mark_of(job),
            **visible, **tells}  # fmt: skip


def mark_of(job: Job) -> str:
    """The value of JOB_LOGS in the environment of everything that the job starts: where its logs lie."""
    return str(Path(job.logs).absolute())


def default_variables(job: Job) -> dict[str, str]:
    """What the ranks' environment gets where the user has not set it.

    Where all ranks are on this machine, loopback needs no name to be resolved and no other interface.
    """
    kept = KEPT_MEMORY if job.on_cpu else {}
    by = {"GLOO_SOCKET_IFNAME": "lo"}
    if job.place is not None:
        by = {"GLOO_SOCKET_IFNAME": job.place.interface, "NCCL_SOCKET_IFNAME": job.place.interface}
    return {"OMP_NUM_THREADS": str(max(1, job.cores // job.ranks)), **by, **kept}


def start(job: Job) -> "subprocess.Popen[bytes]":
    """Start the ranks in a session of their own, so that Ctrl-C reaches only this process.

    One rank's output goes where torchrun would put it; torchrun's own goes to launcher.log.
    """
    logs = Path(job.logs)
    logs.mkdir(parents=True, exist_ok=True)
    out = logs / "launcher.log"
    error = out
    if job.world == 1:
        rank = logs / "single" / "attempt_0" / "0"
        rank.mkdir(parents=True, exist_ok=True)
        out, error = rank / "stdout.log", rank / "stderr.log"
    with out.open("wb") as stdout, stdout if error == out else error.open("wb") as stderr:
        return subprocess.Popen(
            render(job),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=child_environment(variables(job), default_variables(job)),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """Ask the kernel for a TERM when the parent dies, even by KILL: no rank trains on unwatched."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def probe_cluster() -> Cluster:
    """This machine as a Cluster, from nvidia-smi, the affinity, the cgroup, /proc and torch's version."""
    return local_cluster(probe_facts())


def cluster_here(asked: str) -> Cluster:
    """This machine as a Cluster: "local", or as a file says that was measured on it.

    Raises: RecipeError where there is no such file, or it is of another machine.
    """
    here = probe_cluster()
    if asked == "local":
        return here
    said = parse_cluster(asked, here)
    if (said.nodes, said.node.devices, said.device.name) != (1, here.node.devices, here.device.name) or said.others:
        raise RecipeError(
            f"train.cluster = {asked!r} is of {said.devices} x {said.device.name}; here are {here.devices} x "
            f"{here.device.name}.",
            why="a run is planned for the machine that it runs on",
            fix='shardwise doctor --measure on this machine, or train.cluster = "local"',
        )
    return said


def probe_facts() -> MachineFacts:
    return MachineFacts(
        cpus=min(usable_cpus(), cgroup_cpus(_text("/sys/fs/cgroup/cpu.max")) or usable_cpus()),
        host_memory_bytes=host_memory_bytes(_text("/proc/meminfo"), _text("/sys/fs/cgroup/memory.max")),
        cpuinfo=_text("/proc/cpuinfo"),
        nvidia_smi=_nvidia_smi(),
        visible_devices=visible_devices(),
        torch_has_cuda=not (torch_version() or "+cpu").endswith("+cpu"),
    )


def torch_version() -> str | None:
    """The installed torch, without importing it; None where there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The installed versions of Shardwise and of what it stands on, without importing them."""
    found = {}
    for name in ("shardwise", "numpy", "msgspec", "safetensors", "xxhash"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cgroup_cpus(cpu_max: str) -> int | None:
    """Whole cores of a container's quota, at least one; None where there is no quota."""
    fields = cpu_max.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    return max(1, math.floor(int(fields[0]) / int(fields[1])))


def visible_names(devices: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the visible GPUs, in their order."""
    said = visible_devices()
    return said.split(",")[:devices] if said else [str(index) for index in range(devices)]


def kernel_kills() -> int:
    """How many processes the kernel has killed for memory in this container or machine; 0 where it does not say."""
    return parse_kernel_kills(_text("/sys/fs/cgroup/memory.events"))


def parse_kernel_kills(memory_events: str) -> int:
    counts = dict(line.split() for line in memory_events.splitlines() if len(line.split()) == 2)
    return int(counts.get("oom_kill", "0"))


def host_memory_bytes(meminfo: str, memory_max: str) -> int:
    """The machine's memory, or the container's where that is less."""
    total = next((int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:")), 0)
    limit = int(memory_max) if memory_max.strip().isdigit() else total
    return min(total, limit) or limit


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _nvidia_smi() -> str:
    if shutil.which(QUERY[0]) is None:
        return ""
    try:
        return subprocess.run(QUERY, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ""  # a driver that does not answer: `doctor` says that there is nvidia-smi and no GPU


def worker_pids(launcher: int) -> list[int]:
    """The ranks' processes below a launcher; the launcher itself where it is the only rank."""
    found = [pid for pid, parent in _parents().items() if parent == launcher and b"LOCAL_RANK=" in _environ(pid)]
    return found or [launcher]


def tree_pids(root: int) -> list[int]:
    """A process and all below it, parents first."""
    parents = _parents()
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def _parents() -> dict[int, int]:
    """The parent of every living process, from /proc."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            # After the name, which may hold spaces: state, parent, ...
            fields = _text(f"/proc/{entry.name}/stat").rpartition(")")[2].split()
            if len(fields) > 1 and fields[0] != "Z":
                found[int(entry.name)] = int(fields[1])
    return found


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
