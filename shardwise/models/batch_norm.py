"""Batch normalisation over the samples of all ranks, on any device, so that N ranks compute what one would.

torch's SyncBatchNorm runs on GPUs only, and expects gradients to be averaged over ranks; ours are summed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.torch_private import BatchNorm


class BatchNormOverRanks(nn.Module):
    """A BatchNorm whose mean and variance are those of the micro-batch of all ranks together.

    Holds the parameters and buffers of the module that it replaces, under their names. Collective in
    training.
    Shapes: [N, C, ...] -> the same; N may differ by rank.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(self, replaced: BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum, self.num_features = replaced.eps, replaced.momentum, replaced.num_features
        self.track_running_stats = replaced.track_running_stats
        self.register_parameter("weight", replaced.weight)
        self.register_parameter("bias", replaced.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(replaced, name))
        self.training = replaced.training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or self.running_mean is None or self.running_var is None:
            mean, variance, count = _moments(x)
            if self.training and self.running_mean is not None:
                self._track(mean.detach(), variance.detach(), count)
        else:
            mean, variance = self.running_mean, self.running_var
        shape = (1, self.num_features, *([1] * (x.ndim - 2)))
        y = (x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)  # [C] -> [1, C, 1, ...]
        if self.weight is not None and self.bias is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """The running statistics, as torch keeps them: the variance without bias."""
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.add_(share * (mean - self.running_mean))
        self.running_var.add_(share * (unbiased - self.running_var))


def over_ranks(module: nn.Module) -> nn.Module:
    """`module` with every BatchNorm replaced, in place (a root that is one is returned anew); names stay."""
    if isinstance(module, BatchNorm):
        return BatchNormOverRanks(module)
    for name, child in list(module.named_children()):
        replaced = over_ranks(child)
        if replaced is not child:
            setattr(module, name, replaced)
    return module


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance by channel, in fp32 at least, and the count, over all ranks. Collective.

    Two passes: the second sums squares of what is centred, so no large numbers cancel.
    """
    dims = [0, *range(2, x.ndim)]
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    here = wide.new_tensor([x.numel() / x.shape[1]])
    sums = _SumOverRanks.apply(torch.cat((wide.sum(dims), here)))  # [C] and [1] -> [C + 1]
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(1, -1, *([1] * (x.ndim - 2)))  # [C] -> [1, C, 1, ...]
    return mean, _SumOverRanks.apply(centred.square().sum(dims)) / count, count


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Each rank's share of the loss depends on it, so its gradient is summed as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _summed(gradient)


def _summed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x
