"""What the pool's ranks run for guards in whole runs: a Trainer, with a fault planted on one rank by its body."""

import time
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import ranks
from shardwise.errors import RanksDiverged
from shardwise.inputs.arch import preset
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.plan.mesh import MeshShape
from shardwise.resilience.guards import Guards
from shardwise.train.step import local
from tests.distributed import split_runs


def guarded(
    folder: str, plan: dict[str, Any], every: int = 1, fault: str = "", on: int = 0, name: str = "", after: int = 3,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Six steps with a guard every `every`; the fault comes in the body of step `after`, on rank `on`."""
    trainer = split_runs.trainer_of(folder, plan, guard_every_steps=every, **settings)
    number = 0
    try:
        for step in trainer.run(steps=6):
            number = step.number
            if number == after and ranks.rank() == on:
                plant(trainer, fault, name)
    except RanksDiverged as error:
        return {"what": error.what, "why": error.why, "fix": error.fix, "stepped": number}
    return {"what": "", "stepped": number, "passed": trainer.guards.passed}


def plant(trainer: sw.Trainer, fault: str, name: str) -> None:
    if fault == "flip":
        flip(trainer, name)
    if fault == "untie":
        trainer.model.lm_head.weight = nn.Parameter(trainer.model.lm_head.weight.detach().clone())
    if fault == "silent":
        trainer.parallel.speaks = not trainer.parallel.speaks


def flip(trainer: sw.Trainer, name: str) -> None:
    """One bit of the first number that this rank holds; a lower one might be rounded away by the next update."""
    local(dict(trainer.model.named_parameters())[name].detach()).view(torch.int32).view(-1)[0] ^= 1 << 12


def two_losses(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, sw.Loss]:
    z = outputs.logsumexp(-1)[:, ::2].square()
    return {"main": split_runs.loss(outputs, batch), "z": sw.Loss(z.sum(), z.numel(), weight=0.1)}


def named(folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    return guarded(folder, plan, loss=two_losses, shape={"num_layers": 4, "num_kv_heads": 4})


def apart(folder: str) -> str:
    """A model whose first weights are another's on rank 1."""

    def build() -> nn.Module:
        module = Decoder(split_runs.arch(num_layers=2))
        if ranks.rank() == 1:
            module.norm.weight.data[0] += 1
        return module

    trainer = split_runs.trainer_of(folder, {"zero": 0}, model=build)
    try:
        next(trainer.run(steps=1))
    except RanksDiverged as error:
        return error.what
    return ""


def seconds(model: str) -> list[float]:
    """Of five guards on whole copies of a preset's decoder in fp32."""
    arch = preset(model)
    module = Decoder(arch)
    initialize_decoder(module, 0)
    guards = Guards(module, MeshShape(dp_replicate=ranks.world()), every_steps=1)
    told = {"counted": {"loss": 1.0}, "divided": {"loss": float(ranks.world())}, "alike": {"gradient norm": 1.0}}
    times = []
    for number in range(5):
        ranks.barrier()
        started = time.perf_counter()
        guards.check(number, **told)
        times.append(time.perf_counter() - started)
    return times
