"""What crosses a tensor-parallel group inside forward, and the transpose of it that crosses inside backward."""

from typing import Any

import torch
import torch.distributed as dist


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
    """Every rank's positions, on every rank. Shapes: [B, S / n, ...] -> [B, S, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered(gradient, ctx.group), None


class Scattered(torch.autograd.Function):
    """The sum over the ranks, of this rank's positions. Shapes: [B, S, ...] -> [B, S / n, ...]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group), None


class Joined(torch.autograd.Function):
    """Every rank's piece of the last dim, on every rank; pieces may differ in size. What follows is done on all alike,
    so a rank's gradient is its own piece. Shapes: [..., size of this rank] -> [..., sum of sizes]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, sizes: tuple[int, ...]) -> torch.Tensor:
        here = dist.get_rank(group)
        ctx.piece = (sum(sizes[:here]), sizes[here])
        widest = max(sizes)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
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


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Shapes: [B, S / n, ...] -> [B, S, ...]."""
    ranks = dist.get_world_size(group)
    first = x.transpose(0, 1).contiguous()  # [S / n, B, ...]: gathered pieces then lie one after another
    whole = first.new_empty((ranks * first.shape[0], *first.shape[1:]))
    dist.all_gather_into_tensor(whole, first, group=group)
    return whole.transpose(0, 1).contiguous()


def scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Shapes: [B, S, ...] -> [B, S / n, ...]."""
    ranks = dist.get_world_size(group)
    whole = x.transpose(0, 1).contiguous()
    mine = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    dist.reduce_scatter_tensor(mine, whole, group=group)
    return mine.transpose(0, 1).contiguous()
