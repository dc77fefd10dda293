"""What collectives take over real ranks of this machine, by kind, bytes and size of the group; and their line."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist

from shardwise import ranks
from shardwise.inputs.hardware import Collective
from shardwise.inputs.hardware.measured import Kind
from shardwise.profiling.timing import calls_in
from shardwise.torch_private import gather_into, reduce_scatter

KINDS: tuple[Kind, ...] = get_args(Kind)
# Bytes of the whole tensor. What starts a collective shows at the small end, what moves it at the large one.
SIZES = {"cpu": (2**12, 2**17, 2**20, 2**22, 2**24), "cuda": (2**13, 2**18, 2**21, 2**24, 2**27, 2**29)}
LEAST_CALLS, MOST_CALLS = 3, 200


def group_sizes(world: int) -> tuple[int, ...]:
    """Powers of two up to the world, and the world itself."""
    powers = [size for size in (2**exponent for exponent in range(1, world.bit_length())) if size < world]
    return (*powers, world) if world > 1 else ()


def measure(
    kind: Kind, members: int, group: Any, sizes: Sequence[int], device: torch.device, budget: float
) -> Collective | None:
    """One kind in the group of the first `members` ranks: the slowest rank's seconds at each size, and their line.

    None on ranks outside the group. Collective: every rank calls it, with the same arguments.
    """
    if ranks.rank() >= members:
        return None
    points = []
    for size in sizes:
        call, moved = prepared(kind, members, size, group, device)
        points.append((moved, _slowest(call, group, device, budget / len(sizes))))
    latency, rate = line(points)
    return Collective(kind, members, latency, rate, points=tuple(points))


def prepared(kind: Kind, members: int, size: int, group: Any, device: torch.device) -> tuple[Callable[[], Any], int]:
    """A call that makes the collective, and the bytes of its whole tensor."""
    each = max(1, size // 4 // members)
    whole, part = torch.ones(each * members, device=device), torch.ones(each, device=device)
    moved, here = 4 * whole.numel(), ranks.rank()
    calls: dict[Kind, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather_into(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "send": lambda: _passed_on(whole, here, members, group),
    }
    return calls[kind], moved


def _passed_on(tensor: torch.Tensor, here: int, members: int, group: Any) -> None:
    """Each rank but the last sends to the next, as stages of a pipeline do, all at once."""
    work = []
    if here + 1 < members:
        work.append(dist.isend(tensor, here + 1, group))
    if here:
        work.append(dist.irecv(torch.empty_like(tensor), here - 1, group))
    for one in work:
        if one is not None:
            one.wait()


def _slowest(call: Callable[[], Any], group: Any, device: torch.device, budget: float) -> float:
    """Seconds of the slowest member. How many calls is agreed on: the budget over what one takes."""
    call()
    started = time.perf_counter()
    call()
    wait = torch.zeros(1, device=device)

    def together() -> None:
        dist.all_reduce(wait, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()

    together()
    once = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX, group=group)
    calls = max(LEAST_CALLS, min(MOST_CALLS, int(budget / 2 / max(float(once), 1e-6))))
    found = torch.tensor([calls_in(call, calls, together=together)], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found)


def line(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of a start, bytes a second) of the line that is nearest to the points relative to each point's seconds.

    Weighted least squares; a start below zero is none, and a time that does not grow with the bytes is one of its own.
    Raises: ValueError without a point of more than 0 seconds.
    """
    kept = [(float(moved), seconds) for moved, seconds in points if seconds > 0]
    if not kept:
        raise ValueError("a line needs a point of more than 0 seconds")
    w = [1 / seconds**2 for _, seconds in kept]
    total = sum(w)
    mean_x = sum(a * x for a, (x, _) in zip(w, kept, strict=True)) / total
    mean_y = sum(a * y for a, (_, y) in zip(w, kept, strict=True)) / total
    spread = sum(a * (x - mean_x) ** 2 for a, (x, _) in zip(w, kept, strict=True))
    slope = sum(a * (x - mean_x) * (y - mean_y) for a, (x, y) in zip(w, kept, strict=True)) / spread if spread else 0.0
    start = mean_y - slope * mean_x
    if slope <= 0:
        start, slope = 0.0, max(y / x for x, y in kept)
    if start < 0:
        # Through the origin, by the same weights.
        start = 0.0
        slope = sum(a * x * y for a, (x, y) in zip(w, kept, strict=True)) / sum(
            a * x * x for a, (x, _) in zip(w, kept, strict=True)
        )
    return start, 1 / slope
