"""Machines as the search takes them: more of the same, and groups that differ as equal ones. No torch."""

from typing import Any

import msgspec

from shardwise.inputs.hardware import Cluster, Gpu, NodeGroup, of_groups


def times(cluster: Cluster, factor: int) -> Cluster:
    """So many times as many machines, of each group."""
    return of_groups(tuple(msgspec.structs.replace(group, nodes=group.nodes * factor) for group in cluster.groups))


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """So many machines of the first group's kind, and no others."""
    return of_groups((NodeGroup(nodes, cluster.node, cluster.measured),))


def used(cluster: Cluster, nodes: int, devices: int) -> Cluster:
    """So many machines of the first group's kind, of each of which so many devices are used."""
    name = f"{devices}x{'cpu-core' if cluster.kind == 'cpu' else cluster.device.name}"
    node = msgspec.structs.replace(cluster.node, name=name, devices=devices)
    return of_groups((NodeGroup(nodes, node, cluster.measured),))


def reach(cluster: Cluster) -> int:
    """Devices that the fast links join: those of a node, or of a domain of several."""
    return max(cluster.node.devices, cluster.node.link_domain or 0)


def alike(cluster: Cluster) -> Cluster:
    """Equal machines that can do what the weakest of each can: with equal shares all wait for the slowest.

    The number of devices stays. Of one group it is the cluster itself.
    """
    if not cluster.others:
        return cluster
    nodes = [group.node for group in cluster.groups]
    devices = min(node.devices for node in nodes)
    networks = [node.network for node in nodes]
    node = msgspec.structs.replace(
        min(nodes, key=lambda one: one.devices),
        device=_weakest([node.device for node in nodes]),
        link=min((node.link for node in nodes), key=lambda link: link.bytes_per_second or 0.0),
        network=None
        if None in networks
        else min((one for one in networks if one is not None), key=lambda link: link.bytes_per_second or 0.0),
    )
    return Cluster(cluster.name, max(1, cluster.devices // devices), node, cluster.asked)


def _weakest(devices: list[Gpu]) -> Gpu:
    """A device with the least of each number; what is not known of one is not known."""
    names = [name for name in Gpu.__struct_fields__ if isinstance(getattr(devices[0], name), int | float)]
    least: dict[str, Any] = {}
    for name in names:
        values = [getattr(device, name) for device in devices]
        least[name] = None if None in values else min(values)
    return msgspec.structs.replace(devices[0], name=" and ".join(dict.fromkeys(one.name for one in devices)), **least)
