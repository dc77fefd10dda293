"""Checkpoints of several ranks, in one spawn: sharded, replicated and both, to the bit; a failure is everybody's."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.checkpoint import Checkpointer, LocalStore
from shardwise.errors import CheckpointError
from shardwise.events import Events
from tests.unit.test_checkpoint_store import FaultyStore, MemoryStore, disk_full

REPOSITORY = Path(__file__).parents[2]
WORLD = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left; every check that several ranks are needed for ran inside them."""
    root = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", __name__, str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(errors)
    return root


def test_every_split_of_the_model_resumes_to_the_bit(runs: Path) -> None:
    assert sorted(path.name for path in runs.iterdir() if path.is_dir()) == sorted([*SPLITS, "faults"])


@pytest.mark.parametrize("split", ["sharded", "both", "replicated", "ddp"])
def test_each_logical_tensor_is_written_once_and_by_all_ranks(runs: Path, split: str) -> None:
    (found,) = Checkpointer(runs / split, build()).committed()
    sizes = [file.bytes for file in found.manifest.files]
    weights = sum(tensor.numel() for tensor in build().state_dict().values())
    held = {entry.name: sum(chunk.bytes for chunk in entry.chunks) for entry in found.manifest.tensors}
    assert sum(size for name, size in held.items() if name.startswith("model/")) == 4 * weights + 4
    assert len(sizes) == WORLD
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("split", ["sharded", "both", "replicated", "ddp"])
def test_another_world_is_refused_and_can_read_all_the_same(runs: Path, split: str) -> None:
    whole = load(runs / f"{split}.safetensors")
    module = build(seed=5)
    checkpointer = Checkpointer(runs / split, module, optimizer_of(module), state={"note": 0})
    with pytest.raises(CheckpointError, match="saved by 4 ranks, and 1 would resume"):
        checkpointer.resume()
    assert checkpointer.resume(strict_world=False) == 2
    for name, value in module.state_dict().items():
        assert torch.equal(value, whole[name])


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


# ---------------------------------------------------------------- what each rank does


def build(seed: int = 0) -> nn.Module:
    """Dims that four ranks cannot share evenly, one with fewer rows than ranks, buffers, dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 37),
        nn.Dropout(0.3),
        nn.BatchNorm1d(37),
        nn.Linear(37, 2),
        nn.Linear(2, 31),
        nn.Linear(31, 3),
    )


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def shard(module: nn.Module, **more: Any) -> nn.Module:
    fully_shard(module[0], **more)
    return fully_shard(module, **more)


SPLITS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sharded": lambda module: shard(module, mesh=init_device_mesh("cpu", (WORLD,))),
    "both": lambda module: shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))),
    "replicated": lambda module: replicate(module, mesh=init_device_mesh("cpu", (WORLD,))),
    "ddp": nn.parallel.DistributedDataParallel,
}


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = module(torch.randn(6, 5)).square().mean() * random.random() * np.random.random()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"rank {dist.get_rank()}: {what}")


def whole_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {
        name.removeprefix("module."): value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


def resume_to_the_bit(root: Path, name: str) -> None:
    """Two steps, a save, two steps; then the same two again in a training built anew, with other seeds."""
    module = SPLITS[name](build())
    optimizer = optimizer_of(module)
    seed = 100 + dist.get_rank()
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    checkpointer = Checkpointer(root / name, module, optimizer, state={"note": dist.get_rank()})
    for _ in range(2):
        train(module, optimizer)
    checkpointer.save(2)
    weights = whole_weights(module)
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        save_file(weights, root / f"{name}.safetensors")
    expected = [train(module, optimizer) for _ in range(2)]
    after = whole_weights(module)

    again = SPLITS[name](build(seed=9))
    other = optimizer_of(again)
    resuming = Checkpointer(root / name, again, other, state={"note": -1})
    check(resuming.resume() == 2, "another step")
    check(resuming.state["note"] == dist.get_rank(), "another rank's state")
    got = [train(again, other) for _ in range(2)]
    check(dist.get_world_size() == WORLD and got == expected, f"{name}: losses {got}, not {expected}")
    for key, value in whole_weights(again).items():
        check(torch.equal(value, after[key]), f"{name}: {key} differs")


class Asked:
    received: int | None = None


def faults(root: Path) -> None:
    """One rank's trouble is known to all: a full disk, a damaged file, a signal."""
    module = SPLITS["sharded"](build())
    rank, folder = dist.get_rank(), root / "faults"
    Checkpointer(folder, module).save(1)
    second = Path(Checkpointer(folder, module).save(2).path)
    local = LocalStore(folder / "checkpoints")
    before = local.list()
    dist.barrier()
    store = FaultyStore(local, at=3 if rank == 1 else 0, fault=disk_full)
    try:
        Checkpointer(folder, module, store=store).save(3)
        check(False, "saved on a full disk")
    except CheckpointError as error:
        check("rank 1" in error.what and "No space left" in error.why, f"another error: {error}")
    check(local.list() == before, "something was left of a save that failed")
    dist.barrier()
    if rank == 0:
        path = second / "rank-00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    dist.barrier()
    checkpointer = Checkpointer(folder, module, events=Events())
    check(checkpointer.resume() == 1, "a damaged checkpoint was resumed")
    check([item.folder for item in checkpointer.skipped] == [second.name], "another one was skipped")
    unshared = MemoryStore()
    Checkpointer(folder, module, store=local if rank == 0 else unshared)
    try:
        Checkpointer(folder, module, store=local if rank == 0 else unshared).resume()
        check(False, "a folder that one node has was resumed")
    except CheckpointError as error:
        check("not shared" in error.why, f"another error: {error}")
    asked = Asked()
    asked.received = 15 if rank == 2 else None
    try:
        Checkpointer(folder, module, signals=asked).step(4)
        check(False, "went on after a signal")
    except SystemExit as left:
        check(left.code == 75, f"left with {left.code}")
    check(Checkpointer(folder, module).resume() == 4, "the signal's checkpoint is not there")


def main(root: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=WORLD)
    for name in SPLITS:
        resume_to_the_bit(root, name)
    faults(root)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
