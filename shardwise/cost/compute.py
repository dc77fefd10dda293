"""Seconds of one device's work: matrix products by shape, attention, and what memory bandwidth bounds. No torch.

Everything broadcasts: a device, a shape or a plan may be one row or many. Arrays are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.cost.calibration import TimeConstants, time_constants
from shardwise.cost.probed import ProductLaw
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import Gpu, Matmul, Measured, Precision

Floats = NDArray[np.float64]

# Of a GPU that does not say how many multiprocessors it has.
_USUAL_MULTIPROCESSORS = 132
# Output tiles of a matrix product and their speed beside the largest: a smaller one reads each operand more often.
# Recalled from CUTLASS's usual tiles; fitted together with waves on gemm_measured.csv.
TILES = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.93), (128.0, 64.0, 0.75), (64.0, 64.0, 0.55))


def numbers(value: float | int) -> Floats:
    """One row."""
    return np.asarray([value], dtype=np.float64)


@dataclass(frozen=True)
class Rates:
    """What a device does: FLOPs a second, bytes a second, and how many products run side by side.

    linear: peak of projections in the compute precision; half: of what stays in 16 bits under fp8. flops_per_joule: of
    16-bit products at the peak, 0 where the watts are not known. best: the fastest product measured, as a share of the
    16-bit peak, else 1; best_linear: the same of projections, as a share of their own peak. low_precision: 1 under
    fp8. hopper: 1 where FlashAttention-2 leaves the tensor cores' new
    instructions unused. serial: 1 for a CPU core, where nothing runs beside a product, which has no tiles either;
    flop and number: seconds of one in the law through measured products, 0 where there is none. slowdown: what
    measured products of a GPU take, as times the model's. host: of a core that starts operators, less than 1 where
    ranks share it.
    """

    linear: Floats
    half: Floats
    memory: Floats
    multiprocessors: Floats
    flops_per_joule: Floats
    best: Floats
    best_linear: Floats
    low_precision: Floats
    element_bytes: Floats
    hopper: Floats
    serial: Floats
    flop: Floats
    number: Floats
    slowdown: Floats
    host: Floats

    @classmethod
    def of(cls, gpu: Gpu, precision: Precision, measured: Measured | None = None) -> Self:
        """Of one device, as published or probed. Raises: RecipeError where a peak or the bandwidth is not known."""
        low = precision == "fp8" and gpu.kind == "gpu"
        half_precision: Precision = "bf16" if low else precision
        half = _peak(gpu, half_precision)
        bandwidth = gpu.hbm_bytes_per_second or (_CPU_CORE_BANDWIDTH if gpu.kind == "cpu" else None)
        if bandwidth is None:
            raise _unknown(gpu, "memory bandwidth")
        watts = gpu.power_watts or 0.0
        sixteen = half_precision in ("bf16", "fp16") and gpu.kind == "gpu"
        reached = gpu.measured_bf16_flops_per_second if sixteen else gpu.measured_fp32_flops_per_second
        best = min(1.0, reached / half) if reached else 1.0
        linear, eight = _peak(gpu, precision) if low else half, gpu.measured_fp8_flops_per_second
        products = [one for one in measured.matmuls if one.precision == half_precision] if measured else []
        law = ProductLaw.through(products) if gpu.kind == "cpu" else None
        found = cls(
            linear=numbers(linear),
            half=numbers(half),
            memory=numbers(bandwidth),
            multiprocessors=numbers(1 if gpu.kind == "cpu" else gpu.multiprocessors or _USUAL_MULTIPROCESSORS),
            flops_per_joule=numbers(half / watts if watts else 0.0),
            best=numbers(best),
            best_linear=numbers(min(1.0, eight / linear) if low and eight else best),
            low_precision=numbers(low),
            element_bytes=numbers({"fp64": 8, "fp32": 4}.get(precision, 2)),
            hopper=numbers(gpu.name.startswith(("H100", "H200", "H800", "H20", "GH200"))),
            serial=numbers(gpu.kind == "cpu"),
            flop=numbers(law.flop if law else 0.0),
            number=numbers(law.number if law else 0.0),
            slowdown=numbers(1.0),
            host=numbers(1.0),
        )
        return found.corrected(products) if products and gpu.kind == "gpu" else found

    def corrected(self, products: Sequence[Matmul]) -> Self:
        """With the mean of measured over modelled seconds of these 16-bit or fp32 products, in the logarithm."""
        m, n, k, speed = (
            np.array([float(getattr(one, name)) for one in products]) for name in ("m", "n", "k", "flops_per_second")
        )
        known = msgspec.structs.replace(time_constants(), matmul_share=1.0)
        modelled = matmul(Pace.of(self, known), m, n, k, known, half=True)
        return replace(self, slowdown=numbers(np.exp(np.mean(np.log(2 * m * n * k / speed / modelled)))))

    def on(self, products: Floats, memory: Floats, host: Floats) -> Self:
        """Of a rank that is so many times as fast as one on a core of its own."""
        return replace(
            self, linear=self.linear * products, half=self.half * products, memory=self.memory * memory,
            flop=self.flop / products, number=self.number / products, host=self.host * host,
        )  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Seconds a FLOP of products, where tiles and their issue bound it and where power does; and seconds a byte.

    attention: seconds a FLOP of fused attention at its best.
    """

    linear_issue: Floats
    linear_power: Floats
    half_issue: Floats
    half_power: Floats
    attention: Floats
    byte: Floats
    multiprocessors: Floats
    element_bytes: Floats
    low_precision: Floats
    hopper: Floats
    serial: Floats
    flop: Floats
    number: Floats

    @classmethod
    def of(cls, rates: Rates, known: TimeConstants) -> Self:
        """Tensor cores with more FLOPs a joule than their power allows throttle: a power law through measured products.

        Fitted on gemm_measured.csv (A100 PCIe at 300 W, B200 at 1000 W); no more than the best product measured in that
        precision: eight bits do twice the FLOPs at most, and reach a smaller share of their peak.
        """
        excess = np.maximum(rates.flops_per_joule / _EASY_FLOPS_PER_JOULE, 1e-3)
        powered = np.where(rates.flops_per_joule > 0, known.power_share * excess**-known.power_exponent, 1.0)
        issue, linear_issue = (np.minimum(known.issue_share, best) for best in (rates.best, rates.best_linear))
        power = np.minimum(powered, issue) * known.matmul_share
        low = np.where(rates.low_precision > 0, known.low_precision_share, 1.0)
        linear_power = np.minimum(power * low, linear_issue)
        return cls(
            linear_issue=rates.slowdown / (rates.linear * linear_issue),
            linear_power=rates.slowdown / (rates.linear * linear_power),
            half_issue=rates.slowdown / (rates.half * issue),
            half_power=rates.slowdown / (rates.half * power),
            attention=1 / rates.half,
            byte=1 / (rates.memory * known.memory_share),
            multiprocessors=rates.multiprocessors,
            element_bytes=rates.element_bytes,
            low_precision=rates.low_precision,
            hopper=rates.hopper,
            serial=rates.serial,
            flop=rates.flop,
            number=rates.number,
        )


