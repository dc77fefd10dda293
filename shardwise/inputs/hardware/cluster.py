"""Cluster: groups of equal nodes, and what was measured on them."""

from typing import Literal

import msgspec

from shardwise.inputs.hardware.measured import Measured
from shardwise.inputs.hardware.values import Count, Frozen, Gpu, Node


class NodeGroup(Frozen, frozen=True):
    """Equal nodes."""

    nodes: Count
    node: Node
    measured: Measured | None = None

    @property
    def devices(self) -> int:
        """All devices of the group."""
        return self.nodes * self.node.devices


class Cluster(Frozen, frozen=True):
    """Equal nodes; `others` are groups of further nodes that differ. `name` is canonical; `asked` is what was written.

    measured: facts of the first group, already taken up in its values where these have a place for them.
    """

    name: str
    nodes: Count
    node: Node
    asked: str = ""
    others: tuple[NodeGroup, ...] = ()
    measured: Measured | None = None

    @property
    def kind(self) -> Literal["gpu", "cpu"]:
        return self.node.device.kind

    @property
    def device(self) -> Gpu:
        """A device of the first group."""
        return self.node.device

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """All groups, the first one first."""
        return (NodeGroup(self.nodes, self.node, self.measured), *self.others)

    @property
    def smallest_device(self) -> Gpu:
        """The device with the least memory: what every rank's share fits where shares are equal."""
        return min((group.node.device for group in self.groups), key=lambda device: device.hbm_bytes)

    @property
    def devices(self) -> int:
        """All devices: the largest world."""
        return sum(group.devices for group in self.groups)


def of_groups(groups: tuple[NodeGroup, ...], name: str = "", asked: str = "") -> Cluster:
    """One Cluster of these groups, in this order; neighbours that are equal but for their number become one.

    Raises: ValueError without a group.
    """
    joined: list[NodeGroup] = []
    for group in groups:
        if joined and (joined[-1].node, joined[-1].measured) == (group.node, group.measured):
            joined[-1] = msgspec.structs.replace(joined[-1], nodes=joined[-1].nodes + group.nodes)
        else:
            joined.append(group)
    if not joined:
        raise ValueError("a cluster has at least one group of nodes")
    first, *others = joined
    name = name or "+".join(_group_name(group) for group in joined)
    return Cluster(name, first.nodes, first.node, asked, tuple(others), first.measured)


def _group_name(group: NodeGroup) -> str:
    """As `parse_cluster` reads it: 2x8xA100-SXM4-80GB, 8xA100-SXM4-80GB, 1xp5.48xlarge."""
    bare = group.node.name == f"{group.node.devices}x{group.node.device.name}"
    return group.node.name if bare and group.nodes == 1 else f"{group.nodes}x{group.node.name}"


def with_measured(group: NodeGroup, measured: Measured) -> NodeGroup:
    """The group with these facts; its device's bandwidth and best products are the measured ones.

    The dense peak stays: utilisation is defined by it.
    """
    found = {
        "hbm_bytes_per_second": measured.memory_bytes_per_second,
        "measured_bf16_flops_per_second": measured.best_matmul("bf16"),
        "measured_fp8_flops_per_second": measured.best_matmul("fp8"),
        "measured_fp32_flops_per_second": measured.best_matmul("fp32"),
    }
    device = msgspec.structs.replace(group.node.device, **{key: value for key, value in found.items() if value})
    return NodeGroup(group.nodes, msgspec.structs.replace(group.node, device=device), measured)
