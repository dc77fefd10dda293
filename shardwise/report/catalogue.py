"""The machines of the catalogue, as text."""

from shardwise.inputs.hardware import catalogue
from shardwise.units import format_bytes


def text() -> str:
    """GPUs and nodes with what the planner counts with; `-` where a number is not known."""
    known = catalogue()
    lines = [f"{'GPU':<22}{'memory':>11}{'bf16':>10}{'fp8':>10}{'link':>12}  aliases"]
    for gpu in known.gpu:
        speeds = [_flops(gpu.dense_bf16_flops_per_second), _flops(gpu.dense_fp8_flops_per_second)]
        link = f"{gpu.link_bytes_per_second / 1e9:.0f} GB/s"
        cells = f"{gpu.name:<22}{format_bytes(gpu.hbm_bytes):>11}{speeds[0]:>10}{speeds[1]:>10}{link:>12}"
        lines.append(f"{cells}  {', '.join(gpu.aliases)}".rstrip())
    lines += ["", f"{'node':<22}{'GPUs':<28}{'network a GPU':>15}  aliases"]
    for node in known.node:
        network = f"{node.network_bytes_per_second_per_device / 1e9:.1f} GB/s"
        devices = f"{node.devices} x {node.gpu}"
        lines.append(f"{node.name:<22}{devices:<28}{network:>15}  {', '.join(node.aliases)}".rstrip())
    return "\n".join(lines)


def _flops(speed: float | None) -> str:
    return "-" if speed is None else f"{speed / 1e12:.0f} TF/s"
