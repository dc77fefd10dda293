"""What a probe measured, as constants and laws of the cost model: measured values win over calibrated ones. No torch.

A probe counts bytes and FLOPs as this model does (profiling/device_speed.py, train/probing.py), so each rate that it
found replaces a share or a number of passes as it stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwise.cost.calibration import TimeConstants
from shardwise.cost.candidates import Counts
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Attention, Cluster, Matmul, Measured

Floats = NDArray[np.float64]


def constants(workload: Workload, cluster: Cluster, known: TimeConstants) -> TimeConstants:
    """`known` with what was measured on these machines in its place, and what CPU cores do otherwise than GPUs."""
    if cluster.kind == "cpu":
        known = _on_cores(known)
    return _measured(workload, cluster, cluster.measured, known) if cluster.measured else known


def _on_cores(known: TimeConstants) -> TimeConstants:
    """A CPU's collectives run on the cores that compute: nothing of them is hidden."""
    return msgspec.structs.replace(
        known, overlap_window=0.0, tensor_hidden=0.0, expert_hidden=0.0, transfers_hidden=0.0,
        transfers_hidden_interleaved=0.0,
    )  # fmt: skip


def _measured(workload: Workload, cluster: Cluster, found: Measured, known: TimeConstants) -> TimeConstants:
    changed: dict[str, float] = {}
    bandwidth = found.memory_bytes_per_second
    if bandwidth is not None:
        changed["memory_share"] = 1.0
        passes = {
            "pointwise_passes": found.pointwise_bytes_per_second,
            "logit_passes": found.loss_bytes_per_second,
            "optimizer_passes": found.optimizer_bytes_per_second,
        }
        changed |= {name: bandwidth / rate for name, rate in passes.items() if rate is not None}
        if found.pointwise_bytes_per_second is not None:
            # Compiled kernels were not measured: they save the share of passes that they save elsewhere.
            saved = known.pointwise_passes_compiled / known.pointwise_passes
            changed["pointwise_passes_compiled"] = changed["pointwise_passes"] * saved
    if found.block_host_seconds is not None:
        # A block's backward starts twice as many kernels as its forward.
        changed["kernel_seconds"] = found.block_host_seconds / (3 * known.kernels_per_layer)
        changed["launch_seconds"] = 0.0
    if found.disk_write_bytes_per_second is not None and found.disk_read_bytes_per_second is not None:
        each = 1 / found.disk_write_bytes_per_second + 1 / found.disk_read_bytes_per_second
        changed["disk_bytes_per_second"] = 2 / each / cluster.node.devices
    if found.host_to_device_bytes_per_second is not None:
        changed["host_link_bytes_per_second"] = found.host_to_device_bytes_per_second
    changed |= _attention(workload, cluster, found.attention, known)
    return msgspec.structs.replace(known, **changed)


def _attention(
    workload: Workload, cluster: Cluster, found: Sequence[Attention], known: TimeConstants
) -> dict[str, float]:
    """Shares of the peak, of the measured attention that is nearest in length and in the size of a head."""
    half = "bf16" if workload.precision == "fp8" else workload.precision
    rows = [one for one in found if one.precision == half]
    peak = cluster.device.peak_flops_per_second(half)
    if not rows or peak is None:
        return {}

    def far(one: Attention) -> float:
        longer = np.log(one.sequence / workload.sequence_length)
        return float(abs(longer) + abs(np.log(one.head_dim / workload.arch.key_head_dim)))

    near = min(rows, key=far)
    return {
        "attention_forward_share": near.forward_flops_per_second / peak,
        "attention_backward_share": near.backward_flops_per_second / peak,
        "attention_hopper_share": 1.0,
        "attention_head_ramp": 0.0,
        "attention_row_ramp": 0.0,
    }


@dataclass(frozen=True)
class ProductLaw:
    """Seconds of a product [m, k] x [k, n] on a CPU core: a start, and for each FLOP and each number of its operands.

    The result's numbers count as operands. The start is left to what starts all operators.
    """

    start: float
    flop: float
    number: float

    @classmethod
    def through(cls, matmuls: Sequence[Matmul]) -> Self | None:
        """Least squares of the relative error; none of the three below zero. None without three shapes."""
        if len({(one.m, one.n, one.k) for one in matmuls}) < 3:
            return None
        flops = np.array([2.0 * one.m * one.n * one.k for one in matmuls])
        numbers = np.array([float(one.m * one.k + one.k * one.n + one.m * one.n) for one in matmuls])
        seconds = flops / np.array([one.flops_per_second for one in matmuls])
        columns = np.stack([np.ones_like(flops), flops, numbers], axis=1) / seconds[:, None]
        return cls(*(float(one) for one in _not_negative(columns)))

    def seconds(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Of one product."""
        return self.start + self.flop * 2 * m * n * k + self.number * (m * k + k * n + m * n)


def _not_negative(columns: Floats) -> Floats:
    """What the columns are multiplied with to come nearest to ones, none below zero: the best of all subsets."""
    scale = np.abs(columns).max(axis=0)
    scaled, width = columns / scale, columns.shape[1]
    best, least = np.zeros(width), np.inf
    for subset in range(1, 2**width):
        kept = [index for index in range(width) if subset >> index & 1]
        found, *_ = np.linalg.lstsq(scaled[:, kept], np.ones(len(scaled)), rcond=None)
        whole = np.zeros(width)
        whole[kept] = found
        error = float(((scaled @ whole - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = whole, error
    return np.asarray(best / scale)


def speeds(cluster: Cluster, world: Floats | Counts) -> tuple[Floats, Floats, Floats]:
    """Of each rank of so many on these CPU cores: products, memory, and starting operators, as times one core's.

    With cores to spare a rank has threads on them, as fast as measured (else in proportion); with fewer than one, ranks
    take turns. One thread starts all operators.
    """
    cores = cluster.devices / np.asarray(world, dtype=np.float64)
    found = sorted(cluster.measured.threads, key=lambda one: one.cores) if cluster.measured else []
    known = np.log2([1.0, *(float(one.cores) for one in found)])
    grown = []
    for column in ([one.products for one in found], [one.memory for one in found]):
        there = np.interp(np.log2(np.maximum(cores, 1.0)), known, [1.0, *column])
        # Beyond the most that was measured, and without a measurement, in proportion.
        grown.append(there * np.maximum(cores, 1.0) / np.minimum(np.maximum(cores, 1.0), 2 ** known[-1]))
    share = np.minimum(cores, 1.0)
    return grown[0] * share, grown[1] * share, share
