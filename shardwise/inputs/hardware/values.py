"""Link, Gpu, Node: what one machine can do, by published numbers or by its own facts. Absent: not known."""

from typing import Annotated, Literal

import msgspec

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
Count = Annotated[int, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value that crosses layers."""


class Link(Frozen, frozen=True):
    """One direction of one device's share of a link; absent speed: not known here.

    peer_bytes_per_second: what one pair of devices gets, where each pair has a link of its own and no switch joins
    them; absent: all of it.
    """

    kind: str
    bytes_per_second: Rate | None = None
    peer_bytes_per_second: Rate | None = None


class Gpu(Frozen, frozen=True):
    """One device. kind "cpu" is one core, whose memory is its share of the host's. Absent: not known.

    multiprocessors: streaming multiprocessors, or compute units. measured_*: the best matrix product seen.
    """

    name: str
    hbm_bytes: Count
    kind: Literal["gpu", "cpu"] = "gpu"
    hbm_bytes_per_second: Rate | None = None
    dense_bf16_flops_per_second: Rate | None = None
    dense_fp16_flops_per_second: Rate | None = None
    dense_fp8_flops_per_second: Rate | None = None
    dense_fp32_flops_per_second: Rate | None = None
    measured_bf16_flops_per_second: Rate | None = None
    source: str = ""
    notes: str = ""
    measured_fp8_flops_per_second: Rate | None = None
    measured_fp32_flops_per_second: Rate | None = None
    multiprocessors: Count | None = None
    power_watts: Rate | None = None

    def peak_flops_per_second(self, precision: Precision) -> float | None:
        """The dense peak behind model FLOP utilisation; a CPU core's bf16 and fp16 count as its fp32."""
        if precision == "fp64":
            single = self.dense_fp32_flops_per_second
            return single / 2 if single and self.kind == "cpu" else None
        if precision == "fp8":
            return self.dense_fp8_flops_per_second
        if self.kind == "cpu" or precision == "fp32":
            return self.dense_fp32_flops_per_second
        return self.dense_bf16_flops_per_second if precision == "bf16" else self.dense_fp16_flops_per_second


class Node(Frozen, frozen=True):
    """One machine: equal devices, the link between them, its share of the network, and its host.

    nics: network cards of the node, which its devices share. link_domain: devices that the link joins, where it goes
    on to other nodes.
    """

    name: str
    devices: Count
    device: Gpu
    link: Link
    network: Link | None = None
    host_memory_bytes: Count | None = None
    host_cores: Count | None = None
    nics: Count | None = None
    link_domain: Count | None = None
