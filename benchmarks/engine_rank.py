"""One rank of benchmarks.engine: every kind as a function that takes one step, timed in alternating blocks."""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardwise as sw
from shardwise import ranks
from shardwise.inputs.arch import preset
from shardwise.models.decoder import Decoder, next_token_sums

SEQUENCE, MICRO_BATCH, CLIP, LR, TOTAL = 256, 8, 1.0, 1e-3, 100_000


class Tokens(Dataset[dict[str, torch.Tensor]]):
    deterministic = True

    def __init__(self, vocabulary: int) -> None:
        self.rows = torch.randint(0, vocabulary, (2048, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.rows[index, :-1], "labels": self.rows[index, 1:]}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(preset("decoder-2m"))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, fused=True)


def default_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """What a user of Accelerate or Fabric writes: neither chooses the fused kernel for them."""
    return torch.optim.AdamW(module.parameters(), lr=LR)


def factor(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / TOTAL))


def forever(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader


def loader(data: Tokens) -> DataLoader[Any]:
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    return DataLoader(data, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)


def loop(
    module: nn.Module,
    step_optimizer: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    backward: Callable[[torch.Tensor], None],
    clip: Callable[[], Any],
) -> Callable[[], float]:
    """A careful loop by hand: what torch, Accelerate and Fabric users write for the same semantics."""
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        batch = next(batches)
        count = (batch["labels"] != -100).sum().to(torch.float64)
        dist.all_reduce(count)
        total, _ = next_token_sums(module(batch["tokens"]), batch["labels"])
        # Their reduction is a mean over ranks, so the world's size is put back.
        backward(total * (dist.get_world_size() / count.item()))
        norm = clip()
        if math.isfinite(float(norm)):
            for group in step_optimizer.param_groups:
                group["lr"] = LR * factor(number)
            step_optimizer.step()
        step_optimizer.zero_grad(set_to_none=True)
        logged = total.detach().to(torch.float64)
        dist.all_reduce(logged)
        return float(logged) / count.item()

    return step


def torch_ddp(data: Tokens) -> Callable[[], float]:
    module = DistributedDataParallel(model())
    return loop(module, optimizer(module), forever(loader(data)), torch.Tensor.backward,
                lambda: nn.utils.clip_grad_norm_(module.parameters(), CLIP))  # fmt: skip


def torch_fsdp2(data: Tokens) -> Callable[[], float]:
    module: Any = model()
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)

    def clip() -> Any:
        norm: Any = nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        return norm.full_tensor()

    return loop(module, optimizer(module), forever(loader(data)), torch.Tensor.backward, clip)


def accelerate_ddp(data: Tokens) -> Callable[[], float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    module = model()
    plain = DataLoader(data, batch_size=MICRO_BATCH, shuffle=True, drop_last=True)
    module, wrapped, batches = accelerator.prepare(module, default_optimizer(module), plain)
    return loop(module, wrapped, forever(batches), accelerator.backward,
                lambda: accelerator.clip_grad_norm_(module.parameters(), CLIP))  # fmt: skip


def fabric_ddp(data: Tokens) -> Callable[[], float]:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    fabric = Fabric(
        accelerator="auto", devices=dist.get_world_size(), strategy="ddp", plugins=[TorchElasticEnvironment()]
    )
    fabric.launch()
    module, wrapped = fabric.setup(base := model(), default_optimizer(base))
    batches = fabric.setup_dataloaders(DataLoader(data, batch_size=MICRO_BATCH, shuffle=True, drop_last=True))
    return loop(module, wrapped, forever(batches), fabric.backward,
                lambda: fabric.clip_gradients(module, wrapped, max_norm=CLIP))  # fmt: skip


def shardwise(data: Tokens, zero: int, folder: str) -> Callable[[], float]:
    trainer = sw.Trainer(
        model=model,
        loss=lambda outputs, batch: sw.Loss(*next_token_sums(outputs, batch["labels"])),
        optimizer=optimizer,
        schedule=factor,
        data=sw.Batches(data, last="drop"),
        global_batch=MICRO_BATCH * ranks.world(),
        clip_norm=CLIP,
        plan={"zero": zero},
        run=f"{folder}/zero-{zero}",
        checkpoint=sw.CheckpointPolicy(every_steps=0),
    )
    steps = trainer.run(steps=TOTAL)
    return lambda: next(steps).loss


def main(out: str, blocks: int, steps: int) -> None:
    torch.set_num_threads(1)
    ranks.start()
    folder = ranks.on_main(lambda: tempfile.mkdtemp(prefix="bench-"))
    data = Tokens(preset("decoder-2m").vocab_size)
    kinds: dict[str, Callable[[], float]] = {
        "torch DDP": torch_ddp(data),
        "shardwise zero 0": shardwise(data, 0, folder),
        "torch FSDP2": torch_fsdp2(data),
        "shardwise zero 3": shardwise(data, 3, folder),
    }
    for name, build in (("accelerate defaults", accelerate_ddp), ("fabric defaults", fabric_ddp)):
        try:
            kinds[name] = build(data)
        except ImportError as error:
            print(f"{name} is left out: {error} (make bench installs it)", file=sys.stderr)
    for step in kinds.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for block in range(blocks):
        # Alternate the order too, so that no kind always follows the same one.
        for name in list(kinds)[:: 1 if block % 2 == 0 else -1]:
            ranks.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                kinds[name]()
            times[name].append((time.perf_counter() - started) / steps)
    if ranks.is_main():
        Path(out).write_text(json.dumps(times))
    import os

    os._exit(0)  # the generators behind the steps would otherwise save once more


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
