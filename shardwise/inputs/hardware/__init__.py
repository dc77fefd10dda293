"""What the machines can do: values, the catalogue of published numbers, clusters by name or file, this machine."""

from shardwise.inputs.hardware.cluster import Cluster, NodeGroup, of_groups, with_measured
from shardwise.inputs.hardware.machine import MachineFacts, core_flops_per_second, local_cluster, visible_gpus
from shardwise.inputs.hardware.measured import Attention, Collective, Matmul, Measured, Threads
from shardwise.inputs.hardware.published import (
    Catalogue,
    CatalogueGpu,
    CatalogueNode,
    catalogue,
    find_gpu,
    find_node,
    near_names,
)
from shardwise.inputs.hardware.spec import parse_cluster
from shardwise.inputs.hardware.values import Frozen, Gpu, Link, Node, Precision

__all__ = [
    "Attention",
    "Catalogue",
    "CatalogueGpu",
    "CatalogueNode",
    "Cluster",
    "Collective",
    "Frozen",
    "Gpu",
    "Link",
    "MachineFacts",
    "Matmul",
    "Measured",
    "Node",
    "NodeGroup",
    "Precision",
    "Threads",
    "catalogue",
    "core_flops_per_second",
    "find_gpu",
    "find_node",
    "local_cluster",
    "near_names",
    "of_groups",
    "parse_cluster",
    "visible_gpus",
    "with_measured",
]
