"""The ranks of this run as one small surface: start, stop, and the few collectives that are not gradients.

Every function works without a process group, as a world of one. Values cross as JSON, never as pickle.
"""

import atexit
import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from shardwise import errors
from shardwise.environment import ProcessIdentity, process_identity, record_collectives
from shardwise.errors import ShardwiseError
from shardwise.launch.heartbeat import HEART, waiting

# Long enough for a slow first compile or load, short enough that a lost rank is named the same hour.
DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)


_pretending = False


@contextmanager
def pretended() -> Iterator[None]:
    """This process stands for one rank of a group that is not there: every rank says what this one says, on the CPU.

    For a dry run, which checks afterwards that the ranks' collectives match. What it cannot see is a rank that would
    say something else; names and layouts, which cross this way, are equal in a right program.
    """
    global _pretending
    before, _pretending = _pretending, True
    try:
        yield
    finally:
        _pretending = before


def device_kind() -> str:
    """`cuda` where torch sees a GPU, else `cpu`: the one place that chooses."""
    return "cuda" if torch.cuda.is_available() and not _pretending else "cpu"


def start(identity: ProcessIdentity | None = None, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> torch.device:
    """Join the process group (NCCL and gloo on GPUs, gloo on CPUs) and return this rank's device.

    A world of one makes no process group. Idempotent. Collective.
    """
    identity = identity or process_identity()
    take_device(identity)
    if identity.world > 1 and not dist.is_initialized():
        record_collectives()
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device_kind() == "cuda" else "gloo",
            init_method=f"tcp://{identity.master_addr}:{identity.master_port}" if not identity.launched else "env://",
            rank=identity.rank,
            world_size=identity.world,
            timeout=timeout,
        )
        # A group that lives on into the interpreter's end aborts there now and then, after all the work is done.
        atexit.register(stop)
    return device()


def take_device(identity: ProcessIdentity | None = None) -> None:
    """Make this rank's GPU the current one, where there are GPUs."""
    if device_kind() == "cuda":
        torch.cuda.set_device((identity or process_identity()).local_rank)


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if device_kind() == "cuda" else torch.device("cpu")


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        before = HEART.phase("leaving")
        dist.destroy_process_group()
        HEART.phase(before)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def wire_device() -> torch.device:
    """Where small values of ours must lie to cross: the CPU, or this rank's GPU in a group that has only NCCL."""
    if not dist.is_initialized() or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def barrier() -> None:
    """Collective."""
    if dist.is_initialized():
        all_reduce_sum(torch.zeros(1, device=wire_device()))


def all_reduce_sum(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum in place over the ranks. Collective."""
    if dist.is_initialized():
        with waiting("all-reduce"):
            dist.all_reduce(tensor, group=group)
    return tensor


def begin_sum(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to sum in place over the ranks; the function that is returned waits for it. Collective."""
    work = dist.all_reduce(tensor, async_op=True) if dist.is_initialized() else None

    def wait() -> torch.Tensor:
        if work is not None:
            work.wait()
        return tensor

    return wait


def gather_json(value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order, on every rank. Collective."""
    if _pretending or not dist.is_initialized():
        return [msgspec.json.decode(msgspec.json.encode(value)) for _ in range(world())]
    raw, device = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8), wire_device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world())]
    with waiting("gather of sizes"):
        dist.all_gather(sizes, torch.tensor([raw.numel()], device=device))
        longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw.to(device)
    pieces = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world())]
    with waiting("gather"):
        dist.all_gather(pieces, padded)
    return [
        msgspec.json.decode(piece[: int(size)].cpu().numpy().tobytes())
        for piece, size in zip(pieces, sizes, strict=True)
    ]


def broadcast_json(value: Any) -> Any:
    """Rank 0's JSON value on every rank. Collective."""
    return gather_json(value if is_main() else None)[0]


def process_id() -> int:
    return os.getpid()


def on_main(action: Callable[[], Any]) -> Any:
    """What `action` returns on rank 0, as JSON, on every rank; an error of ours is raised on every rank. Collective."""
    outcome: dict[str, Any] = {}
    if is_main():
        try:
            outcome = {"value": action()}
        except ShardwiseError as error:
            outcome = {"error": [type(error).__name__, error.what, error.why, error.fix]}
    outcome = broadcast_json(outcome)
    if "error" in outcome:
        name, what, why, fix = outcome["error"]
        raise getattr(errors, name)(what, why=why, fix=fix)
    return outcome["value"]
