"""The catalogue: published numbers of GPUs and nodes, each with its source, found by exact name or declared alias.

A name is never a substring of another: a wrong GPU is a wrong plan.
"""

import difflib
import functools
from pathlib import Path
from typing import Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.hardware.values import Frozen, Gpu, Link, Node


class CatalogueGpu(Frozen, frozen=True):
    """A row of catalogue.toml. `card` is one of `devices_per_card` of these: not a name of a device."""

    name: str
    aliases: tuple[str, ...]
    hbm_bytes: int
    hbm_bytes_per_second: float
    link_kind: str
    link_bytes_per_second: float
    source: str
    dense_bf16_flops_per_second: float | None = None
    dense_fp16_flops_per_second: float | None = None
    dense_fp8_flops_per_second: float | None = None
    dense_fp32_flops_per_second: float | None = None
    measured_bf16_flops_per_second: float | None = None
    measured_fp8_flops_per_second: float | None = None
    measured_fp32_flops_per_second: float | None = None
    multiprocessors: int | None = None
    power_watts: float | None = None
    link_peer_bytes_per_second: float | None = None
    card: str = ""
    devices_per_card: int = 1
    notes: str = ""

    def value(self) -> Gpu:
        """As a device of a Node."""
        fields = {name: getattr(self, name) for name in Gpu.__struct_fields__ if name != "kind"}
        return Gpu(**fields)

    def link(self) -> Link:
        """The link of a bare node of these."""
        return Link(self.link_kind, self.link_bytes_per_second, self.link_peer_bytes_per_second)


class CatalogueNode(Frozen, frozen=True):
    """A row of catalogue.toml."""

    name: str
    aliases: tuple[str, ...]
    gpu: str
    devices: int
    link_kind: str
    link_bytes_per_second: float
    network_kind: str
    network_bytes_per_second_per_device: float
    source: str
    nics: int | None = None
    link_domain: int | None = None
    notes: str = ""

    def value(self) -> Node:
        """One node of a Cluster."""
        gpu = find_gpu(self.gpu)
        return Node(
            name=self.name,
            devices=self.devices,
            device=gpu.value(),
            link=Link(self.link_kind, self.link_bytes_per_second, gpu.link_peer_bytes_per_second),
            network=Link(self.network_kind, self.network_bytes_per_second_per_device),
            nics=self.nics,
            link_domain=self.link_domain,
        )


class Catalogue(Frozen, frozen=True):
    """All known GPUs and nodes."""

    gpu: tuple[CatalogueGpu, ...]
    node: tuple[CatalogueNode, ...]
    schema_version: Literal[1] = 1


@functools.cache
def catalogue() -> Catalogue:
    """The published numbers in catalogue.toml."""
    return msgspec.toml.decode(Path(__file__).with_name("catalogue.toml").read_bytes(), type=Catalogue)


def find_gpu(name: str) -> CatalogueGpu:
    """The GPU of exactly this name or alias.

    Raises: RecipeError that shows the nearest names.
    """
    for row in catalogue().gpu:
        if name == row.name or name in row.aliases:
            return row
        if row.card and name == row.card:
            raise RecipeError(
                f"A {name} is a card of {row.devices_per_card} devices.",
                why="a rank has one device, and each has its own memory",
                fix=f"write {row.name}, {row.devices_per_card} times as many",
            )
    raise _unknown("GPU", name)


def find_node(name: str) -> CatalogueNode | None:
    """The node of exactly this name or alias; None where there is none."""
    return next((row for row in catalogue().node if name == row.name or name in row.aliases), None)


def near_names(name: str) -> list[str]:
    """The likest names of GPUs and nodes, the nearest first; an alias stands for its name."""
    spelled: dict[str, str] = {}
    rows: tuple[CatalogueGpu | CatalogueNode, ...] = (*catalogue().gpu, *catalogue().node)
    for row in rows:
        spelled |= {spelling.lower(): row.name for spelling in (row.name, *row.aliases)}
    near = difflib.get_close_matches(name.lower(), spelled, n=6, cutoff=0.0)
    return list(dict.fromkeys(spelled[spelling] for spelling in near))[:3]


def _unknown(what: str, name: str) -> RecipeError:
    near = near_names(name)
    return RecipeError(
        f"There is no {what} {name!r} in the catalogue.",
        why=f"names are exact or a declared alias; near ones: {', '.join(near)}; all: shardwise plan --gpus",
        fix=f"write {near[0]}",
    )
