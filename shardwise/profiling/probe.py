"""What this machine can do and what a module asks of it, by trying."""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import functional as F

from shardwise.errors import RecipeError
from shardwise.inputs.hardware import find_gpu

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

PROBE_SECONDS = 0.1
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SIZE = 512  # three fp32 matrices of it take 3 MiB: large enough for full speed, small enough for a cache


def peak_flops_per_second(precision: Precision) -> float | None:
    """The dense peak of this rank's device; None where it is not known.

    A GPU's is the published number of exactly this name. CPU cores have none worth the name: a CPU rank's is
    the best product of two matrices seen in a tenth of a second, on the threads that this process uses.
    """
    if torch.cuda.is_available():
        return gpu_peak(torch.cuda.get_device_name(), precision)
    return cpu_peak(_DTYPES[precision])


def gpu_peak(name: str, precision: Precision) -> float | None:
    """The catalogue's dense peak for a device name as the driver gives it; None for an unknown name."""
    try:
        return find_gpu(name).value().peak_flops_per_second(precision)
    except RecipeError:
        return None


def cpu_peak(dtype: torch.dtype, seconds: float = PROBE_SECONDS) -> float:
    """FLOPs a second of the faster of torch's matrix products (MKL, oneDNN), the best seen in `seconds`."""
    a, b = torch.ones(_SIZE, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
    products: list[Callable[[], Any]] = [lambda: torch.mm(a, b)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():
        packed_a, packed_b = a.to_mkldnn(), b.to_mkldnn()
        products.append(lambda: F.linear(packed_a, packed_b))
    with torch.no_grad():
        return 2 * _SIZE**3 / min(_fastest(product, seconds / len(products)) for product in products)


def _fastest(product: Callable[[], Any], seconds: float) -> float:
    """The shortest of the calls made in `seconds`, after one that warms up."""
    product()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        product()
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended >= deadline:
            return best
