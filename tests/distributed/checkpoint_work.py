"""What the pool's ranks run to test checkpoints of every split: save under one, load under another, planted faults."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise import ranks
from shardwise.checkpoint import Checkpointer, loads
from shardwise.checkpoint.regions import local
from shardwise.errors import CheckpointError
from shardwise.models.counter_rng import fill_normal_
from shardwise.models.decoder import Decoder
from shardwise.parallel.parallelize import parallel_of
from shardwise.regions import inside, whole
from shardwise.torch_private import held_region
from tests.distributed.work import UnevenTokens, arch, loss

# Dims that neither 2, 3 nor 4 ranks share evenly, some with fewer rows than ranks.
SHAPES = [(7, 5), (5, 7), (3, 11), (13,), (1, 6), (8, 6), (6, 9, 2)]


def regions(mesh: dict[str, int], kinds: list[str]) -> dict[str, list[list[int]]]:
    """Parameters laid out by tp in each kind and then cut by fully_shard; the flat indices that this rank holds.

    On the rank: the region picks the local values out of the logical ones, torch's full_tensor() gives those, and a
    tensor filled by index has the values of one filled whole.
    """
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return {kind: regions_of(mesh, axes, kind) for kind in kinds}


def regions_of(mesh: dict[str, int], axes: DeviceMesh, tp: str) -> list[list[int]]:
    module = nn.Module()
    for index, shape in enumerate(SHAPES):
        logical = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        if "tp" in mesh:
            dim = {"rows": 0, "columns": len(shape) - 1, "whole": None}[tp]
            placement = Replicate() if dim is None else Shard(dim)
            logical = distribute_tensor(logical, axes["tp"], [placement])
        module.register_parameter(f"p{index}", nn.Parameter(logical))
    data = tuple(axis for axis in mesh if axis != "tp")
    if data:
        fully_shard(module, mesh=axes[data])
    held = []
    for shape, tensor in zip(SHAPES, module.parameters(), strict=True):
        logical = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        picked = logical[inside(held_region(tensor), whole(shape))]
        check(torch.equal(tensor.to_local(), picked), f"{shape} {tensor.placements}: another region")
        if len(mesh) < 3:  # With three axes torch joins some of them, and keeps the group beyond this call's ranks.
            check(torch.equal(tensor.full_tensor(), logical), f"{shape} {tensor.placements}: torch has it otherwise")
        held.append(picked.flatten().long().tolist())
        drawn = torch.empty(shape)
        fill_normal_(drawn, seed=3, name="w", std=1.0)
        fill_normal_(tensor.detach(), seed=3, name="w", std=1.0)
        expected = drawn[inside(held_region(tensor), whole(shape))]
        check(torch.equal(tensor.to_local(), expected), f"{shape} {tensor.placements}: other initial values")
    return held


def check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"rank {ranks.rank()}: {what}")


class Training:
    """The small decoder with tied embeddings and three groups of parameters, under a plan."""

    def __init__(self, folder: str, plan: dict[str, Any], *, tied: bool = True, fault: str = "") -> None:
        self.plan = sw.init(plan, global_batch=12, micro_batch=2, precision="fp32")
        torch.manual_seed(0)
        module = Decoder(arch(num_layers=4, num_kv_heads=4, tied_embeddings=tied, vocab_size=61, ffn_size=49))
        self.module = sw.parallelize(module, self.plan)
        self.optimizer = sw.build_optimizer(self.module, self.grouped(fault))
        self.aliases = parallel_of(self.module).aliases
        self.checkpointer = Checkpointer(folder, self.module, self.optimizer)

    def grouped(self, fault: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def build(module: nn.Module) -> torch.optim.Optimizer:
            named = dict(module.named_parameters())
            copy = [p for n, p in named.items() if "head" in n] if fault == "groups" and ranks.rank() else []
            taken = {id(p) for p in copy}
            rest = [p for p in named.values() if id(p) not in taken]
            groups = [
                {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in rest if p.ndim == 1] + copy, "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

        return build

    def steps(self, count: int) -> list[float]:
        losses = []
        for _, micros in zip(
            range(count), sw.batches(sw.Batches(UnevenTokens(30), workers=0), self.plan), strict=False
        ):
            losses.append(sw.forward_backward(self.module, micros, loss).loss)
            sw.clip_grad_norm(self.module, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def bits(self) -> dict[str, str]:
        """Digests of the logical tensors that this rank holds a part of, by canonical first name. Collective."""
        found: dict[str, str] = {}
        for name, parameter in self.module.named_parameters():
            first = self.aliases.get(name, name)
            found[first] = digest(parameter)
            for key, value in sorted(self.optimizer.state[parameter].items()):
                found[f"{first} {key}"] = digest(value)
        return found


def digest(tensor: torch.Tensor) -> str:
    logical = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(logical.detach().contiguous().numpy().tobytes()).hexdigest()


def save(folder: str, plan: dict[str, Any], tied: bool = True) -> dict[str, Any]:
    """Two steps and a save: what was saved, by name."""
    training = Training(folder, plan, tied=tied)
    training.steps(2)
    saved = training.checkpointer.save(2)
    files = sum(path.stat().st_size for path in Path(saved.path).glob("rank-*"))
    return {
        "bits": training.bits(), "bytes": saved.bytes, "on disk": files, "path": saved.path,
        "root": training.checkpointer.committed()[0].manifest.root,
    }  # fmt: skip


def load(folder: str, plan: dict[str, Any], tied: bool = True) -> dict[str, Any]:
    """What a new training holds after it loaded another's checkpoint, the root of that when it saves it again at once,
    and a step that it makes from there.
    """
    training = Training(folder, plan, tied=tied)
    check(training.checkpointer.resume(strict_world=False) == 2, "another step")
    again = Checkpointer(f"{folder}-again-{ranks.world()}", training.module, training.optimizer)
    again.save(2)
    root = again.committed()[0].manifest.root
    return {"bits": training.bits(), "root": root, "losses": training.steps(1)}


def changed_on_the_way(folder: str, plan: dict[str, Any], name: str, rank: int) -> str:
    """What a resume says where one rank's memory changes a bit of one tensor after it was verified."""
    training = Training(folder, plan)
    apply = loads.apply

    def changing(staged: Any, subject: Any) -> None:
        apply(staged, subject)
        target = staged.targets.get(name)
        if ranks.rank() == rank and target is not None:
            local(target).view(torch.int32).view(-1)[-1] ^= 1 << 30

    loads.apply = changing
    try:
        training.checkpointer.resume(strict_world=False)
    except CheckpointError as error:
        return str(error)
    finally:
        loads.apply = apply
    return "loaded"


def refused(folder: str, plan: dict[str, Any], fault: str) -> str:
    """What a save says of a planted fault, once every rank said the same and nothing was kept."""
    training = Training(folder, plan, fault=fault)
    training.steps(1)
    if fault == "copy" and training.aliases:
        (name, *_) = training.aliases
        with torch.no_grad():
            dict(training.module.named_parameters())[name].view(-1)[3] += 1e-6
    try:
        training.checkpointer.save(1)
    except CheckpointError as error:
        check(not list(Path(folder).rglob("rank-*")), "something was kept")
        return f"{error.what} {error.why} {error.fix}"
    return "saved"
