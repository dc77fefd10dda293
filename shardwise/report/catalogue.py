"""The machines of the catalogue, as text and as JSON."""

import msgspec

from shardwise.inputs.hardware import CatalogueGpu, CatalogueNode, catalogue
from shardwise.units import format_bytes

GPU_HEADS = ("GPU", "memory", "bandwidth", "SMs", "bf16", "measured", "fp8", "link")
NODE_HEADS = ("node", "GPUs", "network a GPU", "cards")


def text() -> str:
    """GPUs and nodes with what the planner counts with; `-` where a number is not known. Peaks are dense."""
    known = catalogue()
    gpus = [(_gpu_cells(row), row.aliases) for row in known.gpu]
    nodes = [(_node_cells(row), row.aliases) for row in known.node]
    return "\n".join([*_table(GPU_HEADS, gpus), "", *_table(NODE_HEADS, nodes)])


def as_json() -> str:
    """Every row of the catalogue with its source and notes."""
    return msgspec.json.encode(catalogue()).decode()


def _gpu_cells(gpu: CatalogueGpu) -> tuple[str, ...]:
    return (
        gpu.name,
        format_bytes(gpu.hbm_bytes),
        _rate(gpu.hbm_bytes_per_second),
        str(gpu.multiprocessors or "-"),
        _flops(gpu.dense_bf16_flops_per_second),
        _flops(gpu.measured_bf16_flops_per_second),
        _flops(gpu.dense_fp8_flops_per_second),
        _rate(gpu.link_bytes_per_second),
    )


def _node_cells(node: CatalogueNode) -> tuple[str, ...]:
    network = _rate(node.network_bytes_per_second_per_device)
    return (node.name, f"{node.devices} x {node.gpu}", network, str(node.nics or "-"))


def _table(heads: tuple[str, ...], rows: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    widths = [
        max(len(cells[column]) for cells in (heads, *(cells for cells, _ in rows))) for column in range(len(heads))
    ]
    lines = [(heads, "aliases"), *((cells, ", ".join(aliases)) for cells, aliases in rows)]
    return [f"{_aligned(cells, widths)}  {last}".rstrip() for cells, last in lines]


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    """The first to the left, numbers to the right."""
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([cells[0].ljust(widths[0]), *rest])


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.0f} GB/s" if speed >= 1e10 else f"{speed / 1e9:.1f} GB/s"


def _flops(speed: float | None) -> str:
    return "-" if speed is None else f"{speed / 1e12:.0f} TF/s"
