"""What `shardwise doctor --measure` found, as text and JSON."""

import json
from typing import Any

import msgspec

from shardwise.inputs.hardware import Cluster, Measured
from shardwise.units import format_bytes, format_count


def as_json(cluster: Cluster, path: str) -> str:
    """One object: where the file is, and all that was measured."""
    return json.dumps({"file": path, "cluster": cluster.name, "measured": msgspec.to_builtins(cluster.measured)})


def text(cluster: Cluster, path: str) -> str:
    """A line each, and how the file is used."""
    found = cluster.measured or Measured(by="nothing")
    rows = [*_products(cluster, found), *_rates(found), *_attention(found), *_threads(found), *_collectives(found)]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{cluster.name}, measured by {found.by}", *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join([*lines, f"written to {path}: shardwise plan MODEL --cluster {path}"])


def _products(cluster: Cluster, found: Measured) -> list[tuple[str, str]]:
    rows = []
    for precision in dict.fromkeys(one.precision for one in found.matmuls):
        speeds = sorted(one.flops_per_second for one in found.matmuls if one.precision == precision)
        peak = cluster.device.peak_flops_per_second(precision)
        of_peak = f", {100 * speeds[-1] / peak:.0f} % of the nominal peak" if peak else ""
        many = f"{format_count(speeds[0])} to {format_count(speeds[-1])} FLOP/s over {len(speeds)} shapes"
        rows.append((f"products in {precision}", many + of_peak))
    return rows


def _rates(found: Measured) -> list[tuple[str, str]]:
    names = {
        "memory_bytes_per_second": "memory",
        "pointwise_bytes_per_second": "norms, gates, positions",
        "loss_bytes_per_second": "cross entropy",
        "optimizer_bytes_per_second": "AdamW",
        "host_to_device_bytes_per_second": "host to device",
        "disk_write_bytes_per_second": "disk, written",
        "disk_read_bytes_per_second": "disk, read",
    }
    values: list[tuple[str, Any]] = [(name, getattr(found, key)) for key, name in names.items()]
    rows = [(name, f"{format_bytes(value)}/s") for name, value in values if value is not None]
    if found.block_host_seconds is not None:
        rows.append(("starting a block's operators", f"{1e3 * found.block_host_seconds:.2f} ms forward and backward"))
    return rows


def _attention(found: Measured) -> list[tuple[str, str]]:
    return [
        (
            f"attention of {one.sequence}, heads of {one.head_dim}",
            f"{format_count(one.forward_flops_per_second)} FLOP/s forward, "
            f"{format_count(one.backward_flops_per_second)} backward ({one.precision})",
        )
        for one in found.attention
    ]


def _threads(found: Measured) -> list[tuple[str, str]]:
    return [
        (f"one rank on {one.cores} cores", f"{one.products:.2f} times the products, {one.memory:.2f} times the memory")
        for one in found.threads
    ]


def _collectives(found: Measured) -> list[tuple[str, str]]:
    return [
        (f"{one.kind} over {one.ranks}", f"{1e6 * one.latency_seconds:.0f} us + {format_bytes(one.bytes_per_second)}/s")
        for one in found.collectives
    ]
