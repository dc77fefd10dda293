"""One rank of benchmarks.checkpoint: every kind as a function that takes one turn, timed in alternating blocks."""

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise import ranks
from shardwise.checkpoint import Checkpointer
from shardwise.events import Events
from shardwise.inputs.recipe import CheckpointPolicy

WIDTH = 2048
LAYER_MIB = 3 * WIDTH * WIDTH * 4 // 2**20  # the weight and two moments
PIECE_BYTES = 16 * 2**20

Turn = Callable[[], dict[str, float]]


class State:
    """A sharded module with its optimizer's moments, as torch and as we see them."""

    def __init__(self, mib: int) -> None:
        layers = max(1, mib * dist.get_world_size() // LAYER_MIB)
        torch.manual_seed(0)
        self.module: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for layer in self.module:
            fully_shard(layer)
        fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for parameter in self.module.parameters():
            moments = {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def theirs(self) -> dict[str, Any]:
        """References, as torch.distributed.checkpoint takes them."""
        return {
            "model": self.module.state_dict(),
            "optimizer": get_optimizer_state_dict(self.module, self.optimizer),
        }

    def locals(self) -> list[torch.Tensor]:
        held = [*self.module.parameters()]
        held += [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held]


def timed(act: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, which all begin together."""
    ranks.barrier()
    began = time.perf_counter()
    act()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def durable(path: Path) -> None:
    for each in (path, path.parent):
        handle = os.open(each, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def forget(folder: Path) -> None:
    """Drops what the page cache holds of a folder: a load then comes from the disk."""
    if ranks.is_main():
        for path in folder.rglob("*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
    ranks.barrier()


def kinds(state: State, folder: Path) -> dict[str, Turn]:
    """Of each kind a turn: what it measures, in seconds."""
    rank = ranks.rank()
    source = torch.cat([tensor.detach().reshape(-1) for tensor in state.locals()])
    copy, raw = torch.empty_like(source), memoryview(source.numpy()).cast("B")
    buffer = memoryview(torch.empty_like(source).numpy()).cast("B")
    one, file = folder / f"raw-{rank}", folder / f"torch-{rank}"
    ours = Checkpointer(
        folder / "ours", state.module, state.optimizer, policy=CheckpointPolicy(every_steps=0, keep=1), events=Events()
    )
    saved = 0

    def write_raw() -> None:
        with one.open("wb", buffering=0) as out:
            for start in range(0, len(raw), PIECE_BYTES):
                out.write(raw[start : start + PIECE_BYTES])
            os.fsync(out.fileno())
        durable(one)

    def read_raw() -> None:
        with one.open("rb", buffering=0) as given:
            for start in range(0, len(buffer), PIECE_BYTES):
                given.readinto(buffer[start : start + PIECE_BYTES])

    def torch_save() -> None:
        with file.open("wb") as out:
            torch.save(state.locals(), out)
            out.flush()
            os.fsync(out.fileno())
        durable(file)

    def torch_load() -> None:
        for target, value in zip(state.locals(), torch.load(file), strict=True):
            target.detach().copy_(value)

    def save() -> dict[str, float]:
        nonlocal saved
        saved += 1
        took = timed(lambda: ours.finish(saved, "benchmark"))
        ours.rest()  # theirs were deleted before their time began
        return {"save": took}

    def begin() -> dict[str, float]:
        nonlocal saved
        saved += 1
        stall = timed(lambda: ours.begin(saved))
        took = timed(ours.settle)
        ours.rest()
        return {"begin": stall, "begin to commit": stall + took}

    def dcp_save() -> None:
        dcp.save(state.theirs(), checkpoint_id=folder / "dcp")

    def dcp_async() -> dict[str, float]:
        future: Any = None

        def start() -> None:
            nonlocal future
            future = dcp.async_save(state.theirs(), checkpoint_id=folder / "dcp async", process_group=gloo)

        stall = timed(start)
        return {"dcp async: stall": stall, "dcp async": stall + timed(lambda: future.result())}

    def dcp_load() -> None:
        with torch.no_grad():
            dcp.load(state.theirs(), checkpoint_id=folder / "dcp")

    def one_of(name: str, act: Callable[[], Any], cold: Path | None = None) -> Turn:
        def turn() -> dict[str, float]:
            if cold is not None:
                forget(cold)
            return {name: timed(act)}

        return turn

    def afresh(turn: Turn, *paths: Path) -> Turn:
        """Every save makes its files anew, as ours does; what was there is removed before its time begins."""

        def clean() -> dict[str, float]:
            ranks.barrier()
            for path in paths:
                if path.is_dir() and ranks.is_main():
                    rmtree(path)
                elif path.is_file():
                    path.unlink()
            return turn()

        return clean

    gloo: Any = dist.new_group(backend="gloo")
    return {
        "warm copy": one_of("warm copy", lambda: copy.copy_(source)),
        "raw write": afresh(one_of("raw write", write_raw), one),
        "save": save,
        "begin": begin,
        "torch.save": afresh(one_of("torch.save", torch_save), file),
        "dcp": afresh(one_of("dcp", dcp_save), folder / "dcp"),
        "dcp async": afresh(dcp_async, folder / "dcp async"),
        "raw read": one_of("raw read", read_raw, folder),
        "verified load": one_of("verified load", ours.resume, folder),
        "torch.load": one_of("torch.load", torch_load, folder),
        "dcp.load": one_of("dcp.load", dcp_load, folder),
    }


def main(folder: Path, blocks: int, mib: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks.start()
    turns = kinds(State(mib), folder)
    for turn in turns.values():  # warm: buffers, imports, connections
        turn()
    times: dict[str, list[float]] = {}
    for block in range(blocks):
        for name in list(turns)[:: 1 if block % 2 == 0 else -1]:
            gc.collect()
            for what, seconds in turns[name]().items():
                times.setdefault(what, []).append(seconds)
    if ranks.is_main():
        (folder / "times.json").write_text(json.dumps(times))
    ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
