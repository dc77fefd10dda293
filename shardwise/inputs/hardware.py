"""Gpu, Link, Node, Cluster: what the machines can do, by published numbers or by this machine's own facts.

A name is exact or a declared alias, never a substring: a wrong GPU is a wrong plan.
"""

import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from shardwise.errors import RecipeError

Precision = Literal["fp32", "bf16", "fp16", "fp64"]


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value that crosses layers."""


class Link(Frozen, frozen=True):
    """One direction of one device's share of a link; absent speed: not known here."""

    kind: str
    bytes_per_second: float | None = None


class Gpu(Frozen, frozen=True):
    """One device. kind "cpu" is one core, whose memory is its share of the host's. Absent: not known."""

    name: str
    hbm_bytes: int
    kind: Literal["gpu", "cpu"] = "gpu"
    hbm_bytes_per_second: float | None = None
    dense_bf16_flops_per_second: float | None = None
    dense_fp16_flops_per_second: float | None = None
    dense_fp8_flops_per_second: float | None = None
    dense_fp32_flops_per_second: float | None = None
    measured_bf16_flops_per_second: float | None = None
    source: str = ""
    notes: str = ""

    def peak_flops_per_second(self, precision: Precision) -> float | None:
        """The dense peak behind model FLOP utilisation; a CPU core's bf16 and fp16 count as its fp32."""
        if precision == "fp64":
            single = self.dense_fp32_flops_per_second
            return single / 2 if single and self.kind == "cpu" else None
        if self.kind == "cpu" or precision == "fp32":
            return self.dense_fp32_flops_per_second
        return self.dense_bf16_flops_per_second if precision == "bf16" else self.dense_fp16_flops_per_second


class Node(Frozen, frozen=True):
    """One machine: equal devices, the link between them, its share of the network, and its host."""

    name: str
    devices: int
    device: Gpu
    link: Link
    network: Link | None = None
    host_memory_bytes: int | None = None
    host_cores: int | None = None


class Cluster(Frozen, frozen=True):
    """Equal nodes. `name` is canonical; `asked` is what the user wrote."""

    name: str
    nodes: int
    node: Node
    asked: str = ""

    @property
    def kind(self) -> Literal["gpu", "cpu"]:
        return self.node.device.kind

    @property
    def device(self) -> Gpu:
        return self.node.device

    @property
    def devices(self) -> int:
        """All devices: the largest world."""
        return self.nodes * self.node.devices


