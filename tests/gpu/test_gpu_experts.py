"""What one GPU shows of experts: torch's one kernel gives the same products, and a compiled layer the same layer."""

import pytest
import torch

from shardwise.inputs.arch import Experts
from shardwise.models.experts import SparseFeedForward
from shardwise.models.grouped import grouped_outer, grouped_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
ENDS = [0, 100, 100, 356, 1000]  # groups without rows, the first among them


@pytest.mark.parametrize("width", [512, 510])  # whole steps of 16 bytes: one kernel; else group by group
def test_grouped_products_on_a_gpu_are_those_of_fp32(width: int) -> None:
    rows, weight = (
        torch.randn(1000, 256, device="cuda").bfloat16(),
        torch.randn(5, width, 256, device="cuda").bfloat16(),
    )
    ends = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    product = grouped_product(rows, weight.transpose(1, 2), ends)
    sums = grouped_outer(product, rows, ends)
    for group, (first, end) in enumerate(zip([0, *ENDS[:-1]], ENDS, strict=True)):
        exact = rows[first:end].float() @ weight[group].float().t()
        outer = product[first:end].float().t() @ rows[first:end].float()
        # One rounding to bf16 (2^-9 of the value), and fp32 sums in another order.
        torch.testing.assert_close(product[first:end].float(), exact, rtol=2**-8, atol=1e-2)
        torch.testing.assert_close(sums[group].float(), outer, rtol=2**-8, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compiled_layer_of_experts_is_the_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = SparseFeedForward(256, Experts(8, 2, 512), gated=True)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    layer = layer.to("cuda", dtype)
    x, found = torch.randn(4, 64, 256, device="cuda", dtype=dtype), []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        layer.zero_grad()
        y = function(x)
        y.float().square().sum().backward()
        found.append([y.float(), *(p.grad.float().clone() for p in layer.parameters())])
    bound = 2**-6 if dtype == torch.bfloat16 else 1e-4  # in norm: a few roundings one after the other
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()
