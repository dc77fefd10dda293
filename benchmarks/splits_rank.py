"""One rank of benchmarks.splits: one plan's step by Shardwise and by hand with torch's own parts, in turn.

The hand-written loops follow torch's tutorials and torchtitan: fully_shard with its stages' switches,
parallelize_module with sequence parallel, PipelineStage and Schedule1F1B; the same global token weighting, clipping,
finite check and logging.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

import shardwise as sw
from benchmarks.engine_rank import CLIP, LR, SEQUENCE, TOTAL, Tokens, factor, forever, optimizer
from shardwise import ranks
from shardwise.inputs.arch import Arch
from shardwise.models.decoder import Decoder, next_token_sums
from shardwise.models.linear import Linear

MICRO_BATCH, ACCUMULATION = 4, 4
# As decoder-2m, with a number of heads that two ranks share.
SHAPE = Arch(
    name="bench", vocab_size=320, hidden_size=160, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=40, ffn_size=448,
    max_sequence_length=SEQUENCE, tied_embeddings=False,
)  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "tp": {"mesh": {"tp": 2}, "zero": 0},
    "pp": {"mesh": {"pp": 2}, "zero": 0},
    "3d": {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "zero": 1},
}


def model() -> Any:
    """The decoder with nn.Linear in every place: torch's tensor parallel knows no other. Both sides get the same."""
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    for parent in list(decoder.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                plain = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=False)
                plain.weight = child.weight
                setattr(parent, name, plain)
    return decoder


