"""What the pool's ranks run: training under a plan by the engine's own parts, with what is worth comparing."""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import shardwise as sw
from shardwise import ranks
from shardwise.data.batches import Batches
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import BatchSpec, DataSpec, ModelSpec, Recipe, TrainSpec
from shardwise.models.decoder import Decoder, initialize_decoder, next_token_sums
from shardwise.parallel.buckets import BucketedDataParallel
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Decision, Plan
from shardwise.train.own_loop import batches

VOCABULARY = 61


class UnevenTokens(Dataset):
    """Sequences of one shape whose numbers of counted labels all differ, from a fixed generator."""

    def __init__(self, samples: int, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, VOCABULARY, (samples, length + 1), generator=generator)
        self.counted = torch.randint(1, length + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[self.counted[index] :] = -100
        return {"tokens": self.tokens[index, :-1], "labels": labels}


def arch(**changes: Any) -> Arch:
    shape = {
        "name": "test", "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "ffn_size": 48, "max_sequence_length": 16, "tied_embeddings": False,
    }  # fmt: skip
    return msgspec.convert({**shape, **changes}, Arch)  # changes may have come as JSON


def plan(
    world: int, *, zero: int, global_batch: int, accumulation: int = 1, precision: str = "fp64",
    mesh: dict[str, int] | None = None, **more: Any,
) -> Plan:  # fmt: skip
    """The plan of a test: all ranks data parallel, or the degrees of `mesh`."""
    axes = mesh or ({"dp_shard": world} if zero and world > 1 else {"dp_replicate": world})
    shape = MeshShape(**axes)
    model = ModelSpec(given="test", **more.pop("model", {}))
    recipe = Recipe(model=model, data=DataSpec(given="test"), batch=BatchSpec(global_batch=global_batch),
                    train=TrainSpec(steps=1), seed=more.pop("seed", 0))  # fmt: skip
    decision = Decision(
        mesh=shape, zero=zero if world > 1 else 0, global_batch=global_batch,
        micro_batch=max(1, -(-global_batch // (shape.data_parallel * accumulation))), accumulation=accumulation,
        precision=precision, **more,
    )  # fmt: skip
    return Plan(recipe, parse_cluster(f"{world}xH100-SXM5-80GB"), decision, ("test",))


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.Loss(*next_token_sums(outputs, batch["labels"]))


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1)
    # The fused kernel: one call a step, where the loop over parameters took a quarter of a test's time.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def whole(tensor: torch.Tensor) -> np.ndarray:
    """The logical value of a tensor on every rank. Collective."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to(torch.float64).cpu().numpy().copy()


def train(
    out: str, *, world: int, zero: int, steps: int, global_batch: int = 12, samples: int = 18, accumulation: int = 1,
    precision: str = "fp64", optimizer: str = "adamw", clip: float = 0.5, shape: dict[str, Any] | None = None,
    fault: str = "", **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train the small decoder; gradients of step 1 and the last parameters go to `out`."""
    ranks.start()
    made = plan(world, zero=zero, global_batch=global_batch, accumulation=accumulation, precision=precision, **more)
    with torch.device("meta"):
        module: nn.Module = Decoder(arch(**(shape or {})))
    if precision == "fp64":
        module = module.to(torch.float64)
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, made.recipe.seed))
    optimizer_ = sw.build_optimizer(module, lambda m: optimizer_of(optimizer, m))
    losses, norms, gradients = [], [], {}
    for number, micros in enumerate(batches(Batches(UnevenTokens(samples), workers=0), made), start=1):
        outcome = sw.forward_backward(module, micros, loss)
        plant(fault, module)
        if number == 1:
            gradients = {f"grad/{name}": whole(p.grad) for name, p in module.named_parameters()}
        norms.append(sw.clip_grad_norm(module, clip))
        optimizer_.step()
        optimizer_.zero_grad()
        losses.append(outcome.loss)
        if number == steps:
            break
    parameters = {f"param/{name}": whole(p) for name, p in module.named_parameters()}
    # Under pipeline a rank has its own stages' tensors only: every rank writes, and the caller joins.
    np.savez(f"{out}.{ranks.rank()}.npz", **gradients, **parameters)
    return {"losses": losses, "norms": norms}


