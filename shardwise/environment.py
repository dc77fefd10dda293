"""The only reader of os.environ: who this process is in the job, and where things live on this machine."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardwise.errors import RecipeError

# Set by a `shardwise` command for all that it starts, and so a mark of everything that belongs to one job.
JOB_LOGS = "SHARDWISE_JOB_LOGS"


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Rank, world and address of one process. `launched` is False for plain `python train.py`."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launched: bool = False
    attempt: int = 0


def process_identity(env: Mapping[str, str] | None = None) -> ProcessIdentity:
    """From torchrun's variables, else SLURM's, else a single process.

    Raises: RecipeError where a launcher's variables are incomplete.
    """
    env = os.environ if env is None else env
    if "TORCHELASTIC_RUN_ID" in env or ("RANK" in env and "WORLD_SIZE" in env):
        return _from_torchrun(env)
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        return _from_slurm(env)
    return ProcessIdentity()


def _from_torchrun(env: Mapping[str, str]) -> ProcessIdentity:
    try:
        return ProcessIdentity(
            rank=int(env["RANK"]),
            world=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
            launched=True,
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as error:
        raise RecipeError(
            f"The launcher's variables are incomplete: {error}.",
            why="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come together",
            fix="start with torchrun, srun or shardwise run, or unset RANK and WORLD_SIZE",
        ) from None


def _from_slurm(env: Mapping[str, str]) -> ProcessIdentity:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise RecipeError(
            f"srun started {env['SLURM_NTASKS']} tasks without {' and '.join(missing)}.",
            why="the ranks must agree on one address to meet at",
            fix="export MASTER_ADDR=$(scontrol show hostnames | head -n1) MASTER_PORT=29500 before srun",
        )
    world = int(env["SLURM_NTASKS"])
    nodes = int(env.get("SLURM_NNODES", "1"))
    return ProcessIdentity(
        rank=int(env["SLURM_PROCID"]),
        world=world,
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        local_world=world // nodes,
        master_addr=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
        launched=True,
        attempt=int(env.get("SLURM_RESTART_COUNT", "0")),
    )


def hostname() -> str:
    return socket.gethostname()


def cache_folder() -> Path:
    """`$SHARDWISE_CACHE`, else `$XDG_CACHE_HOME/shardwise`, else `~/.cache/shardwise`."""
    own = os.environ.get("SHARDWISE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardwise"


def watched() -> bool:
    """True where a `shardwise` command reads this process's events and draws the live line itself."""
    return os.environ.get("SHARDWISE_WATCHED") == "1"


def job_logs() -> str | None:
    """The folder of the logs of the `shardwise` command that started this process, and so of one job; None without."""
    return os.environ.get(JOB_LOGS)


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def record_collectives(entries: int = 256) -> None:
    """Have torch's recorder keep the last collectives of every process group that is made from here on."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(entries))


def notice_seconds() -> float | None:
    """What a launcher passes on of its scheduler's notice (SLURM's --signal, a pod's grace); None where none does.

    Raises: RecipeError for what is no positive number of seconds.
    """
    said = os.environ.get("SHARDWISE_NOTICE_SECONDS")
    if said is None:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RecipeError(
            f"SHARDWISE_NOTICE_SECONDS is {said!r}, not a number of seconds.",
            fix="set it to the seconds between the signal and the end of the job, or unset it",
        )
    return seconds


def tell_run_path() -> str | None:
    """The file in which the command that started this rank wants to read where its run lies; None without one."""
    return os.environ.get("SHARDWISE_TELL_RUN")


def in_pod() -> bool:
    """Whether this process runs in a Kubernetes pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def injected_fault(name: str) -> str | None:
    """A planted fault for tests, `SHARDWISE_FAULT_<NAME>`; None in every real run."""
    return os.environ.get(f"SHARDWISE_FAULT_{name.upper()}")


def usable_cpus() -> int:
    """CPU cores that this process may use (its affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def child_environment(extra: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for one that it starts: `extra` on top, `defaults` where nothing is set."""
    return {**(defaults or {}), **os.environ, **extra}
