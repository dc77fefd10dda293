"""What one rank's device does, measured: products by shape, attention, memory, a block's operators, the optimizer.

Bytes are counted as cost/layer_time.py and cost/data_time.py count them, so that they can be divided by what is found.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.inputs.hardware import Attention, Matmul
from shardwise.profiling.timing import seconds_a_call
from shardwise.torch_private import has_onednn_linear, norms, onednn_linear, scale_

Precision = Literal["fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STREAM_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}


class Product(NamedTuple):
    """[m, k] x [k, n]."""

    m: int
    n: int
    k: int


# Those of small decoders on CPU cores and of large ones on GPUs: tokens by width, forward and to the weights.
PRODUCTS = {
    "cpu": (
        Product(256, 256, 256), Product(1024, 256, 256), Product(1024, 768, 256), Product(1024, 512, 512),
        Product(1024, 1408, 512), Product(1024, 512, 1408), Product(512, 512, 1024), Product(1024, 1024, 1024),
        Product(2048, 768, 768), Product(4096, 512, 512), Product(1408, 512, 4096), Product(256, 256, 4096),
        Product(512, 160, 160), Product(512, 448, 160),
    ),
    "cuda": (
        Product(2048, 2048, 2048), Product(4096, 4096, 4096), Product(8192, 4096, 4096), Product(8192, 14336, 4096),
        Product(4096, 4096, 14336), Product(4096, 6144, 4096), Product(8192, 8192, 8192), Product(8192, 28672, 8192),
        Product(4096, 1024, 4096), Product(2048, 512, 4096), Product(16384, 4096, 1024), Product(4096, 32000, 4096),
    ),
}  # fmt: skip
ATTENTIONS = {"cpu": ((256, 64), (1024, 64), (256, 32)), "cuda": ((1024, 128), (4096, 128), (4096, 64), (16384, 128))}


def matmul(product: Product, precision: Precision, device: torch.device, budget: float) -> Matmul:
    """The faster of the products that torch has for x W^T, as shardwise.Linear takes it."""
    dtype = DTYPES[precision]
    x = torch.randn(product.m, product.k, dtype=dtype, device=device)
    weight = torch.randn(product.n, product.k, dtype=dtype, device=device)
    ways: list[Callable[[], Any]] = [lambda: F.linear(x, weight)]
    if device.type == "cpu" and precision == "fp32" and has_onednn_linear():
        ways.append(lambda: onednn_linear(x, weight))
    with torch.no_grad():
        best = min(seconds_a_call(way, budget / len(ways)) for way in ways)
    return Matmul(product.m, product.n, product.k, precision, 2 * product.m * product.n * product.k / best)


def attention(sequence: int, head_dim: int, precision: Precision, device: torch.device, budget: float) -> Attention:
    """Torch's causal attention with enough heads to fill the device."""
    heads = 8 if device.type == "cpu" else max(16, 2**17 // sequence)
    shape = (1, heads, sequence, head_dim)
    q, k, v = (torch.randn(shape, dtype=DTYPES[precision], device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=DTYPES[precision], device=device)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), grad)

    ahead = seconds_a_call(forward, budget / 3)
    behind = max(seconds_a_call(both, budget * 2 / 3) - ahead, ahead / 10)
    flops = 2 * heads * sequence * (sequence / 2) * 2 * head_dim
    return Attention(sequence, head_dim, precision, flops / ahead, 2.5 * flops / behind)


def memory_bytes_per_second(device: torch.device, budget: float) -> float:
    """Of a sum of two arrays into a third, none of which a cache holds: three times their bytes."""
    count = STREAM_BYTES[device.type] // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    return 3 * 4 * count / seconds_a_call(lambda: torch.add(a, b, out=c), budget)


def host_to_device_bytes_per_second(device: torch.device, budget: float) -> float:
    """From pinned memory of the host."""
    source = torch.ones(2**26, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(source, device=device)
    return source.numel() / seconds_a_call(lambda: there.copy_(source, non_blocking=True), budget)


def loss_bytes_per_second(device: torch.device, budget: float) -> float:
    """Of a cross entropy and its gradient: 12 bytes a logit each, as `head` counts an unfused one."""
    rows, columns = (1024, 1024) if device.type == "cpu" else (4096, 32000)
    logits = torch.randn(rows, columns, device=device, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64, device=device)

    def both() -> None:
        torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)

    return 2 * 12 * rows * columns / seconds_a_call(both, budget)


def optimizer_bytes_per_second(device: torch.device, budget: float) -> float:
    """Of the gradients' norm, their scaling and AdamW over fp32 parameters: 32 bytes a parameter at the least.

    Two readings of a gradient, and a master and two states read and written, as `optimizer_seconds` counts them.
    """
    sizes = [(512, 1024)] * 8 if device.type == "cpu" else [(4096, 4096)] * 8
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    def update() -> None:
        norms(gradients)
        scale_(gradients, 1.0000001)
        optimizer.step()

    numbers = sum(parameter.numel() for parameter in parameters)
    return 32 * numbers / seconds_a_call(update, budget)