class CatalogueGpu(Frozen, frozen=True):
    """A row of catalogue.toml."""

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
    notes: str = ""

    def value(self) -> Gpu:
        fields = {name: getattr(self, name) for name in Gpu.__struct_fields__ if name != "kind"}
        return Gpu(**fields)


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
    notes: str = ""


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

    Raises: RecipeError that shows the nearest name.
    """
    for row in catalogue().gpu:
        if name == row.name or name in row.aliases:
            return row
    raise _unknown("GPU", name, (row.name for row in catalogue().gpu))


def _find_node(name: str) -> CatalogueNode | None:
    return next((row for row in catalogue().node if name == row.name or name in row.aliases), None)


def _unknown(what: str, name: str, known: Iterable[str]) -> RecipeError:
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return RecipeError(
        f"There is no {what} {name!r} in the catalogue.",
        why=f"names are exact or a declared alias: {', '.join(names)}",
        fix=f"write {nearest[0]}",
    )


def parse_cluster(text: str, local: Cluster | None = None) -> Cluster:
    """`8xH100-SXM5-80GB` (one node of eight), `4x8xH100`, `4xp5.48xlarge`, or `local` (the probe's value).

    Raises: RecipeError.
    """
    if text == "local":
        if local is None:
            raise RecipeError("The cluster 'local' needs a look at this machine.", fix="name a cluster instead")
        return local
    counts, name = _split_counts(text)
    row = _find_node(name)
    if row is not None:
        return _instances(counts, row, text)
    if len(counts) > 2:
        raise RecipeError(f"{text!r} has too many counts.", fix="write NODESxDEVICESxGPU, as in 4x8xH100-SXM5-80GB")
    return _bare_nodes(counts, find_gpu(name), text)


def _split_counts(text: str) -> tuple[list[int], str]:
    counts = []
    while match := re.match(r"^([1-9][0-9]*)x(.+)$", text):
        counts.append(int(match.group(1)))
        text = match.group(2)
    return counts, text


def _bare_nodes(counts: list[int], row: CatalogueGpu, asked: str) -> Cluster:
    devices = counts[-1] if counts else 1
    nodes = counts[0] if len(counts) == 2 else 1
    link = Link(row.link_kind, row.link_bytes_per_second)
    node = Node(name=f"{devices}x{row.name}", devices=devices, device=row.value(), link=link)
    return Cluster(name=node.name if nodes == 1 else f"{nodes}x{node.name}", nodes=nodes, node=node, asked=asked)


def _instances(counts: list[int], row: CatalogueNode, asked: str) -> Cluster:
    if len(counts) > 1:
        raise RecipeError(
            f"{asked!r} has too many counts.",
            why=f"{row.name} is a whole node of {row.devices} devices",
            fix=f"write NODESx{row.name}, as in 4x{row.name}",
        )
    nodes = counts[0] if counts else 1
    node = Node(
        name=row.name,
        devices=row.devices,
        device=find_gpu(row.gpu).value(),
        link=Link(row.link_kind, row.link_bytes_per_second),
        network=Link(row.network_kind, row.network_bytes_per_second_per_device),
    )
    return Cluster(name=f"{nodes}x{row.name}", nodes=nodes, node=node, asked=asked)


class MachineFacts(Frozen, frozen=True):
    """What the probe read on this machine, as text where a program or /proc prints it."""

    cpus: int
    host_memory_bytes: int
    cpuinfo: str = ""
    nvidia_smi: str = ""  # lines "index, uuid, name, memory in MiB"
    visible_devices: str | None = None
    torch_has_cuda: bool = True


def local_cluster(facts: MachineFacts) -> Cluster:
    """This machine as a Cluster: its visible GPUs where torch can use them, else its usable CPU cores."""
    gpus = visible_gpus(facts) if facts.torch_has_cuda else ()
    node = _gpu_node(gpus, facts) if gpus else _cpu_node(facts)
    return Cluster(name=node.name, nodes=1, node=node, asked="local")


def visible_gpus(facts: MachineFacts) -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves, in that variable's order."""
    rows = [[field.strip() for field in line.split(",")] for line in facts.nvidia_smi.splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[3].isdigit()]
    if facts.visible_devices is not None:
        kept = []
        for wanted in (name.strip() for name in facts.visible_devices.split(",")):
            found = [row for row in rows if row[0] == wanted or (wanted[:4] == "GPU-" and row[1].startswith(wanted))]
            if not found:
                break  # CUDA ignores everything after the first invalid name
            kept.append(found[0])
        rows = kept
    return tuple(_local_gpu(name, int(mebibytes) * 2**20) for _, _, name, mebibytes in rows)


def _local_gpu(name: str, hbm_bytes: int) -> Gpu:
    try:
        published = find_gpu(name).value()
    except RecipeError:
        return Gpu(name=name, hbm_bytes=hbm_bytes, source="nvidia-smi", notes="not in the catalogue: peaks unknown")
    return msgspec.structs.replace(published, hbm_bytes=hbm_bytes)


def _gpu_node(gpus: tuple[Gpu, ...], facts: MachineFacts) -> Node:
    first = min(gpus, key=lambda gpu: gpu.hbm_bytes)  # a plan must fit the smallest
    try:
        row = find_gpu(first.name)
        link = Link(row.link_kind, row.link_bytes_per_second)
    except RecipeError:
        link = Link("unknown")
    return Node(
        name=f"{len(gpus)}x{first.name}",
        devices=len(gpus),
        device=first,
        link=link,
        host_memory_bytes=facts.host_memory_bytes,
        host_cores=facts.cpus,
    )


def _cpu_node(facts: MachineFacts) -> Node:
    core = Gpu(
        name=_cpu_name(facts.cpuinfo),
        kind="cpu",
        hbm_bytes=facts.host_memory_bytes // facts.cpus,
        dense_fp32_flops_per_second=core_flops_per_second(facts.cpuinfo),
        source="/proc/cpuinfo",
        notes="nominal peak: two fused multiply-add units at the listed clock, shared by hardware threads",
    )
    return Node(
        name=f"{facts.cpus}xcpu-core",
        devices=facts.cpus,
        device=core,
        link=Link("shared memory"),
        host_memory_bytes=facts.host_memory_bytes,
        host_cores=facts.cpus,
    )


def _cpu_field(cpuinfo: str, key: str) -> str:
    match = re.search(rf"^{key}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else ""


def _cpu_name(cpuinfo: str) -> str:
    return _cpu_field(cpuinfo, "model name") or "CPU core"


def core_flops_per_second(cpuinfo: str) -> float | None:
    """The nominal fp32 peak of one logical core, by vector width and clock; None where unlisted."""
    flags = _cpu_field(cpuinfo, "flags").split()
    clock = re.search(r"@ ([0-9.]+)GHz", _cpu_name(cpuinfo))
    megahertz = _cpu_field(cpuinfo, "cpu MHz")
    if clock:
        hertz = float(clock.group(1)) * 1e9
    elif megahertz:
        hertz = float(megahertz) * 1e6
    else:
        return None
    lanes = 16 if "avx512f" in flags else 8 if "fma" in flags else 4
    units = 2 if "fma" in flags else 1
    siblings, cores = _cpu_field(cpuinfo, "siblings"), _cpu_field(cpuinfo, "cpu cores")
    threads = max(1, int(siblings) // int(cores)) if siblings and cores else 1
    return hertz * lanes * units * 2 / threads
