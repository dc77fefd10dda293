"""What a user writes for a cluster, read: names with counts, groups joined by +, a cluster file, or `local`."""

import re

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.hardware import file
from shardwise.inputs.hardware.cluster import Cluster, NodeGroup, of_groups
from shardwise.inputs.hardware.published import CatalogueGpu, find_gpu, find_node
from shardwise.inputs.hardware.values import Node


def parse_cluster(text: str, local: Cluster | None = None) -> Cluster:
    """`8xH100-SXM5-80GB` (one node of eight), `4x8xH100`, `4xp5.48xlarge`, `1x8xA100+1x8xL4`, a file (.toml, .json).

    `local` is the probe's value. Raises: RecipeError.
    """
    if text == "local":
        if local is None:
            raise RecipeError("The cluster 'local' needs a look at this machine.", fix="name a cluster instead")
        return local
    if text.endswith((".toml", ".json")):
        return msgspec.structs.replace(file.read(text), asked=text)
    return of_groups(tuple(_group(part.strip()) for part in text.split("+")), asked=text)


def _group(text: str) -> NodeGroup:
    counts, name = _split_counts(text)
    row = find_node(name)
    if row is None:
        return _bare_nodes(counts, find_gpu(name), text)
    if len(counts) > 1:
        raise RecipeError(
            f"{text!r} has too many counts.",
            why=f"{row.name} is a whole node of {row.devices} devices",
            fix=f"write NODESx{row.name}, as in 4x{row.name}",
        )
    return NodeGroup(counts[0] if counts else 1, row.value())


def _split_counts(text: str) -> tuple[list[int], str]:
    counts, rest = [], text
    while match := re.match(r"^(-?[0-9]+)x(.+)$", rest):
        counts.append(int(match.group(1)))
        rest = match.group(2)
    if any(count < 1 for count in counts):
        raise RecipeError(
            f"{text!r} counts {min(counts)} of something.", fix="write counts of at least 1, as in 8xH100"
        )
    return counts, rest


def _bare_nodes(counts: list[int], row: CatalogueGpu, text: str) -> NodeGroup:
    if len(counts) > 2:
        raise RecipeError(f"{text!r} has too many counts.", fix="write NODESxDEVICESxGPU, as in 4x8xH100-SXM5-80GB")
    devices = counts[-1] if counts else 1
    node = Node(name=f"{devices}x{row.name}", devices=devices, device=row.value(), link=row.link())
    return NodeGroup(counts[0] if len(counts) == 2 else 1, node)
