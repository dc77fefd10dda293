"""Cross entropy over logits whose vocabulary is split over ranks: three small sums cross, the logits do not."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sharded_cross_entropy(logits: DTensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    """The sum of cross entropies (nats) over the labels that are not `ignored`, the same on every rank.

    Shapes: [B, S, V] sharded along V by torch.chunk's rule, [B, S] -> []. Collective over the logits' mesh.
    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    begin = mesh.get_local_rank() * -(-vocabulary // mesh.size())
    total: torch.Tensor = _CrossEntropy.apply(
        logits.to_local().flatten(0, -2), labels.flatten(), min(begin, vocabulary), ignored, mesh.get_group()
    )
    return total


class _CrossEntropy(torch.autograd.Function):
    """Shapes: [N, this rank's part of V], [N] -> []."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, begin: int, ignored: int, group: Any
    ) -> torch.Tensor:
        size = logits.shape[1]
        largest = logits.max(dim=1).values if size else logits.new_full((len(logits),), float("-inf"))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest[:, None]).exp()
        counted = labels != ignored
        mine = counted & (labels >= begin) & (labels < begin + size)
        at = (labels - begin).masked_fill(~mine, 0)[:, None]
        own = logits.gather(1, at).squeeze(1) - largest if size else torch.zeros_like(largest)
        # [2, N]: the denominators, and the label's own logit, which one rank has.
        sums = torch.stack((exponentials.sum(dim=1), own.masked_fill(~mine, 0.0)))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), at, mine, counted)
        return (sums[0].log() - sums[1]).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        softmax, at, mine, counted = ctx.saved_tensors
        of_logits = softmax * counted[:, None]
        if of_logits.shape[1]:
            of_logits.scatter_add_(1, at, -mine[:, None].to(of_logits.dtype))
        return of_logits * gradient, None, None, None, None