# An A100's 312 TFLOP/s at 400 W: what the law is relative to.
_EASY_FLOPS_PER_JOULE = 0.78e12
# A core's share of what two or more cores of a server draw from memory. Source: recalled, 5 to 12 GB/s a core.
_CPU_CORE_BANDWIDTH = 8e9


def _peak(gpu: Gpu, precision: Precision) -> float:
    if precision == "fp8":
        peak = gpu.dense_fp8_flops_per_second
    else:
        peak = gpu.peak_flops_per_second(precision)
    if peak is None and precision == "bf16":
        peak = gpu.dense_fp32_flops_per_second  # without bf16 units it is computed in fp32
    if peak is None:
        raise _unknown(gpu, f"dense {precision} peak")
    return peak


def _unknown(gpu: Gpu, what: str) -> RecipeError:
    return RecipeError(
        f"The {what} of {gpu.name!r} is not known.",
        why="predicting a step's time needs it",
        fix="choose another precision or a GPU of the catalogue, or measure this one with `shardwise doctor --measure`",
    )


def matmul_seconds(
    gpu: Gpu, m: Floats, n: Floats, k: Floats, precision: Precision, constants: TimeConstants | None = None
) -> Floats:
    """Seconds of C[m, n] = A[m, k] B[k, n] on one device."""
    known = constants or time_constants()
    return matmul(Pace.of(Rates.of(gpu, precision), known), m, n, k, known)


def matmul(pace: Pace, m: Floats, n: Floats, k: Floats, known: TimeConstants, *, half: bool = False) -> Floats:
    """The same at a given pace. half: kept in 16 bits under fp8. 0 where n is 0."""
    return grouped_matmul(pace, np.ones(1), m, n, k, known, half=half)


