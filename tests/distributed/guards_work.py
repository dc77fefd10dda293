"""What the pool's ranks run for the guards: training by the engine's parts, with a fault planted on one rank."""

import math
import time
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import ranks
from shardwise.data.batches import Batches
from shardwise.errors import RanksDiverged
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.parallel.parallelize import Parallel, parallel_of
from shardwise.plan.mesh import MeshShape
from shardwise.resilience.guards import Guards, fingerprints, parts_of, summed_bits
from shardwise.train.own_loop import batches
from shardwise.train.step import Work, accumulate, agree, call_inputs, local, local_gradients, scale_gradients, squares
from tests.distributed import work


def guarded(
    mesh: dict[str, int], zero: int = 0, fault: str = "", on: int = 0, name: str = "", shape: Any = None, **more: Any
) -> dict[str, Any]:
    """Four steps with a look after every second; the fault comes with the third, on rank `on`."""
    made = work.plan(ranks.world(), zero=zero, global_batch=8, mesh=mesh, precision="fp32", **more)
    with torch.device("meta"):
        module: nn.Module = Decoder(work.arch(**{"num_layers": 2, "tied_embeddings": True, **(shape or {})}))
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, 0))
    parallel = parallel_of(module)
    optimizer = sw.build_optimizer(module, lambda m: work.optimizer_of("adamw", m))
    guards = Guards(module, made.decision.mesh, every_steps=2, aliases=parallel.aliases)
    shared = sorted({part.split(" ")[0] for family in guards.families.values() for part in family})
    data = batches(Batches(work.UnevenTokens(30), workers=0), made)
    for number, micros in enumerate(data, start=1):
        chosen = fault if number == 3 and ranks.rank() == on else ""
        told = step(parallel, module, optimizer, list(micros), number, chosen, name)
        if chosen == "flip":
            flip(module, name)
        if fault == "untie" and number == 4 and ranks.rank() == on:  # fully_shard would tie them again in a forward
            module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())
        if number == 3 and fault == "twice" and ranks.rank() == on:
            parallel.speaks = not parallel.speaks
        if not guards.due(number):
            continue
        if number == 4 and ranks.rank() == on:
            disturb(told, fault)
        try:
            guards.check(number, **told)
        except RanksDiverged as error:
            return {"what": error.what, "why": error.why, "fix": error.fix, "at": number, "shared": shared}
        if number == 4:
            break
    return {"what": "", "at": guards.passed, "shared": shared}


def step(
    parallel: Parallel, module: nn.Module, optimizer: Any, micros: list[Any], number: int, fault: str, name: str
) -> dict[str, Any]:
    """One update as the Trainer makes it, and what it tells the guards."""
    sums = accumulate(parallel, Work(module, micros, work.loss, call_inputs(module, "auto"), number))
    outcome, (squared,) = agree(parallel, sums, [squares(parallel)])
    norm = math.sqrt(squared) / outcome.count
    scale_gradients(local_gradients(parallel), 1 / outcome.count)
    if fault == "gradient":
        local(dict(module.named_parameters())[name].grad).mul_(1.001)
    if fault == "settings":
        optimizer.param_groups[0]["lr"] *= 1.01
    optimizer.step()
    optimizer.zero_grad()
    return {
        "counted": {loss: float(count) for loss, (_, count) in sums.losses.items()},
        "divided": dict.fromkeys(outcome.losses, outcome.count),
        "alike": {"gradient norm": norm, "loss": outcome.loss},
    }


def flip(module: nn.Module, name: str) -> None:
    """One bit of the first number that this rank holds of a parameter; a lower one might be rounded away again."""
    local(dict(module.named_parameters())[name].detach()).view(torch.int32).view(-1)[0] ^= 1 << 12


def disturb(told: dict[str, Any], fault: str) -> None:
    for loss, count in told["counted"].items():
        told["counted"][loss] = count + (fault == "count")
    for loss, count in told["divided"].items():
        told["divided"][loss] = count * (2 if fault == "divisor" else 1)
    if fault == "norm":
        told["alike"]["gradient norm"] = math.nextafter(told["alike"]["gradient norm"], 1e9)


def cost(hidden: int, layers: int) -> dict[str, float]:
    """Seconds of a look at a replicated model, by its parts; best of five."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))
    guards = Guards(module, MeshShape(dp_replicate=ranks.world()), every_steps=1)
    told = {"counted": {"loss": 1.0}, "divided": {"loss": float(ranks.world())}, "alike": {"gradient norm": 1.0}}
    one, parts = next(iter(parts_of(module).values())), parts_of(module)

    def best(act: Any) -> float:
        times = []
        for _ in range(5):
            ranks.barrier()
            started = time.perf_counter()
            act()
            times.append(time.perf_counter() - started)
        return min(times)

    return {
        "numbers": sum(p.numel() for p in module.parameters()),
        "look": best(lambda: guards.check(1, **told)),
        "hash": best(lambda: fingerprints(parts)),
        "gather": best(lambda: ranks.gather_json({"family": 1, "counted": {"loss": 1.0}})),
        "summed, bytes a second": one.numel() * 4 / best(lambda: summed_bits(one)),
    }
