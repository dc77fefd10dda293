"""What is here, what works, and what is missing, from a machine's facts."""

import platform
from collections.abc import Mapping, Sequence

import msgspec

from shardwise.inputs.hardware import MachineFacts, local_cluster
from shardwise.units import format_bytes


class Finding(msgspec.Struct, frozen=True):
    """One line: what was looked at, what was found, and what to do where that is not enough."""

    name: str
    found: str
    ok: bool = True
    fix: str = ""


def findings(facts: MachineFacts, torch: str | None, versions: Mapping[str, str]) -> tuple[Finding, ...]:
    """In the order in which a person would look."""
    cluster = local_cluster(facts)
    devices = f"{cluster.name} ({cluster.device.name}, {format_bytes(cluster.device.hbm_bytes)} each)"
    return (
        Finding("shardwise", versions.get("shardwise", "not installed")),
        Finding("python", platform.python_version()),
        _torch(torch),
        Finding("devices", devices),
        _gpus(facts),
        Finding("backend", "NCCL, and gloo for CPU tensors" if cluster.kind == "gpu" else "gloo"),
        Finding("cores", f"{facts.cpus} usable"),
        Finding("memory", format_bytes(facts.host_memory_bytes)),
        *(Finding(name, version) for name, version in versions.items() if name != "shardwise"),
    )


def _torch(version: str | None) -> Finding:
    if version is None:
        return Finding("torch", "not installed", ok=False, fix="pip install 'torch>=2.11,<2.15'")
    return Finding("torch", version)


def _gpus(facts: MachineFacts) -> Finding:
    listed = len([line for line in facts.nvidia_smi.splitlines() if line.strip()])
    if not listed:
        return Finding("GPUs", "none (nvidia-smi lists none): training runs on CPU cores")
    if not facts.torch_has_cuda:
        fix = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Finding("GPUs", f"{listed}, which this CPU build of torch cannot use", ok=False, fix=fix)
    if facts.visible_devices is not None:
        return Finding("GPUs", f"{listed}, of which CUDA_VISIBLE_DEVICES={facts.visible_devices!r} leaves some")
    return Finding("GPUs", str(listed))


def text(found: Sequence[Finding]) -> str:
    lines = []
    for one in found:
        lines.append(f"{'ok     ' if one.ok else 'MISSING'} {one.name:<12} {one.found}")
        if one.fix:
            lines.append(f"        fix: {one.fix}")
    return "\n".join(lines)


def values(found: Sequence[Finding]) -> dict[str, dict[str, str | bool]]:
    return {one.name: {"found": one.found, "ok": one.ok, "fix": one.fix} for one in found}