def grouped_matmul(
    pace: Pace, groups: Floats, m: Floats, n: Floats, k: Floats, known: TimeConstants, *, half: bool = False
) -> Floats:
    """Seconds of `groups` products of [m, k] by [k, n] in one launch.

    The slowest of: tiles of the output in waves over the multiprocessors with a ramp in k (a wave that is not full
    costs up to a whole one), the power that the FLOPs need, and reading and writing the operands. On a CPU core, by the
    law through measured products where there is one (cost/probed.py). 0 where n is 0.
    """
    issue, power = (pace.half_issue, pace.half_power) if half else (pace.linear_issue, pace.linear_power)
    units = pace.multiprocessors
    best: Floats = np.asarray(np.inf)
    for tile_m, tile_n, speed in TILES:
        waves = groups * np.ceil(m / tile_m) * np.ceil(n / tile_n) / units
        whole = known.wave_sharpness * np.ceil(waves) + (1 - known.wave_sharpness) * waves
        best = np.minimum(best, whole * (2 * tile_m * tile_n / speed))
    tiled = best * units * (k + known.depth_ramp) * issue
    flops, operands = 2 * groups * m * n * k, groups * (m * k + k * n + m * n)
    moved = known.operand_passes * pace.element_bytes * operands * pace.byte
    tiled = np.where(pace.serial > 0, flops * issue, tiled)
    slowest = np.maximum(np.maximum(tiled, flops * power), moved)
    slowest = np.where(pace.flop > 0, flops * pace.flop + operands * pace.number, slowest)
    return np.where((n > 0) & (groups > 0), slowest + known.launch_seconds, 0.0)


@dataclass(frozen=True)
class Attention:
    """One layer's attention on one rank: heads here, sizes of a head, rows of queries and mean positions looked at.

    fused: no score matrix is written (1 or 0). tuned: by the vendor's kernels, not FlashAttention-2's.
    """

    heads: Floats
    key_dim: Floats
    value_dim: Floats
    rows: Floats
    attended: Floats
    whole: Floats
    fused: Floats
    tuned: Floats


def attention_forward(pace: Pace, a: Attention, known: TimeConstants) -> Floats:
    """Seconds of softmax(Q K^T) V. Fused: what the mask leaves; else the whole square, and its passes over memory.

    Source: FLOPs 2 rows x positions x heads x (key + value) as in planners.md, section 3.
    """
    fused = _fused(pace, a, known) / known.attention_forward_share
    return np.where(a.fused > 0, fused, _scored(pace, a, known, products=1.0)) + known.launch_seconds


def attention_backward(pace: Pace, a: Attention, known: TimeConstants) -> Floats:
    """Five products for two when fused, since scores are made again; else four."""
    fused = 2.5 * _fused(pace, a, known) / known.attention_backward_share
    return np.where(a.fused > 0, fused, _scored(pace, a, known, products=2.0)) + known.launch_seconds


def _fused(pace: Pace, a: Attention, known: TimeConstants) -> Floats:
    """At the full rate of products; a small head or too few rows of work leave units idle."""
    flops = 2 * a.rows * a.attended * a.heads * (a.key_dim + a.value_dim)
    depth = 1 + known.attention_head_ramp / a.key_dim
    # Work comes in blocks of 128 rows of one head.
    blocks = a.rows / 128 * a.heads
    idle = 1 + known.attention_row_ramp * pace.multiprocessors / np.maximum(blocks, 1.0)
    plain = known.attention_plain_share * np.where(pace.hopper > 0, known.attention_hopper_share, 1.0)
    return flops * depth * idle * pace.attention / np.where(a.tuned > 0, 1.0, plain)


def _scored(pace: Pace, a: Attention, known: TimeConstants, products: float) -> Floats:
    flops = 2 * a.rows * a.whole * a.heads * (a.key_dim + a.value_dim)
    # A head dim that is no multiple of 8 (16 bytes) keeps these products off the tensor cores.
    depth = 1 + known.depth_ramp / a.key_dim + np.where(a.key_dim % 8 > 0, known.unaligned_slowdown, 0.0)
    passes = known.score_passes * pace.element_bytes * a.rows * a.whole * a.heads * pace.byte
    return products * flops * depth * pace.half_issue + (1.0 if products == 1.0 else 1.25) * passes