def joined(out: str, world: int) -> dict[str, np.ndarray]:
    """All ranks' tensors by name. Raises: AssertionError where two ranks hold different bits of one name."""
    found: dict[str, np.ndarray] = {}
    for rank in range(world):
        with np.load(f"{out}.{rank}.npz") as saved:
            for name in saved.files:
                value = saved[name]
                assert name not in found or np.array_equal(found[name], value), f"rank {rank} has another {name}"
                found[name] = value
    return found


def plant(fault: str, module: nn.Module) -> None:
    """Planted faults, each of which the comparison must see."""
    if not fault:
        return
    gradients = [p.grad for p in module.parameters()]
    if fault == "rank-scale" and ranks.rank() == 1:
        (gradients[0].to_local() if isinstance(gradients[0], DTensor) else gradients[0]).mul_(1.001)
    if fault == "mean-of-means":
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(1.0 + 1e-6)


def reference(
    *, steps: int, global_batch: int = 12, samples: int = 18, optimizer: str = "adamw", clip: float = 0.5,
    precision: str = "fp64", shape: dict[str, Any] | None = None, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The same training, written by hand with torch alone: one process, one batch, no part of the engine."""
    module: nn.Module = Decoder(arch(**(shape or {})))
    dtype = torch.float64 if precision == "fp64" else torch.float32
    module = module.to(dtype)
    initialize_decoder(module, seed)
    optimizer_ = optimizer_of(optimizer, module)
    data = UnevenTokens(samples)
    from shardwise.data.order import Permutation

    losses, norms, gradients = [], [], {}
    position = 0
    for number in range(1, steps + 1):
        epoch, first = divmod(position, samples)
        ks = np.arange(first, min(first + global_batch, samples))
        rows = [data[int(i)] for i in Permutation(samples, seed, epoch)(ks)]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        logits = module(tokens)
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer_.zero_grad()
        mean.backward()
        if number == 1:
            gradients = {f"grad/{name}": whole(p.grad) for name, p in module.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
        optimizer_.step()
        losses.append(mean.item())
        position += len(rows)
    parameters = {f"param/{name}": whole(p) for name, p in module.named_parameters()}
    return {"losses": losses, "norms": norms, "tensors": {**gradients, **parameters}}


def bytes_at_rest(world: int) -> dict[str, list[int]]:
    """By parameter: elements in all, of one row, and those that this rank holds of it, its gradient and its states."""
    made = plan(world, zero=3, global_batch=12)
    with torch.device("meta"):
        module: nn.Module = Decoder(arch()).to(torch.float64)
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, 0))
    optimizer_ = sw.build_optimizer(module, lambda m: optimizer_of("adamw", m))
    micros = next(iter(batches(Batches(UnevenTokens(30), workers=0), made)))
    sw.forward_backward(module, micros, loss)
    optimizer_.step()
    found = {}
    for name, p in module.named_parameters():
        states = [v for v in optimizer_.state[p].values() if isinstance(v, DTensor)]
        held = [p.to_local().numel(), p.grad.to_local().numel(), sum(v.to_local().numel() for v in states)]
        found[name] = [p.numel(), p.numel() // p.shape[0], *held]
    return found


def bucket_sums() -> dict[str, Any]:
    """Gradients of sum(k * p) are k; each rank uses its own selection of parameters, with micro-batches."""
    module = nn.ParameterList(
        [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (5, 700, 3, 900, 4, 800)]
    )
    buckets = BucketedDataParallel(module, cap_bytes=8 * 1000)
    used = [[index for index in range(6) if rank == 0 or index % (rank + 1)] for rank in range(ranks.world())]
    mine = used[ranks.rank()]
    for micro in range(2):
        buckets.before_backward(last=micro == 1)
        order = mine if ranks.rank() % 2 else list(reversed(mine))
        sum((module[i] * (ranks.rank() + 1) * (i + 1)).sum() for i in order).backward()
    buckets.finish()
    expected = [2 * (i + 1) * sum(r + 1 for r in range(ranks.world()) if i in used[r]) for i in range(6)]
    return {
        "buckets": len(buckets.buckets),
        "found": [sorted(set(p.grad.tolist())) for p in module],
        "expected": [[float(value)] for value in expected],
    }
