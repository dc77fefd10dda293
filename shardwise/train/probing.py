"""What each rank of `shardwise doctor --measure` runs: `python -m shardwise.train.probing WORK_FILE`.

The engine's own blocks are measured, so it stands above the models. All ranks measure at the same time, as all are busy
in training; what one finds is the mean over ranks. Progress and the result are files that the command reads.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shardwise import ranks
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Attention, Collective, Matmul, Measured, Threads
from shardwise.models.decoder import Block, RMSNorm, RotaryTables, rotate
from shardwise.profiling import collective_speed, device_speed
from shardwise.profiling.disk_speed import measure as disk_speed
from shardwise.profiling.timing import seconds_a_call


class Work(msgspec.Struct, frozen=True):
    """What the command asks for. budget_seconds: of all measurements together; folder: whose disk is measured."""

    budget_seconds: float
    folder: str
    progress: str
    result: str
    by: str
    cores: int


class Task(NamedTuple):
    """One measurement: what it is called, its share of the budget, and what makes it."""

    name: str
    share: float
    run: Callable[[float], Any]


def main(arguments: list[str]) -> None:
    """Measure, and leave the result. Collective."""
    work = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Work)
    device = ranks.start()
    # A core a rank: what a product takes is then what one core does while its neighbours are as busy.
    if device.type == "cpu":
        torch.set_num_threads(max(1, work.cores // ranks.world()))
    tasks = list(_tasks(work, device))
    whole = sum(task.share for task in tasks)
    found = []
    for number, task in enumerate(tasks):
        _tell(work, number, len(tasks), task.name)
        ranks.barrier()
        found.append(task.run(work.budget_seconds * task.share / whole))
    if ranks.is_main():
        Path(work.result).write_bytes(msgspec.json.encode(_together(found, work.by)))
    _tell(work, len(tasks), len(tasks), "done")
    ranks.stop()


def _tell(work: Work, done: int, total: int, name: str) -> None:
    if ranks.is_main():
        with Path(work.progress).open("a") as file:
            file.write(msgspec.json.encode({"done": done, "total": total, "name": name}).decode() + "\n")


def _together(found: list[Any], by: str) -> Measured:
    """The values of rank 0 as one: lists by kind, and named numbers."""
    many: dict[type, list[Any]] = {Matmul: [], Attention: [], Collective: [], Threads: []}
    named: dict[str, float] = {}
    for one in found:
        if isinstance(one, dict):
            named |= one
        elif one is not None:
            many[type(one)].append(one)
    return Measured(
        by=by, matmuls=tuple(many[Matmul]), attention=tuple(many[Attention]), collectives=tuple(many[Collective]),
        threads=tuple(many[Threads]), **named,
    )  # fmt: skip


def _tasks(work: Work, device: torch.device) -> Iterator[Task]:
    """Everything that is measured here, in an order in which a person would ask."""
    kind = device.type
    for precision in ("fp32",) if kind == "cpu" else ("bf16", "fp32"):
        for product in device_speed.PRODUCTS[kind]:
            name = f"product {product.m} x {product.k} x {product.n} in {precision}"
            yield Task(name, 1.0, _product(product, precision, device))
        for sequence, head in device_speed.ATTENTIONS[kind]:
            yield Task(f"attention of {sequence} in {precision}", 1.0, _attention(sequence, head, precision, device))
    numbers: dict[str, tuple[str, Callable[[torch.device, float], float]]] = {
        "memory_bytes_per_second": ("memory", device_speed.memory_bytes_per_second),
        "pointwise_bytes_per_second": ("norms, gates and positions", pointwise_bytes_per_second),
        "loss_bytes_per_second": ("cross entropy", device_speed.loss_bytes_per_second),
        "optimizer_bytes_per_second": ("AdamW", device_speed.optimizer_bytes_per_second),
        "block_host_seconds": ("starting operators", block_host_seconds),
    }
    if kind == "cuda":
        numbers["host_to_device_bytes_per_second"] = ("host to device", device_speed.host_to_device_bytes_per_second)
    for key, (name, measure) in numbers.items():
        yield Task(name, 2.0, _mean(key, measure, device))
    yield from _collectives(device)
    if kind == "cpu" and ranks.world() > 1:
        yield Task(f"one rank on {work.cores} cores", 3.0, lambda budget: threads(work.cores, device, budget))
    yield Task("disk", 3.0, lambda budget: _disk(Path(work.folder), budget))


def _product(product: device_speed.Product, precision: Any, device: torch.device) -> Callable[[float], Matmul]:
    def run(budget: float) -> Matmul:
        found = device_speed.matmul(product, precision, device, budget)
        return msgspec.structs.replace(found, flops_per_second=_over_ranks(found.flops_per_second))

    return run


def _attention(sequence: int, head: int, precision: Any, device: torch.device) -> Callable[[float], Attention]:
    def run(budget: float) -> Attention:
        found = device_speed.attention(sequence, head, precision, device, budget)
        rates = ("forward_flops_per_second", "backward_flops_per_second")
        return msgspec.structs.replace(found, **{name: _over_ranks(getattr(found, name)) for name in rates})

    return run


def _mean(key: str, measure: Callable[[torch.device, float], float], device: torch.device) -> Callable[[float], Any]:
    return lambda budget: {key: _over_ranks(measure(device, budget))}


def _over_ranks(value: float) -> float:
    """The mean. Collective."""
    found = ranks.gather_json(value)
    return float(sum(found) / len(found))


def _collectives(device: torch.device) -> Iterator[Task]:
    sizes = collective_speed.SIZES[device.type]
    for members in collective_speed.group_sizes(ranks.world()):
        group = dist.new_group(range(members))
        for kind in collective_speed.KINDS:
            yield Task(
                f"{kind} over {members} ranks", 1.5,
                lambda budget, k=kind, n=members, g=group: collective_speed.measure(k, n, g, sizes, device, budget),
            )  # fmt: skip


def _disk(folder: Path, budget: float) -> dict[str, float]:
    """By one rank; the others wait."""
    found = ranks.on_main(lambda: list(disk_speed(folder, budget)))
    return {"disk_write_bytes_per_second": found[0], "disk_read_bytes_per_second": found[1]}


def threads(cores: int, device: torch.device, budget: float) -> Threads | None:
    """What one rank does on all cores while the others wait, as times what it does on its share while they do too."""

    def measured(count: int) -> tuple[float, float]:
        torch.set_num_threads(count)
        product = device_speed.matmul(device_speed.Product(1024, 512, 512), "fp32", device, budget / 4)
        return product.flops_per_second, pointwise_bytes_per_second(device, budget / 4)

    alone = torch.get_num_threads()
    found: dict[str, float] = ranks.on_main(lambda: dict(zip(("products", "memory"), measured(cores), strict=True)))
    ranks.barrier()
    torch.set_num_threads(alone)
    share = [sum(column) / ranks.world() for column in zip(*ranks.gather_json(measured(alone)), strict=True)]
    return Threads(cores, found["products"] / share[0], found["memory"] / share[1]) if cores > 1 else None


# ------------------------------------------------------------------ the engine's own block


def _arch(hidden: int, heads: int, ffn: int, positions: int) -> Arch:
    return Arch(
        name="probe", hidden_size=hidden, num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads,
        ffn_size=ffn, vocab_size=64, max_sequence_length=positions,
    )  # fmt: skip


def block_host_seconds(device: torch.device, budget: float) -> float:
    """Forward and backward of one block with next to nothing to compute."""
    arch = _arch(hidden=32, heads=2, ffn=32, positions=8)
    block, tables = Block(arch).to(device), RotaryTables(arch).to(device)
    tables.fill()
    cos, sin = tables(8)
    x = torch.randn(1, 8, 32, device=device, requires_grad=True)
    wanted = [x, *block.parameters()]

    def both() -> None:
        torch.autograd.grad(block(x, cos, sin).sum(), wanted)

    return seconds_a_call(both, budget)


def pointwise_bytes_per_second(device: torch.device, budget: float) -> float:
    """Of a block's norms, residuals, positions and gate, forward and backward.

    The least that they move, as cost/layer_time.py counts: two halves of norm and residual, five numbers each (a norm
    reads and writes, a residual reads twice and writes); queries and keys turned and values; a gate of three widths.
    Backward is twice forward.
    """
    tokens, hidden, ffn = (1024, 512, 1408) if device.type == "cpu" else (8192, 4096, 14336)
    arch = _arch(hidden, hidden // 64, ffn, tokens)
    tables = RotaryTables(arch).to(device)
    tables.fill()
    cos, sin = tables(tokens)
    norm = RMSNorm(hidden, 1e-6).to(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    made: list[nn.Parameter] = [
        nn.Parameter(torch.randn(1, tokens, width, device=device, dtype=dtype))
        for width in (hidden, hidden, hidden, ffn, ffn)
    ]
    x, q, k, gate, up = made

    def forward() -> list[torch.Tensor]:
        turned = [rotate(one.unflatten(-1, (-1, 64)), cos, sin).flatten(2) for one in (q, k)]
        first = x + norm(x).to(dtype)
        return [first + norm(first).to(dtype), *turned, F.silu(gate) * up]

    ones = [torch.ones_like(one) for one in forward()]

    def both() -> None:
        torch.autograd.grad(forward(), [*made, norm.weight], ones)

    width = 2 * 5 * hidden + (2 + 2) * hidden + 3 * ffn
    return 3 * tokens * width * dtype.itemsize / seconds_a_call(both, budget)


if __name__ == "__main__":
    main(sys.argv[1:])
