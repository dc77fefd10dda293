"""The cluster that a row of measured runs names: GPUs by catalogue, nodes by count, the network by its words."""

import math
import re

import msgspec

from shardwise.cost.reported import Reported, Unusable
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import CatalogueGpu, Cluster, Link, Node, catalogue, find_gpu

GIGABIT = 1e9 / 8


def cluster_of(reported: Reported, world: int, unknown: set[str]) -> Cluster:
    """The GPUs of a row. A blank gpus_per_node is 8, or all of them where they are fewer.

    Devices of one NVLink domain (NVL72) are one node, in as few equal domains as the count allows. Raises: Unusable.
    """
    try:
        row = find_gpu(reported.text("gpu"))
    except RecipeError as error:
        raise Unusable(f"{error.what} {error.fix}") from None
    devices = _devices_per_node(reported, row, world, unknown)
    nodes = world // devices
    network = None if nodes == 1 else _network(reported, row, devices, unknown)
    node = Node(
        name=f"{devices}x{row.name}", devices=devices, device=row.value(),
        link=Link(row.link_kind, row.link_bytes_per_second), network=network,
    )  # fmt: skip
    return Cluster(name=node.name if nodes == 1 else f"{nodes}x{node.name}", nodes=nodes, node=node, asked="")


def _devices_per_node(reported: Reported, row: CatalogueGpu, world: int, unknown: set[str]) -> int:
    said = reported.whole("gpus_per_node")
    domain = re.search(r"(\d+)-GPU domain", row.link_kind)
    if domain:
        largest = min(world, int(domain.group(1)))
    else:
        if said is None and world > 8:
            unknown.add("gpus_per_node")
        largest = min(world, said or 8)
    # Equal nodes: a world of 20 on nodes of 8 is counted as five nodes of 4.
    return next(size for size in range(largest, 0, -1) if world % size == 0)


def _network(reported: Reported, row: CatalogueGpu, devices: int, unknown: set[str]) -> Link:
    """One device's share of its node's network: by its words, else an instance's name, else what such nodes have."""
    said = reported.text("interconnect")
    per_node = gigabits_per_node(said)
    if per_node is not None:
        hosts = max(1, devices // (reported.whole("gpus_per_node") or devices))
        return Link(said, per_node * hosts * GIGABIT / devices)
    for node in catalogue().node:
        if said and said in (node.name, *node.aliases):
            return Link(node.network_kind, node.network_bytes_per_second_per_device)
    if not re.search(r"\bdgx\b|nvl72", said.lower()):
        unknown.add("interconnect")
    return usual_network(row)


def gigabits_per_node(said: str) -> float | None:
    """'1600Gbps/node', '4x100Gb RoCE per node', '8x200Gbps HDR', '3.2 Tbps': gigabits a second of one node."""
    match = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(T|G)b(?:ps|/s|it/s)?\b", said)
    if match is None:
        return None
    count, size, unit = match.groups()
    return int(count or 1) * float(size) * (1000 if unit == "T" else 1)


def usual_network(row: CatalogueGpu) -> Link:
    """What nodes of this GPU usually have: the median of those in the catalogue, else 100 Gb/s a device."""
    same = sorted(node.network_bytes_per_second_per_device for node in catalogue().node if node.gpu == row.name)
    speed = same[math.ceil(len(same) / 2) - 1] if same else 100 * GIGABIT
    return Link("assumed", speed)


def with_network(cluster: Cluster, link: Link) -> Cluster:
    """The same cluster on another network."""
    return msgspec.structs.replace(cluster, node=msgspec.structs.replace(cluster.node, network=link))
