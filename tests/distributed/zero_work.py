"""What the pool's ranks run for ZeRO: what is held at which moment, tensor-parallel parameters, late gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise import ranks
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.parallel import data_parallel, device_mesh
from shardwise.parallel.parallelize import parallel_of
from shardwise.plan.mesh import MeshShape
from shardwise.torch_private import gathered
from tests.distributed import work


def numbers_held(module: nn.Module, states: int) -> list[int]:
    """(parameters, gradients, one state) that this rank holds now, in numbers."""

    def local(tensor: torch.Tensor) -> int:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()

    parameters = gradients = 0
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        whole, whole_gradients = gathered(unit)
        parameters += sum(local(t) for t in whole)
        gradients += sum(local(t) for t in whole_gradients)
        # The sharded parameters themselves: while a unit is gathered its slots hold the whole ones.
        shards = [one.sharded_param for group in unit._get_fsdp_state()._fsdp_param_groups for one in group.fsdp_params]
        parameters += sum(local(p) for p in shards)
        gradients += sum(local(p.grad) for p in shards if p.grad is not None)
    if not units:
        parameters = sum(p.numel() for p in module.parameters())
        gradients = sum(bucket.flat.numel() for bucket in parallel_of(module).gradients.buckets)
    return [parameters, gradients, states]


def held(*, world: int, zero: int) -> dict[str, Any]:
    """Numbers by moment over a second step of two micro-batches, and the sizes that the table needs."""
    made = work.plan(world, zero=zero, global_batch=2 * world, accumulation=2)
    with torch.device("meta"):
        module: nn.Module = Decoder(work.arch()).to(torch.float64)
    whole = {name: (p.numel(), p.shape[0]) for name, p in module.named_parameters()}
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, 0))
    gradients = parallel_of(module).gradients
    optimizer = torch.optim.AdamW(module.parameters())
    tokens = torch.arange(24).view(2, 12) % work.VOCABULARY
    shares = {n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in module.named_parameters()}
    found: dict[str, list[int]] = {}
    states = 0

    def note(moment: str) -> None:
        found.setdefault(moment, numbers_held(module, states))

    def step(*, watch: bool) -> None:
        hooks = []
        if watch:
            hooks.append(module.blocks[-1].ffn.register_forward_hook(lambda *_: note("forward")))
        losses = [module(tokens).square().sum()]
        for hook in hooks:
            hook.remove()
        gradients.before_backward(last=False)
        losses.pop().backward()
        if watch:
            note("between")
            # The gradient of what enters the first block is ready once the block's own are.
            module.blocks[0].attention_norm.register_forward_pre_hook(
                lambda _m, args: args[0].register_hook(lambda _g: note("backward")) and None
            )
        loss = module(tokens).square().sum()
        gradients.before_backward(last=True)
        loss.backward()
        gradients.finish()

    step(watch=False)
    optimizer.step()
    optimizer.zero_grad()
    kept = [v for p in module.parameters() for k, v in optimizer.state[p].items() if k == "exp_avg"]
    states = sum((v.to_local() if isinstance(v, DTensor) else v).numel() for v in kept)
    note("rest")
    losses = [module(tokens).square().sum() for _ in range(2)]
    note("in_flight")
    for index, one in enumerate(losses):
        gradients.before_backward(last=index == 1)
        one.backward()
    gradients.finish()
    optimizer.zero_grad()
    step(watch=True)
    block = [n for n in whole if n.startswith("blocks.0.")]
    root = [n for n in whole if not n.startswith("blocks.")]
    others = [n for n in whole if n not in (*block, *root)]
    sizes = {
        "whole": sum(whole[n][0] for n in whole),
        "share": sum(shares.values()),
        "root": sum(whole[n][0] for n in root),
        "root_late": sum(whole[n][0] for n in root if not n.startswith("embed")),
        "block": sum(whole[n][0] for n in block),
        "other_shares": sum(shares[n] for n in others),
    }
    return {"found": found, "sizes": sizes}


class _Local(nn.Module):
    """`x @ w.T + b` over this tp rank's rows of w, computed on local tensors, the parts joined after."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        weight = torch.arange(20, dtype=torch.float64).view(5, 4) / 7 - 1
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        self.scale = nn.Parameter(distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale.to_local()) @ self.weight.to_local().T


def over_tensor_parallel(*, zero: int, accumulation: int) -> dict[str, Any]:
    """Gradients of tp x dp on a 2 x 2 mesh, and the same by hand from every rank's inputs."""
    axes = {"tp": 2, "dp_shard" if zero else "dp_replicate": 2}
    decision = work.plan(4, zero=zero, global_batch=4, mesh=axes).decision
    mesh = device_mesh.build(MeshShape(**axes))
    module = nn.Sequential(_Local(mesh.submesh("tp")))
    gradients = data_parallel.apply(module, (), [module[0]], [], mesh, decision)
    weight = torch.arange(20, dtype=torch.float64).view(5, 4) / 7 - 1
    expected = torch.zeros_like(weight)
    mine = decision.mesh.data_coord(ranks.rank())
    for micro in range(accumulation):
        for data in range(2):
            x = torch.full((3, 4), float(1 + data + 2 * micro), dtype=torch.float64)
            expected += (2 * (x @ weight.T)).T @ x
            if data == mine:
                loss = module(x).square().sum()
                gradients.before_backward(last=micro == accumulation - 1)
                loss.backward()
    gradients.finish()
    found = module[0].weight.grad.full_tensor()
    return {"worst": float((found - expected).abs().max() / expected.abs().max()), "kind": type(found).__name__}


def late_gradients() -> list[list[float]]:
    """Gradients set without a hook, as zero bubble's weight pass sets them; one after an announced backward."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)])
    buckets = data_parallel.BucketedDataParallel(module, early=False)
    mine = float(ranks.rank() + 1)
    buckets.before_backward(last=True)
    (module[0] * mine).sum().backward()
    module[1].grad = torch.full((3,), mine, dtype=torch.float64)
    module[0].grad += mine
    buckets.finish()
    dist.barrier()
    return [p.grad.tolist() for p in module]
