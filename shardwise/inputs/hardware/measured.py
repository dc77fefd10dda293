"""Measured: what a probe found on a machine. Where it says something, it wins over the published numbers."""

from typing import Annotated, Literal

import msgspec

from shardwise.inputs.hardware.values import Frozen

Count = Annotated[int, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


class Matmul(Frozen, frozen=True):
    """One product [m, k] x [k, n] on one device while all devices of the node were as busy: 2 m n k FLOPs."""

    m: Count
    n: Count
    k: Count
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
    flops_per_second: Rate


class Collective(Frozen, frozen=True):
    """A collective in one group of `ranks` devices on `nodes` nodes: seconds = latency + bytes / bytes_per_second.

    bytes are those of the whole tensor: what all_gather gives, what reduce_scatter takes, what one rank sends.
    points: the (bytes, seconds) that the line was fitted to.
    """

    kind: Kind
    ranks: Annotated[int, msgspec.Meta(gt=1)]
    latency_seconds: Seconds
    bytes_per_second: Rate
    nodes: Count = 1
    points: tuple[tuple[Count, Seconds], ...] = ()


class Measured(Frozen, frozen=True):
    """Facts of a probe. Absent: not measured. `by` says what measured them, and when."""

    by: str
    matmuls: tuple[Matmul, ...] = ()
    collectives: tuple[Collective, ...] = ()
    memory_bytes_per_second: Rate | None = None
    host_to_device_bytes_per_second: Rate | None = None
    disk_read_bytes_per_second: Rate | None = None
    disk_write_bytes_per_second: Rate | None = None

    def best_matmul(self, precision: str) -> float | None:
        """FLOPs a second of the fastest product in this precision; None where none was measured."""
        return max((one.flops_per_second for one in self.matmuls if one.precision == precision), default=None)

    def collective(self, kind: Kind, ranks: int, nodes: int = 1) -> Collective | None:
        """The measured one of exactly this group; None where there is none."""
        wanted = (kind, ranks, nodes)
        return next((one for one in self.collectives if (one.kind, one.ranks, one.nodes) == wanted), None)