def micro_batches(data: Tokens, rank: int, world: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    sampler = DistributedSampler(data, world, rank, shuffle=True, drop_last=True)
    batches = forever(DataLoader(data, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True))
    while True:
        yield [next(batches) for _ in range(ACCUMULATION)]


def split_tensors(module: Any, tp: DeviceMesh) -> None:
    """torchtitan's plan for a Llama: activations between the blocks are sharded along the sequence."""
    outside: dict[str, Any] = {}
    if hasattr(module.embed_tokens, "weight"):
        outside["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if hasattr(module.norm, "weight"):
        outside["norm"] = SequenceParallel()
        outside["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=True)
    parallelize_module(module, tp, outside)
    for block in module.blocks:
        if not list(block.parameters()):
            continue
        parallelize_module(block, tp, _of_a_block())


def _of_a_block() -> dict[str, Any]:
    whole, positions = Replicate(), Shard(1)
    return {
        "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(positions, None, None), desired_input_layouts=(whole, None, None)
        ),
        **{f"attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attention.o_proj": RowwiseParallel(output_layouts=positions),
        "ffn": PrepareModuleInput(input_layouts=(positions,), desired_input_layouts=(whole,)),
        "ffn.gate_proj": ColwiseParallel(), "ffn.up_proj": ColwiseParallel(),
        "ffn.down_proj": RowwiseParallel(output_layouts=positions),
    }  # fmt: skip


class Part(nn.Module):
    """One stage of the decoder, as torchtitan cuts it: what is not there is skipped."""

    def __init__(self, whole: Any, stage: int, stages: int) -> None:
        super().__init__()
        blocks = list(whole.blocks)
        size = -(-len(blocks) // stages)
        self.rotary, self.first, self.last = whole.rotary, stage == 0, stage == stages - 1
        self.embed_tokens = whole.embed_tokens if self.first else None
        self.blocks = nn.ModuleList(blocks[stage * size : (stage + 1) * size])
        self.norm = whole.norm if self.last else None
        self.lm_head = whole.lm_head if self.last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(SEQUENCE)
        x = self.embed_tokens(x) if self.embed_tokens is not None else x
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x)) if self.lm_head is not None and self.norm is not None else x


def by_hand(plan: str, data: Tokens) -> Callable[[], float]:
    degrees, zero = PLANS[plan]["mesh"], PLANS[plan]["zero"]
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    whole = model()
    stage = mesh["pp"].get_local_rank() if "pp" in degrees else 0
    module: Any = Part(whole, stage, degrees["pp"]) if "pp" in degrees else whole
    if "tp" in degrees:
        split_tensors(module, mesh["tp"])
    if zero:
        for block in module.blocks:
            fully_shard(block, mesh=mesh["dp_shard"], reshard_after_forward=zero == 3)
        fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=zero == 3)
    opt = optimizer(module)
    dp = mesh["dp_shard"] if "dp_shard" in degrees else None
    batches = micro_batches(data, dp.get_local_rank() if dp else 0, dp.size() if dp else 1)
    copies = dist.get_world_size() // (dp.size() if dp else 1)
    run = _pipelined(module, mesh, stage) if "pp" in degrees else _accumulated(module, zero)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        micros = next(batches)
        count = torch.tensor(float(sum(int((b["labels"] != -100).sum()) for b in micros)), dtype=torch.float64)
        if dp is not None:
            dist.all_reduce(count, group=dp.get_group())
        scale = (dp.size() if dp else 1) / count.item()  # FSDP takes the mean over ranks
        logged = run(micros, scale)
        norm = _clip(module, mesh, degrees)
        if math.isfinite(norm):
            for group in opt.param_groups:
                group["lr"] = LR * factor(number)
            opt.step()
        opt.zero_grad(set_to_none=True)
        dist.all_reduce(logged)
        return float(logged) / count.item() / (copies / degrees.get("pp", 1))

    return step


def _accumulated(module: Any, zero: int) -> Callable[[list[dict[str, torch.Tensor]], float], torch.Tensor]:
    def run(micros: list[dict[str, torch.Tensor]], scale: float) -> torch.Tensor:
        logged = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(micros):
            last = index == len(micros) - 1
            if zero == 1:
                module.set_requires_gradient_sync(last)
            if zero in (1, 2):
                module.set_reshard_after_backward(last)
            total, _ = next_token_sums(module(batch["tokens"]), batch["labels"])
            (total * scale).backward()
            logged += total.detach().to(torch.float64)
        return logged

    return run


def _pipelined(
    module: Any, mesh: DeviceMesh, stage: int
) -> Callable[[list[dict[str, torch.Tensor]], float], torch.Tensor]:
    stages = mesh["pp"].size()
    scales: list[float] = [1.0]
    logged = torch.zeros((), dtype=torch.float64)

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total, _ = next_token_sums(outputs, labels)
        logged.add_(total.detach().to(torch.float64))
        return total * scales[0]

    part = PipelineStage(module, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(part, ACCUMULATION, loss_fn=loss, scale_grads=False)

    def run(micros: list[dict[str, torch.Tensor]], scale: float) -> torch.Tensor:
        logged.zero_()
        scales[0] = scale
        tokens, labels = (torch.cat([b[key] for b in micros]) for key in ("tokens", "labels"))
        arguments = (tokens,) if stage == 0 else ()
        schedule.step(*arguments, target=labels if stage == stages - 1 else None)
        return logged.clone()

    return run


def _clip(module: Any, mesh: DeviceMesh, degrees: dict[str, int]) -> float:
    """The norm over the whole mesh, by hand: DTensors' own norms, and a sum over the stages."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    groups: dict[int, list[Any]] = {}
    for gradient in gradients:
        key = id(gradient.device_mesh) if isinstance(gradient, DTensor) else 0
        groups.setdefault(key, []).append(gradient)
    total = torch.zeros((), dtype=torch.float32)
    for group in groups.values():
        norm: Any = nn.utils.get_total_norm(group)
        total += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if "pp" in degrees:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    norm = float(total) ** 0.5
    if norm > CLIP:
        for group in groups.values():
            torch._foreach_mul_(group, CLIP / (norm + 1e-6))
    return norm


def shardwise(plan: str, data: Tokens, folder: str) -> Callable[[], float]:
    degrees, zero = PLANS[plan]["mesh"], PLANS[plan]["zero"]
    replicas = degrees.get("dp_shard", 1)
    trainer = sw.Trainer(
        model=model,
        loss=lambda outputs, batch: sw.Loss(*next_token_sums(outputs, batch["labels"])),
        optimizer=optimizer,
        schedule=factor,
        data=sw.Batches(data, last="drop"),
        global_batch=MICRO_BATCH * ACCUMULATION * replicas,
        micro_batch=MICRO_BATCH,
        clip_norm=CLIP,
        plan={"zero": zero, "dp_replicate": 1, **degrees},
        run=f"{folder}/{plan}",
        checkpoint=sw.CheckpointPolicy(every_steps=0),
        mixes_samples="accept",
    )
    steps = trainer.run(steps=TOTAL)
    return lambda: next(steps).loss


def main(plan: str, out: str, blocks: int) -> None:
    torch.set_num_threads(1)
    ranks.start()
    folder = ranks.on_main(lambda: tempfile.mkdtemp(prefix="bench-"))
    data = Tokens(SHAPE.vocab_size)
    kinds = {"torch": by_hand(plan, data), "shardwise": shardwise(plan, data, folder)}
    losses = {name: [step() for _ in range(3)] for name, step in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for block in range(blocks):
        for name in list(kinds)[:: 1 if block % 2 == 0 else -1]:
            ranks.barrier()
            started = time.perf_counter()
            kinds[name]()
            times[name].append(time.perf_counter() - started)
    if ranks.is_main():
        Path(out).write_text(json.dumps({"times": times, "losses": losses}))
    os._exit(0)  # the generators behind the steps would otherwise save once more


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
