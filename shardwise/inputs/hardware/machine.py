"""This machine as a Cluster, from what a probe read of it: pure."""

import re

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.hardware.cluster import Cluster
from shardwise.inputs.hardware.published import find_gpu
from shardwise.inputs.hardware.values import Frozen, Gpu, Link, Node


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
        link = find_gpu(first.name).link()
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
