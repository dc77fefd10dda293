"""Seconds of collectives over groups that lie in the order of the mesh, tensor parallel innermost. No torch.

A group of `size` ranks, `stride` apart, on nodes of `per_node` devices has `local` members on each of `nodes` nodes.
All groups of an axis talk at once, so a device has its own share of the node's network and no more; a ring through
`local` members of a node uses the shares of all of them (NCCL's rings; planners.md, section 3, 'Collectives').
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np

from shardwise.cost.calibration import TimeConstants, time_constants
from shardwise.cost.compute import Floats, numbers
from shardwise.inputs.hardware import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

# Rounds of a ring's share of the buffer.
_ROUNDS = {"all_reduce": 2.0}
# Gloo through shared memory and loopback, a core's share. Source: recalled.
_SHARED_MEMORY_BANDWIDTH = 1e9
# A network that nobody named: no faster than this a device. Source: 400 Gbit/s InfiniBand, planners.md section 4.
_USUAL_NETWORK = 50e9


@dataclass(frozen=True)
class Probed:
    """A kind of collective as measured within a node, by the size of the group, growing: its start in seconds, and its
    seconds a byte of a ring's share."""

    kind: str
    ranks: tuple[float, ...]
    start: tuple[float, ...]
    pace: tuple[float, ...]

    def of(self, size: Floats) -> tuple[Floats, Floats]:
        """(start, pace) of groups of these sizes, between those measured in the logarithm and as the nearest beyond."""
        doublings = np.log2(np.maximum(size, 1.0))
        start, pace = (np.interp(doublings, np.log2(self.ranks), column) for column in (self.start, self.pace))
        return np.asarray(start), np.asarray(pace)


