"""What crosses a tensor-parallel group inside forward, and the transpose of it that crosses inside backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from shardwise.torch_private import gather_into, reduce_scatter


class Copied(torch.autograd.Function):
    """The same tensor on every rank; each rank's gradient is a part of it, and they are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum over the ranks, on every rank; its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Gathered(torch.autograd.Function):
    """Every rank's positions, on every rank, less those that fill up. Shapes: [B, ceil(S / n), ...] -> [B, S, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, length: int) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scattered(gradient, ctx.group), None, None


class Scattered(torch.autograd.Function):
    """The sum over the ranks, of this rank's positions; zeros fill up. Shapes: [B, S, ...] -> [B, ceil(S / n), ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group, ctx.length), None


class Joined(torch.autograd.Function):
    """Every rank's piece of the last dim, on every rank; pieces may differ in size. What follows is done on all alike,
    so a rank's gradient is its own piece. Shapes: [..., size of this rank] -> [..., sum of sizes]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, sizes: tuple[int, ...]) -> torch.Tensor:
        here = dist.get_rank(group)
        ctx.piece = (sum(sizes[:here]), sizes[here])
        widest = max(sizes)
        padded = F.pad(x, (0, widest - x.shape[-1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[..., :size] for piece, size in zip(pieces, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.narrow(-1, *ctx.piece).contiguous(), None, None


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def gathered(x: torch.Tensor, group: Any, length: int) -> torch.Tensor:
    """Shapes: [B, ceil(S / n), ...] -> [B, S, ...], S is `length`."""
    ranks = dist.get_world_size(group)
    first = x.transpose(0, 1).contiguous()  # [S / n, B, ...]: gathered pieces then lie one after another
    whole = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
    gather_into(whole, first, group)
    return whole[:length].transpose(0, 1).contiguous()


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Shapes: [B, S, ...] -> [B, ceil(S / n), ...]; the last ranks' missing positions are zero."""
    ranks = dist.get_world_size(group)
    whole = x.transpose(0, 1).contiguous()  # [S, B, ...]
    if missing := -whole.shape[0] % ranks:
        whole = torch.cat((whole, whole.new_zeros((missing, *whole.shape[1:]))))
    mine = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    reduce_scatter(mine, whole, group)
    return mine.transpose(0, 1).contiguous()
