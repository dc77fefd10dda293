"""Seconds of one device's work: matrix products by shape, attention, and what memory bandwidth bounds. No torch.

Everything broadcasts: a device, a shape or a plan may be one row or many. Arrays are float64.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.calibration import TimeConstants, time_constants
from shardwise.cost.workload import Compute
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import Gpu

Floats = NDArray[np.float64]

# Streaming multiprocessors by the beginning of a catalogue name. Source: the vendors' data sheets.
MULTIPROCESSORS = {
    "A100": 108, "A800": 108, "H100-SXM": 132, "H100-PCIe": 114, "H200": 132, "B200": 148, "B300": 148, "GB200": 148,
    "GB300": 148, "MI250X": 110, "MI300X": 304, "L4-": 58, "L40S": 142, "A10G": 80, "V100": 80, "RTX-4090": 128,
    "RTX-A6000": 84,
}  # fmt: skip
# Output tiles of a matrix product and their speed beside the largest. Source: planners.md's roofline of tiles and waves;
# a smaller tile reads each operand more often, so it is slower the less it reuses.
TILES = ((256.0, 128.0, 1.0), (128.0, 128.0, 0.93), (128.0, 64.0, 0.75), (64.0, 64.0, 0.55))


def numbers(value: float | int) -> Floats:
    """One row."""
    return np.asarray([value], dtype=np.float64)


@dataclass(frozen=True)
class Rates:
    """What a device sustains: FLOPs a second at best, bytes a second, and how many products run side by side.

    linear: of projections in the compute precision; half: of what stays in 16 bits under fp8. Arrays of one length.
    """

    linear: Floats
    half: Floats
    memory: Floats
    multiprocessors: Floats
    low_precision: Floats
    element_bytes: Floats

    @classmethod
    def of(cls, gpu: Gpu, precision: Compute, constants: TimeConstants | None = None) -> Self:
        """Of one device. Raises: RecipeError where its peak or its bandwidth is not known."""
        known = constants or time_constants()
        half: Compute = "bf16" if precision == "fp8" and gpu.kind == "gpu" else precision
        linear = (
            _peak(gpu, precision) * known.low_precision_share if precision == "fp8" else _sustained(gpu, half, known)
        )
        bandwidth = gpu.hbm_bytes_per_second or (_CPU_CORE_BANDWIDTH if gpu.kind == "cpu" else None)
        if bandwidth is None:
            raise _unknown(gpu, "memory bandwidth")
        return cls(
            numbers(linear),
            numbers(_sustained(gpu, half, known)),
            numbers(bandwidth * known.memory_share),
            numbers(multiprocessors(gpu)),
            numbers(precision == "fp8"),
            numbers({"fp64": 8, "fp32": 4}.get(precision, 2)),
        )


# A core's share of what two or more cores of a server draw from memory. Source: recalled, 5 to 12 GB/s a core.
_CPU_CORE_BANDWIDTH = 8e9


def multiprocessors(gpu: Gpu) -> int:
    """Of a device: 1 for a core; a GPU that is not listed counts as 132."""
    if gpu.kind == "cpu":
        return 1
    return next((count for prefix, count in MULTIPROCESSORS.items() if gpu.name.startswith(prefix)), 132)


def _peak(gpu: Gpu, precision: Compute) -> float:
    if precision == "fp8":
        peak = gpu.dense_fp8_flops_per_second
    else:
        peak = gpu.peak_flops_per_second(precision)
        if peak is None and precision == "bf16":
            peak = gpu.dense_fp32_flops_per_second  # without bf16 units it is computed in fp32
    if peak is None:
        raise _unknown(gpu, f"dense {precision} peak")
    return peak


def _sustained(gpu: Gpu, precision: Compute, known: TimeConstants) -> float:
    """The power-limited ceiling: the best product measured where there is one, else a usual share of the peak."""
    measured = gpu.measured_bf16_flops_per_second
    if measured and precision in ("bf16", "fp16"):
        return measured * known.matmul_share
    return _peak(gpu, precision) * known.matmul_share_unmeasured * known.matmul_share


def _unknown(gpu: Gpu, what: str) -> RecipeError:
    return RecipeError(
        f"The {what} of {gpu.name!r} is not known.",
        why="predicting a step's time needs it",
        fix="choose another precision or a GPU of the catalogue, or measure this one with `shardwise doctor --measure`",
    )


def matmul_seconds(
    gpu: Gpu, m: Floats, n: Floats, k: Floats, precision: Compute, constants: TimeConstants | None = None
) -> Floats:
    """Seconds of C[m, n] = A[m, k] B[k, n] on one device."""
    known = constants or time_constants()
    return matmul(Rates.of(gpu, precision, known), m, n, k, known)


def matmul(rates: Rates, m: Floats, n: Floats, k: Floats, known: TimeConstants, *, half: bool = False) -> Floats:
    """The same at given rates: tiles of the output in waves over the multiprocessors, a ramp in k, or memory's bound.

    A wave that is not full costs up to a whole one (wave_sharpness). half: kept in 16 bits under fp8. 0 where n is 0.
    """
    flops, units = (rates.half if half else rates.linear), rates.multiprocessors
    best: Floats = np.asarray(np.inf)
    for tile_m, tile_n, speed in TILES:
        waves = np.ceil(m / tile_m) * np.ceil(n / tile_n) / units
        # Below one wave the depth is split among idle units, at some loss.
        whole = known.wave_sharpness * np.ceil(waves) + (1 - known.wave_sharpness) * waves
        best = np.minimum(best, whole * (2 * tile_m * tile_n * units / speed))
    arithmetic = best * (k + known.depth_ramp) / flops
    moved = rates.element_bytes * (m * k + k * n + m * n) / rates.memory
    return np.where(n > 0, np.maximum(arithmetic, moved) + known.launch_seconds, 0.0)


def grouped_matmul(rates: Rates, groups: Floats, m: Floats, n: Floats, k: Floats, known: TimeConstants) -> Floats:
    """Seconds of `groups` products of [m, k] by [k, n] in one launch, one an expert."""
    units = rates.multiprocessors
    best: Floats = np.asarray(np.inf)
    for tile_m, tile_n, speed in TILES:
        waves = groups * np.ceil(m / tile_m) * np.ceil(n / tile_n) / units
        whole = known.wave_sharpness * np.ceil(waves) + (1 - known.wave_sharpness) * waves
        best = np.minimum(best, whole * (2 * tile_m * tile_n * units / speed))
    arithmetic = best * (k + known.depth_ramp) / (rates.linear * known.grouped_matmul_share)
    moved = rates.element_bytes * groups * (m * k + k * n + m * n) / rates.memory
    return np.where((n > 0) & (groups > 0), np.maximum(arithmetic, moved) + known.launch_seconds, 0.0)


@dataclass(frozen=True)
class Attention:
    """One layer's attention on one rank: heads here, sizes of a head, rows of queries and mean positions looked at.

    fused: no score matrix is written (1 or 0).
    """

    heads: Floats
    key_dim: Floats
    value_dim: Floats
    rows: Floats
    attended: Floats
    whole: Floats
    fused: Floats


def attention_forward(rates: Rates, a: Attention, known: TimeConstants) -> Floats:
    """Seconds of softmax(Q K^T) V. Fused: what the mask leaves; else the whole square, and its passes over memory.

    Source: FLOPs 2 rows x positions x heads x (key + value) as in planners.md, section 3.
    """
    fused = _fused(rates, a, known) / known.attention_forward_share
    return np.where(a.fused > 0, fused, _scored(rates, a, known, products=1.0)) + known.launch_seconds


def attention_backward(rates: Rates, a: Attention, known: TimeConstants) -> Floats:
    """Five products for two when fused, since scores are made again; else four."""
    fused = 2.5 * _fused(rates, a, known) / known.attention_backward_share
    return np.where(a.fused > 0, fused, _scored(rates, a, known, products=2.0)) + known.launch_seconds


def _fused(rates: Rates, a: Attention, known: TimeConstants) -> Floats:
    """At the full rate of products; a small head or too few rows of work leave units idle."""
    flops = 2 * a.rows * a.attended * a.heads * (a.key_dim + a.value_dim)
    depth = 1 + known.attention_head_ramp / a.key_dim
    # Work comes in blocks of 128 rows of one head.
    blocks = a.rows / 128 * a.heads
    idle = 1 + known.attention_row_ramp * rates.multiprocessors / np.maximum(blocks, 1.0)
    return flops * depth * idle / rates.half


def _scored(rates: Rates, a: Attention, known: TimeConstants, products: float) -> Floats:
    flops = 2 * a.rows * a.whole * a.heads * (a.key_dim + a.value_dim)
    # A head dim that is no multiple of 8 takes the slow path of the tensor cores.
    depth = 1 + known.depth_ramp / a.key_dim + (a.key_dim % 8 > 0)
    passes = known.score_passes * rates.element_bytes * a.rows * a.whole * a.heads / rates.memory
    return products * flops * depth / rates.half + (1.0 if products == 1.0 else 1.25) * passes


def stack(rows: list[Rates]) -> Rates:
    """Many devices, a row each."""
    return Rates(**{field.name: np.concatenate([getattr(row, field.name) for row in rows]) for field in fields(Rates)})