@dataclass(frozen=True)
class Fabric:
    """Bytes a second and device in one direction, within a node and between nodes (0: not known); devices a node.

    A node is what the link joins: a domain of several machines where it goes on to them. start: seconds a collective
    within a node, as measured; 0: not measured. link_measured: 1 where the link's speed is what collectives had of it.
    """

    link: Floats
    network: Floats
    per_node: Floats
    start: Floats
    link_measured: Floats
    probed: tuple[Probed, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """Of a cluster, as published; what a probe measured wins."""
        node = cluster.node
        network = node.network.bytes_per_second if node.network else None
        link, start = _measured(cluster)
        published = node.link.bytes_per_second or _SHARED_MEMORY_BANDWIDTH
        return cls(
            link=numbers(link or published),
            network=numbers(network or 0.0),
            per_node=numbers(node.link_domain or node.devices),
            start=numbers(start),
            link_measured=numbers(link > 0),
            probed=_probed(cluster),
        )

    def sustained(self, known: TimeConstants) -> Self:
        """What transfers get of it. A network that is not known is a share of the link, as is usual."""
        usual = np.minimum(_USUAL_NETWORK, self.link * known.unknown_network_share)
        network = np.where(self.network > 0, self.network, usual)
        link = self.link * np.where(self.link_measured > 0, 1.0, known.link_share)
        return replace(self, link=link, network=network * known.network_share)


def _probed(cluster: Cluster) -> tuple[Probed, ...]:
    """What was measured in one node, a kind each."""
    rows = [one for one in cluster.measured.collectives if one.nodes == 1] if cluster.measured else []
    found = []
    for kind in dict.fromkeys(one.kind for one in rows):
        by_size = sorted((one for one in rows if one.kind == kind), key=lambda one: one.ranks)
        paces = (1 / (_share(kind, one.ranks) * one.bytes_per_second) for one in by_size)
        sizes, starts = (float(one.ranks) for one in by_size), (one.latency_seconds for one in by_size)
        found.append(Probed(kind, tuple(sizes), tuple(starts), tuple(paces)))
    return tuple(found)


def _share(kind: str, ranks: int) -> float:
    """Of the buffer that a ring passes on; a message is passed on whole."""
    return 1.0 if kind == "send" else _ROUNDS.get(kind, 1.0) * (1 - 1 / ranks)


def _measured(cluster: Cluster) -> tuple[float, float]:
    """Bytes a second that each rank of a ring moved, and seconds of a start, of the widest in one node; or 0."""
    probed = [one for one in cluster.measured.collectives if one.nodes == 1] if cluster.measured else []
    rounds = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    rings = [one for one in probed if one.kind in rounds]
    if not rings:
        return 0.0, 0.0
    widest = max(one.ranks for one in rings)
    paces = [rounds[one.kind] * (1 - 1 / one.ranks) * one.bytes_per_second for one in rings if one.ranks == widest]
    starts = [one.latency_seconds for one in rings if one.ranks == widest]
    return sum(paces) / len(paces), sum(starts) / len(starts)


@dataclass(frozen=True)
class Group:
    """How an axis lies: its size, members on a node, and nodes that it touches."""

    size: Floats
    local: Floats
    nodes: Floats

    @classmethod
    def of(cls, size: Floats, stride: Floats, fabric: Fabric) -> Self:
        """Ranks `stride` apart, `size` of them."""
        local = np.clip(np.floor(fabric.per_node / stride), 1.0, np.maximum(size, 1.0))
        return cls(np.asarray(size, dtype=np.float64), local, np.ceil(size / local))


def collective_seconds(
    kind: Kind, moved: Floats, size: Floats, stride: Floats, cluster: Cluster, constants: TimeConstants | None = None
) -> Floats:
    """Seconds of one collective of `moved` bytes: the whole buffer of a reduction or gather, what a rank sends else."""
    known = constants or time_constants()
    fabric = Fabric.of(cluster).sustained(known)
    return collective(kind, moved, Group.of(size, stride, fabric), fabric, known)


def collective(
    kind: Kind, moved: Floats, group: Group, fabric: Fabric, known: TimeConstants, times: Floats | float = 1.0
) -> Floats:
    """The same over a group that is known; `times` of them, `moved` in all."""
    if kind == "send":
        return np.asarray(_send(moved, group, fabric, known, times))
    rounds = _ROUNDS.get(kind, 1.0)
    share = (group.size - 1) / np.maximum(group.size, 1.0)
    exchanged = kind == "all_to_all"
    slowest = _all_to_all_pace(group, fabric, known) if exchanged else _ring_pace(group, fabric, known)
    start = latency(group, fabric, known, tree=kind == "all_reduce")
    start, slowest = _as_measured(kind, group, fabric, start, slowest)
    return np.where(group.size > 1, times * start + rounds * share * moved * slowest, 0.0)


def _as_measured(kind: Kind, group: Group, fabric: Fabric, start: Floats, pace: Floats) -> tuple[Floats, Floats]:
    """Start and pace of this kind as measured, where the group stays on a node; else as they were."""
    for one in fabric.probed:
        if one.kind == kind:
            found = one.of(group.size)
            near = group.nodes == 1
            return np.where(near, found[0], start), np.where(near, found[1], pace)
    return start, pace


def latency(group: Group, fabric: Fabric, known: TimeConstants, *, tree: bool) -> Floats:
    """What one collective takes however small: a start, and a hop a member within the node.

    Between nodes a hop a member for a ring, which gathers and scatters are; a sum goes down trees, two hops a doubling.
    Source: NCCL's algorithms (trees for all-reduce alone).
    """
    near = known.collective_seconds + known.collective_seconds_per_hop * (group.local - 1)
    near = np.where(fabric.start > 0, fabric.start, near)
    hops = 2 * np.log2(np.maximum(group.nodes, 1.0)) if tree else group.size - group.local
    return near + known.collective_seconds_per_network_hop * hops


def network_pace(nodes: Floats, fabric: Fabric, known: TimeConstants) -> Floats:
    """Seconds a byte of one device's share of the network; more nodes share switches and wait for each other."""
    crowd = 1 + known.network_share_per_doubling * np.log2(np.maximum(nodes, 1.0))
    return crowd / fabric.network


def _ring_pace(group: Group, fabric: Fabric, known: TimeConstants) -> Floats:
    """Seconds a byte: the slower of the link and of all local members' shares of the network together."""
    near = np.where(group.local > 1, 1 / fabric.link, 0.0)
    far = np.where(group.nodes > 1, network_pace(group.nodes, fabric, known) / group.local, 0.0)
    return np.maximum(near, far)


def nodes_reached(copies: Floats, group: Group) -> Floats:
    """Share of a token's `copies` that cross to a node, when those for one node go there once.

    Of `copies` sent at random to K nodes, K (1 - (1 - 1/K)^copies) nodes get one. Source: DeepSeek-V3, arXiv 2412.19437
    section 3.2.2, and the dispatchers of Megatron-Core that follow it.
    """
    reached = group.nodes * (1 - (1 - 1 / group.nodes) ** np.maximum(copies, 1.0))
    return reached / np.maximum(copies, 1.0)


def _all_to_all_pace(group: Group, fabric: Fabric, known: TimeConstants) -> Floats:
    """Seconds a byte sent: what leaves the node goes through the device's own share of the network.

    That share is not the ring's: every member sends to all others at once.
    Source: DeepEP's README, 43 to 47 of 50 GB/s.
    """
    away = (group.nodes - 1) / group.nodes
    near = np.where(group.local > 1, (1 - away) / (fabric.link * known.all_to_all_share), 0.0)
    far = away * network_pace(group.nodes, fabric, known) * known.network_share / known.exchange_network_share
    return np.maximum(near, far)


def _send(moved: Floats, group: Group, fabric: Fabric, known: TimeConstants, times: Floats | float) -> Floats:
    """To the next rank of the group: over the link where they share a node, else over the network."""
    near = 1 / fabric.link
    far = 1 / fabric.network
    pace = np.where(group.local >= group.size, near, far)
    start, pace = _as_measured("send", group, fabric, np.asarray(known.collective_seconds), pace)
    return np.where(group.size > 1, times * start + moved * pace, 0.0)
