"""Products of rows, sorted by group, with each group's own matrix: two operators whose shapes no value decides.

So fake tensors, meta and torch's compiler know them by their shapes alone, for every dtype. torch's `grouped_mm` is
behind them where it is one kernel: bf16 on a GPU. It knows no fp64, no widths that are not whole steps of 16 bytes, and
no fake tensors but bf16. Elsewhere the groups are multiplied one after another, on a CPU as fast as `Linear`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.models.linear import onednn_serves
from shardwise.torch_private import onednn_linear

_STEP_BYTES = 16


@torch.library.custom_op("shardwise::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row times its group's matrix. ends[g]: the first row behind group g; the last is the number of rows.

    Shapes: [n, k], [groups, k, m], int32 [groups] -> [n, m].
    """
    if _one_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    product = rows.new_empty(rows.shape[0], matrices.shape[2])
    for group, (first, end) in enumerate(_spans(ends)):
        mine, matrix, out = rows[first:end], matrices[group], product[first:end]
        if onednn_serves(mine, matrix):
            out.copy_(onednn_linear(mine, matrix.t()))
        else:
            torch.mm(mine, matrix, out=out)
    return product


@torch.library.custom_op("shardwise::grouped_outer", mutates_args=())
def grouped_outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of each group, the sum over its rows of left x right: zero where it has none.

    Shapes: [n, k], [n, m], int32 [groups] -> [groups, k, m].
    """
    if _one_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    sums = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    for group, (first, end) in enumerate(_spans(ends)):
        mine, other, out = left[first:end].t(), right[first:end], sums[group]
        if onednn_serves(mine, other):
            out.copy_(onednn_linear(mine, other.t()))
        else:
            torch.mm(mine, other, out=out)
    return sums


def _spans(ends: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The rows of each group. On a GPU this waits for the device, once a product."""
    first = 0
    for end in ends.tolist():
        yield first, end
        first = end


def _one_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch multiplies these by one kernel: bf16, on a GPU that has it, all widths in whole steps."""
    if a.device.type != "cuda" or not a.dtype == b.dtype == torch.bfloat16:
        return False
    whole = all(width * a.element_size() % _STEP_BYTES == 0 for width in (a.shape[1], b.shape[-1]))
    return whole and torch.cuda.get_device_capability(a.device) >= (8, 0)


@grouped_product.register_fake
def _product_shape(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@grouped_outer.register_fake
def _outer_shape(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


class _Product(torch.autograd.Function):
    """`grouped_product` with each group's weight as a linear layer has it, and its gradients."""

    @staticmethod
    def forward(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = grouped_product(rows, weight.transpose(1, 2), ends)
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_rows = grouped_product(gradient, weight, ends) if ctx.needs_input_grad[0] else None
        for_weight = grouped_outer(gradient, rows, ends) if ctx.needs_input_grad[1] else None
        return for_rows, for_weight, None


class GroupedLinear(nn.Module):
    """As many bias-free linear layers as there are groups, whose weights stand one below the other in one matrix.

    One matrix, so that sharding over ranks cuts between rows, not between groups: of eight experts sixteen ranks have
    half a one each. Shapes: rows [n, in_features] sorted by group, ends int32 [groups] -> [n, out_features].
    """

    def __init__(self, groups: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * out_features, in_features))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # [groups * out, in] -> [groups, out, in]
        product: torch.Tensor = _Product.apply(rows, self.weight.unflatten(0, (self.groups, -1)), ends)
        return product
