"""Faults of the kind that split training has, planted one at a time, to show that parity sees each of them.

A mutation changes the engine inside a forked rank, which ends with it. None is ever planted unless a test asks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise import ranks
from shardwise.models import decoder
from shardwise.parallel import buckets, collectives, pipeline
from shardwise.parallel import parallelize as passes
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.parallel.ties import Ties
from shardwise.plan.mesh import MeshShape
from shardwise.train import evaluate, step


class Deaf:
    """A module in which one function does nothing but hand its argument back."""

    def __init__(self, module: Any, name: str, instead: Callable[..., Any]) -> None:
        self.module, self.name, self.instead = module, name, instead

    def __getattr__(self, name: str) -> Any:
        return self.instead if name == self.name else getattr(self.module, name)


def plant(name: str) -> None:
    """Before anything is split. Raises: KeyError for an unknown name."""
    if name:
        PLANTED[name]()


def _drop_reduce() -> None:
    buckets.dist = Deaf(dist, "all_reduce", lambda *args, **kwargs: None)  # type: ignore[assignment]


def _average_shards() -> None:
    set_factor = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda self, _: set_factor(self, float(ranks.world()))  # type: ignore


def _scale_loss() -> None:
    objective = step._objective

    def scaled(*args: Any) -> torch.Tensor:
        return objective(*args) * ranks.world()

    step._objective = scaled


def _average_micro_batches() -> None:
    accumulate = step.accumulate

    def averaged(parallel: Any, work: Any) -> Any:
        work.scale = 1.0 / len(work.micros)
        return accumulate(parallel, work)

    step.accumulate = averaged


def _drop_micro_batch() -> None:
    accumulate = step.accumulate

    def shorter(parallel: Any, work: Any) -> Any:
        work.micros = work.micros[:-1]
        return accumulate(parallel, work)

    step.accumulate = shorter


def _skip_norm_reduction() -> None:
    clip = step.clip_grad_norm

    def alone(*args: Any) -> float:
        step.ranks = Deaf(ranks, "all_reduce_sum", lambda tensor: tensor)  # type: ignore[assignment]
        try:
            return clip(*args)
        finally:
            step.ranks = ranks

    step.clip_grad_norm = alone


def _norm_counts_copies() -> None:
    passes.owns = lambda mesh, parameter: True


def _same_samples() -> None:
    MeshShape.data_coord = lambda self, rank: 0  # type: ignore[method-assign]


def _reuse_dropout_seed() -> None:
    seed_of = step.seed_of
    step.seed_of = lambda seed, use, number, coord, *rest: seed_of(seed, use, number, 0, *rest)


def _repeat_dropout() -> None:
    step.seed_of = lambda *parts: 1


def _evaluate_alone() -> None:
    agree = step.agree

    def alone(*args: Any) -> Any:
        step.ranks = Deaf(ranks, "all_reduce_sum", lambda tensor: tensor)  # type: ignore[assignment]
        try:
            return agree(*args)
        finally:
            step.ranks = ranks

    evaluate.agree = alone


def _drop_tp_sum() -> None:
    TensorParallel.finish = lambda self: None  # type: ignore[method-assign]


def _drop_tp_forward() -> None:
    """What a row linear gives is cut into the ranks' parts of the sequence without being summed."""

    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        return x.tensor_split(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()

    collectives.Scattered.forward = staticmethod(forward)  # type: ignore[method-assign]


def _drop_tie_sum() -> None:
    Ties.finish = lambda self: None  # type: ignore[method-assign]


def _swap_stages() -> None:
    """The first block gets the values of the last one, and the last those of the first."""
    fill, initialize = decoder.fill_normal_, decoder.Decoder.init_weights

    def init(self: decoder.Decoder, seed: int | None = None) -> None:
        first, last = "blocks.0.", f"blocks.{self.arch.num_layers - 1}."

        def swapped(parameter: Any, *, name: str, **rest: Any) -> None:
            other = {first: last, last: first}.get(name[: len(first)])
            fill(parameter, name=name if other is None else other + name[len(first) :], **rest)

        decoder.fill_normal_ = swapped
        initialize(self, seed)

    decoder.Decoder.init_weights = init  # type: ignore[method-assign]


def _garble_crossing() -> None:
    give = pipeline._Run._give
    pipeline._Run._give = lambda self, action, tensor: give(  # type: ignore[method-assign]
        self, action, tensor * 1.001 if action.kind == "F" else tensor
    )


def _later() -> None:
    """Planted at its own place below."""


PLANTED: dict[str, Callable[[], None]] = {
    "drop-reduce": _drop_reduce,
    "average-shards": _average_shards,
    "scale-loss": _scale_loss,
    "average-micro-batches": _average_micro_batches,
    "drop-micro-batch": _drop_micro_batch,
    "skip-norm-reduction": _skip_norm_reduction,
    "norm-counts-copies": _norm_counts_copies,
    "same-samples": _same_samples,
    "reuse-dropout-seed": _reuse_dropout_seed,
    "repeat-dropout": _repeat_dropout,
    "evaluate-alone": _evaluate_alone,
    "drop-tp-sum": _drop_tp_sum,
    "drop-tp-forward": _drop_tp_forward,
    "drop-tie-sum": _drop_tie_sum,
    "swap-stages": _swap_stages,
    "garble-crossing": _garble_crossing,
    "half-stage": _later,
    "untie-head": _later,
    "swap-blocks": _later,
    "one-layer": _later,
    "forget-states": _later,
    "forget-position": _later,
}


def after_splitting(name: str, module: nn.Module) -> None:
    if name == "untie-head":
        module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
    if name == "swap-blocks":
        with torch.no_grad():
            first, last = (dict(module.blocks[index].named_parameters()) for index in (0, 1))
            for key in first:
                held = step.local(first[key]).clone()
                step.local(first[key]).copy_(step.local(last[key]))
                step.local(last[key]).copy_(held)


def after_backward(name: str, module: nn.Module) -> None:
    if name == "half-stage" and passes.parallel_of(module).mesh.index("pp") == 0:
        step.scale_gradients(step.local_gradients(passes.parallel_of(module)), 0.5)
    if name == "one-layer":
        for key, parameter in module.named_parameters():
            if ".1." in key and parameter.grad is not None:
                step.local(parameter.grad).add_(1e-6)


def after_resume(name: str, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    if name == "forget-states":
        optimizer.state.clear()
    if name == "forget-position":
        batches.load_state_dict({**batches.state_dict(), "position": 0})
