"""Checkpoints of several ranks: sharded, replicated and both, to the bit; a failure is everybody's."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import ranks
from shardwise.checkpoint import Checkpointer, LocalStore
from shardwise.checkpoint.saving import prepare
from shardwise.checkpoint.snapshot import snapshot
from shardwise.errors import CheckpointError
from shardwise.events import Events
from shardwise.inputs.recipe import CheckpointPolicy
from tests.distributed.pool import Pool
from tests.unit.test_checkpoint_store import FaultyStore, MemoryStore, disk_full

WORLD = 4


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks saved and resumed, each split to the bit: the checks ran inside them."""
    root = tmp_path_factory.mktemp("runs")
    for name in SPLITS:
        pool.run(WORLD, f"{__name__}:resume_to_the_bit", root=str(root), name=name)
    return root


def test_every_split_of_a_model_resumes_to_the_bit(runs: Path) -> None:
    assert {path.stem for path in runs.iterdir() if path.is_file()} == set(SPLITS)


def test_one_ranks_trouble_is_known_to_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(WORLD, f"{__name__}:faults", folder=str(tmp_path))


@pytest.mark.parametrize("split", ["sharded", "both", "replicated", "ddp"])
def test_each_logical_tensor_is_written_once_and_by_all_ranks(runs: Path, split: str) -> None:
    (found,) = Checkpointer(runs / split, build()).committed()
    sizes = [file.bytes for file in found.manifest.files]
    weights = sum(tensor.numel() for tensor in build().state_dict().values())
    held = {entry.name: sum(chunk.bytes for chunk in entry.chunks) for entry in found.manifest.tensors}
    assert sum(size for name, size in held.items() if name.startswith("model/")) == 4 * weights + 4
    assert len(sizes) == WORLD
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("name", ["sharded", "both", "replicated", "ddp", "tp"])
def test_what_a_rank_writes_is_derived_and_is_what_torchs_planner_gives_out(pool: Pool, name: str) -> None:
    """torch's planner gathers every rank's plan and deals the copies out; here nobody is asked."""
    told = pool.run(WORLD, f"{__name__}:derived", name=name)
    ours = [(what, tuple(at), tuple(size)) for rank in told for what, at, size, _ in rank["ours"]]
    theirs = [(what, tuple(at), tuple(size)) for rank in told[0]["theirs"] for what, at, size, _ in rank]
    assert sorted(ours) == sorted(theirs)
    assert len(set(ours)) == len(ours)
    loads = [sum(count for *_, count in rank["ours"]) for rank in told]
    torchs = [sum(count for *_, count in rank) for rank in told[0]["theirs"]]
    largest = max(count for rank in told for *_, count in rank["ours"])
    assert max(loads) <= max(torchs) + largest


