"""Measured: what a probe found on a machine. Where it says something, it wins over the published numbers."""

from typing import Annotated, Literal

import msgspec

from shardwise.inputs.hardware.values import Frozen, Precision

Count = Annotated[int, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


class Matmul(Frozen, frozen=True):
    """One product [m, k] x [k, n] on one device while all devices of the node were as busy: 2 m n k FLOPs."""

    m: Count
    n: Count
    k: Count
    precision: Precision
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


class Attention(Frozen, frozen=True):
    """Causal attention of one device: FLOPs of the half that the mask leaves, S x S x 2 D a head; backward 2.5 x."""

    sequence: Count
    head_dim: Count
    precision: Precision
    forward_flops_per_second: Rate
    backward_flops_per_second: Rate


class Threads(Frozen, frozen=True):
    """A rank that has several CPU cores to itself, as times the speed of a rank on one: products, and moving bytes."""

    cores: Annotated[int, msgspec.Meta(gt=1)]
    products: Rate
    memory: Rate


class Measured(Frozen, frozen=True):
    """Facts of a probe. Absent: not measured. `by` says what measured them, and when.

    pointwise, loss and optimizer: bytes that these have to move at the least, as the cost model counts them, a second.
    block_host_seconds: forward and backward of one block of a decoder too small to compute: its operators' start-up.
    """

    by: str
    matmuls: tuple[Matmul, ...] = ()
    collectives: tuple[Collective, ...] = ()
    memory_bytes_per_second: Rate | None = None
    host_to_device_bytes_per_second: Rate | None = None
    disk_read_bytes_per_second: Rate | None = None
    disk_write_bytes_per_second: Rate | None = None
    attention: tuple[Attention, ...] = ()
    threads: tuple[Threads, ...] = ()
    pointwise_bytes_per_second: Rate | None = None
    loss_bytes_per_second: Rate | None = None
    optimizer_bytes_per_second: Rate | None = None
    block_host_seconds: Seconds | None = None

    def best_matmul(self, precision: str) -> float | None:
        """FLOPs a second of the fastest product in this precision; None where none was measured."""
        return max((one.flops_per_second for one in self.matmuls if one.precision == precision), default=None)

    def collective(self, kind: Kind, ranks: int, nodes: int = 1) -> Collective | None:
        """The measured one of exactly this group; None where there is none."""
        wanted = (kind, ranks, nodes)
        return next((one for one in self.collectives if (one.kind, one.ranks, one.nodes) == wanted), None)
