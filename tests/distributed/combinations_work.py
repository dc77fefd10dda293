"""What the pool's ranks run for combinations: what a sharded stage holds at each moment inside the real pipeline."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.data.batches import Batches
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.parallel.parallelize import parallel_of
from shardwise.parallel.staging import Stage
from shardwise.train.own_loop import batches
from tests.distributed import work
from tests.distributed.zero_work import numbers_held


class Watched:
    """A stage, and the numbers that it holds when each moment first comes in a step."""

    def __init__(self, module: nn.Module, stage: Stage) -> None:
        self.stage, self.found, self.states, self.backwards = stage, {}, 0, 0
        mine = set(stage.parameters())
        self.named = {name: p for name, p in module.named_parameters() if p in mine}
        self.blocks = sorted({int(name.split(".")[1]) for name in self.named if name.startswith("blocks.")})

    def note(self, moment: str) -> None:
        self.found.setdefault(moment, numbers_held(self.stage, self.states))

    def watch(self, module: nn.Module) -> None:
        self.stage.register_forward_pre_hook(lambda *_: self._after_a_backward(), prepend=True)
        module.blocks[self.blocks[-1]].ffn.register_forward_hook(lambda *_: self.note("forward"))
        module.blocks[self.blocks[0]].attention_norm.register_forward_pre_hook(
            lambda _m, args: args[0].register_hook(lambda _g: self._in_a_backward()) and None
        )

    def before_backward(self, last: bool) -> None:
        self.note("in_flight")
        self._after_a_backward()
        self.backwards, self.last = self.backwards + 1, last

    def _after_a_backward(self) -> None:
        if self.backwards:
            self.note("between")

    def _in_a_backward(self) -> None:
        if self.last:
            self.note("backward")

    def sizes(self) -> dict[str, int]:
        """What plan/zero.py's table is computed from, of this stage."""

        def count(chosen: Any, held: Any = torch.Tensor.numel) -> int:
            return sum(held(p) for name, p in self.named.items() if chosen(name))

        first, share = f"blocks.{self.blocks[0]}.", lambda p: p.to_local().numel()
        return {
            "whole": count(lambda _: True),
            "share": count(lambda _: True, share),
            "root": count(lambda name: not name.startswith("blocks.")),
            "root_late": count(lambda name: not name.startswith(("blocks.", "embed"))),
            "block": count(lambda name: name.startswith(first)),
            "other_shares": count(lambda n: n.startswith("blocks.") and not n.startswith(first), share),
        }


def held_in_a_pipeline(*, zero: int, schedule: str, stages_per_rank: int) -> list[dict[str, Any]]:
    """Of each stage of this rank: numbers by moment in a second step, and the sizes that the table needs."""
    made = work.plan(
        4, zero=zero, global_batch=8, accumulation=4, mesh={"pp": 2, "dp_shard": 2}, schedule=schedule,
        stages_per_rank=stages_per_rank,
    )  # fmt: skip
    with torch.device("meta"):
        module: nn.Module = Decoder(work.arch(num_layers=8)).to(torch.float64)
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, 0))
    parallel = parallel_of(module)
    watched = {index: Watched(module, stage) for index, stage in parallel.pipeline.stages.items()}
    optimizer = torch.optim.AdamW(module.parameters())
    micros = iter(batches(Batches(work.UnevenTokens(30), workers=0), made))
    sw.forward_backward(module, next(micros), work.loss)
    optimizer.step()
    optimizer.zero_grad()
    announce = parallel.gradients.before_backward

    def before_backward(*, stage: int = 0, last: bool) -> None:
        watched[stage].before_backward(last)
        announce(stage=stage, last=last)

    parallel.gradients.before_backward = before_backward
    for one in watched.values():
        states = [optimizer.state[p]["exp_avg"] for p in one.named.values()]
        one.states = sum((s.to_local() if isinstance(s, DTensor) else s).numel() for s in states)
        one.note("rest")
        one.watch(module)
    sw.forward_backward(module, next(micros), work.loss)
    return [{"found": one.found, "sizes": one.sizes()} for one in watched.values()]


def parameters_held(*, world: int, mesh: dict[str, int], shape: dict[str, Any], **more: Any) -> int:
    """Numbers in this rank's part of the parameters, a tied one once."""
    made = work.plan(world, zero=0, global_batch=12, accumulation=4, mesh=mesh, **more)
    with torch.device("meta"):
        module: nn.Module = Decoder(work.arch(**shape)).to(torch.float64)
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, 0))
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