def test_ranks_save_beside_training_and_one_that_fails_is_an_event_on_all(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(WORLD, f"{__name__}:beside", folder=str(tmp_path)) == [[4, 2, 1]] * WORLD


def test_a_model_whose_parts_lie_on_different_ranks_says_who_holds_them(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(WORLD, f"{__name__}:stages", folder=str(tmp_path), told=False)
    assert len(set(said)) == 1 and "do not hold the same" in said[0] and "holders=" in said[0]
    assert pool.run(WORLD, f"{__name__}:stages", folder=str(tmp_path), told=True) == ["saved"] * WORLD


@pytest.mark.parametrize("split", ["sharded", "both", "replicated", "ddp"])
def test_another_world_is_refused_and_can_read_all_the_same(runs: Path, split: str) -> None:
    whole = load_file(runs / f"{split}.safetensors")
    module = build(seed=5)
    checkpointer = Checkpointer(runs / f"{split}-alike", module, optimizer_of(module), state={"note": 0})
    with pytest.raises(CheckpointError, match="saved by 4 ranks, and 1 would resume"):
        checkpointer.resume()
    single = Checkpointer(runs / split, module, optimizer_of(module), state={"note": 0})
    with pytest.raises(CheckpointError, match="state/note was saved by 4 ranks, each for itself"):
        single.resume(strict_world=False)
    assert checkpointer.resume(strict_world=False) == 2
    for name, value in module.state_dict().items():
        assert torch.equal(value, whole[name])


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
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def whole_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {
        name.removeprefix("module."): (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.items()
    }


def resume_to_the_bit(root: str, name: str) -> None:
    """Two steps, a save, two steps; then the same two again in a training built anew, with other seeds."""
    module = SPLITS[name](build())
    optimizer = optimizer_of(module)
    seed = 100 + dist.get_rank()
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    checkpointer = Checkpointer(Path(root) / name, module, optimizer, state={"note": dist.get_rank()})
    for _ in range(2):
        train(module, optimizer)
    checkpointer.save(2)
    Checkpointer(Path(root) / f"{name}-alike", module, optimizer, state={"note": 0}).save(2)
    weights = whole_weights(module)
    if dist.get_rank() == 0:
        save_file(weights, f"{root}/{name}.safetensors")
    expected = [train(module, optimizer) for _ in range(2)]
    after = whole_weights(module)

    again = SPLITS[name](build(seed=9))
    other = optimizer_of(again)
    resuming = Checkpointer(Path(root) / name, again, other, state={"note": -1})
    check(resuming.resume() == 2, "another step")
    check(resuming.state["note"] == dist.get_rank(), "another rank's state")
    for key, value in whole_weights(again).items():
        check(torch.equal(value, weights[key]), f"{name}: {key} was loaded otherwise")
    if name == "ddp":
        return  # torch's DDP cuts its buckets anew after a first step, so that sums come in another order.
    got = [train(again, other) for _ in range(2)]
    check(got == expected, f"{name}: losses {got}, not {expected}")
    for key, value in whole_weights(again).items():
        check(torch.equal(value, after[key]), f"{name}: {key} differs")


def tensor_parallel(module: nn.Module) -> nn.Module:
    """Shards along one axis of a mesh; along the other everything is a copy, of which no tensor tells."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "tp"))
    return parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})


def derived(name: str) -> dict[str, Any]:
    """Who holds a region as worked out, against what the ranks say; and what each writes, by us and by torch's planner.

    Items are name, offsets, sizes and their number of values.
    """
    module = tensor_parallel(build()) if name == "tp" else SPLITS[name](build())
    optimizer = optimizer_of(module)
    if name != "tp":
        train(module, optimizer)
    kept = snapshot(Checkpointer("unused", module, optimizer)._shared.subject)
    layout = kept.layout()
    said = ranks.gather_json({key: str(region) for key, region in layout.regions.items()})
    for key, region in layout.regions.items():
        held = tuple(rank for rank, regions in enumerate(said) if regions.get(key) == str(region))
        right = layout.holders[key] == held or not region.numel  # of what is empty nobody writes anything
        check(right, f"{key}: {layout.holders[key]} was worked out, {held} hold it")
    mine = prepare(MemoryStore(), 1, lambda: kept).parts
    ours = [part.content for part in mine if part.content.name in layout.regions]
    return {
        "ours": [[c.name, c.region.offsets, c.region.shape, c.region.numel] for c in ours],
        "theirs": planned_by_torch({key: kept.shared[key] for key in layout.regions}),
    }


def planned_by_torch(state: dict[str, torch.Tensor]) -> list[list[Any]]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, planner.create_local_plan())
    dealt, _ = planner.create_global_plan(plans)
    chunks = [[(item.index.fqn, item.tensor_data.chunk) for item in plan.items] for plan in dealt]
    return [
        [[fqn, list(c.offsets), list(c.sizes), c.sizes.numel()] for fqn, c in items if c.sizes.numel()]
        for items in chunks
    ]


def beside(folder: str) -> list[int]:
    """Saves in the background, in a loop of one's own: the second is refused by rank 1's disk and the others go on.

    Returns the newest step, how many were committed, and the failures in a row that were seen.
    """
    module = SPLITS["both"](build())
    local, rank = LocalStore(Path(folder) / "checkpoints"), dist.get_rank()
    store = FaultyStore(local, at=0, fault=disk_full)
    policy = CheckpointPolicy(every_steps=1, keep=9)
    checkpointer = Checkpointer(folder, module, store=store, policy=policy, events=Events())
    seen = 0
    for step in (1, 3, 4):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(step)
        if rank == 1 and step == 3:
            store.at = len(store.operations) + 2
        check(checkpointer.step(step), "nothing was begun")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(-1)
        checkpointer.settle()
        seen = max(seen, checkpointer.failures)
    check(not list(Path(folder).glob("checkpoints/step-00000003*")), "something was left of the save that failed")
    again = SPLITS["both"](build(seed=3))
    step = Checkpointer(folder, again, events=Events()).resume()
    for key, value in whole_weights(again).items():
        check("running" in key or "num_" in key or bool((value == step).all()), f"{key} holds {value}")
    return [step, len(checkpointer.committed()), seen]


def stages(folder: str, told: bool) -> str:
    """A pipeline of one's own: two ranks hold one layer, two the other. What saving said."""
    rank = dist.get_rank()
    here = (0, 1) if rank < 2 else (2, 3)
    torch.manual_seed(here[0])
    module = nn.ModuleDict({f"stage{here[0]}": nn.Linear(3, 4)})
    try:
        Checkpointer(folder, module, holders=here if told else None).save(1)
    except CheckpointError as error:
        check(not list(Path(folder).rglob("*.safetensors")), "something was written")
        return str(error)
    return "saved"


class Asked:
    received: int | None = None


def faults(folder: str) -> None:
    """One rank's trouble is known to all: a full disk, a damaged file, a signal."""
    module = SPLITS["sharded"](build())
    rank = dist.get_rank()
    Checkpointer(folder, module).save(1)
    second = Path(Checkpointer(folder, module).save(2).path)
    local = LocalStore(Path(folder) / "checkpoints")
    before = local.list()
    dist.barrier()
    store = FaultyStore(local, at=3 if rank == 1 else 0, fault=disk_full)
    try:
        Checkpointer(folder, module, store=store).save(3)
        check(False, "saved on a full disk")
    except CheckpointError as error:
        check("rank 1" in error.what and "No space left" in error.what, f"another error: {error}")
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
