"""What the pool's ranks run for loops of a user's own: modules, checkpoints, guards, and faults that are planted."""

from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import ranks
from shardwise.errors import ModelError, RanksDiverged
from shardwise.parallel.parallelize import parallel_of
from shardwise.train.step import local
from tests.distributed.work import UnevenTokens, loss, whole
from tests.unit.user_modules import Model

SAMPLES = 30


class Loop:
    """A loop over a user's module, as docs/guides/own-loop.md writes it."""

    def __init__(self, module: nn.Module, plan: dict[str, Any], folder: str = "", **settings: Any) -> None:
        self.plan = sw.init(plan, global_batch=12, micro_batch=2, precision="fp64", **settings)
        self.module = sw.parallelize(module.to(torch.float64), self.plan)
        self.optimizer = sw.build_optimizer(self.module, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
        self.data = sw.batches(sw.Batches(UnevenTokens(SAMPLES), workers=0), self.plan)
        self.checkpointer = sw.Checkpointer(folder, self.module, self.optimizer, data=self.data) if folder else None
        self.batches = iter(self.data)

    def step(self) -> list[float]:
        outcome = sw.forward_backward(self.module, next(self.batches), loss)
        norm = sw.clip_grad_norm(self.module, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [outcome.loss, norm]


def model(fault: str = "", heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Model(fault, heads=heads)


def told(plan: dict[str, Any], fault: str = "", steps: int = 2, **settings: Any) -> dict[str, Any]:
    """What a loop says: its losses and norms, or the error, the same on every rank."""
    try:
        loop = Loop(model(fault), plan, **settings)
        return {"steps": [loop.step() for _ in range(steps)]}
    except ModelError as error:
        return {"what": error.what, "why": error.why, "fix": error.fix}


def resumed(folder: str, plan: dict[str, Any], save_at: int = 0, steps: int = 4) -> dict[str, Any]:
    """Go on from what lies in the folder, to the end or to a save; the tied weight as each rank holds it."""
    loop = Loop(model("tied"), plan, folder)
    start = loop.checkpointer.resume(strict_world=False)
    seen = [loop.step() for _ in range(start, save_at or steps)]
    if save_at:
        loop.checkpointer.save(save_at)
    held = {name: whole(p).tolist() for name, p in loop.module.named_parameters() if name.startswith(("embed", "head"))}
    return {"start": start, "steps": seen, "tied": held}


def checked(plan: dict[str, Any], fault: str = "", on: int = 1, name: str = "norm.weight") -> dict[str, Any]:
    """Four steps with a look before the first and after every second; a fault comes after step 3, on rank `on`."""
    loop = Loop(model("tied"), plan)
    if fault == "apart" and ranks.rank() == on:
        flip(loop.module, name)
    done = -1
    try:
        sw.check_ranks(loop.module)
        for done in range(1, 5):
            if done == 4 and fault == "silent" and ranks.rank() == on:
                parallel_of(loop.module).speaks ^= True
            loop.step()
            if done == 3 and fault == "flip" and ranks.rank() == on:
                flip(loop.module, name)
            if done == 3 and fault == "untie" and ranks.rank() == on:
                loop.module.head.weight = nn.Parameter(loop.module.head.weight.detach().clone())
            if done % 2 == 0:
                sw.check_ranks(loop.module, done)
    except RanksDiverged as error:
        return {"what": error.what, "why": error.why, "fix": error.fix, "done": done}
    return {"what": "", "done": done}


def flip(module: nn.Module, name: str) -> None:
    """One bit of the first number that this rank holds; a lower one might be rounded away by the next update."""
    local(dict(module.named_parameters())[name].detach()).view(torch.int64).view(-1)[0] ^= 1 << 40


class Unused(Model):
    """Parameters that take no part in the loss: in a block, and outside of the blocks, where a stage has its own."""

    def __init__(self) -> None:
        super().__init__(heads=2)
        self.blocks[2].extra = nn.Linear(3, 5, bias=False)
        self.spare = nn.Linear(7, 3, bias=False)


def unused(plan: dict[str, Any], declared: bool) -> dict[str, Any]:
    """Two steps of a module with parameters that no loss reaches: the error, or what the declared ones became."""
    torch.manual_seed(0)
    names = ("blocks.2.extra.weight", "spare.weight")
    try:
        loop = Loop(Unused(), plan, unused_parameters=names if declared else ())
        before = {n: whole(p) for n, p in loop.module.named_parameters() if n in names}
        steps = [loop.step() for _ in range(2)]
    except ModelError as error:
        return {"what": error.what, "fix": error.fix}
    after = {n: whole(p) for n, p in loop.module.named_parameters() if n in names}
    # AdamW's weight decay alone moves what has gradient zero: 1 - lr x 0.01 a step.
    moved = {n: float(abs(after[n] - before[n] * (1 - 1e-4) ** 2).max()) for n in before}
    return {"steps": steps, "moved": moved}
