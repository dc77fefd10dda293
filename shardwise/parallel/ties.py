"""Tied weights whose names lie on several stages: one copy a rank, kept one weight by equal bits."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.names import canonical
from shardwise.parallel.device_mesh import Mesh
from shardwise.parallel.outline import Tie
from shardwise.plan.schedules import rank_of_stage


class Ties:
    """Weights with a copy on several ranks of a pipeline: they start equal, and get one gradient.

    `alias`: each name that this rank holds of a weight whose first name lies on another rank, and that first name. Such
    a copy counts neither in a norm nor in a checkpoint.
    """

    def __init__(self, ties: Sequence[Tie], module: nn.Module, mesh: Mesh, schedule: str) -> None:
        self.module, self.group, here = module, mesh.group("pp"), mesh.index("pp")
        self.shared: list[tuple[tuple[str, ...], list[int]]] = []  # names, and the pipeline's ranks that hold one
        self.alias: dict[str, str] = {}
        self.here = here
        for tie in ties:
            holders = [rank_of_stage(schedule, stage, mesh.degree("pp")) for stage in tie.stages]
            owners = list(dict.fromkeys(holders))
            if len(owners) > 1 and here in owners:
                self.shared.append((tie.names, owners))
                if here != owners[0]:
                    held = (name for name, holder in zip(tie.names, holders, strict=True) if holder == here)
                    self.alias.update(dict.fromkeys(held, tie.names[0]))

    def start(self) -> None:
        """After initialisation, and after a load: every copy becomes the first owner's. Collective over the owners."""
        for parameter, owners in self._held():
            mine = _local(parameter.detach())
            values = self._exchanged(mine, owners)
            mine.copy_(values[0])

    def finish(self) -> None:
        """After a step's last backward and data-parallel reduction: each copy's gradient is the sum over all of them,
        added up in one order, so that all have the same bits. Collective over the owners."""
        for parameter, owners in self._held():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = _local(parameter.grad)
            total, *others = self._exchanged(mine, owners)
            for other in others:
                total = total + other
            mine.copy_(total)

    def _held(self) -> list[tuple[nn.Parameter, list[int]]]:
        here = {canonical(name): p for name, p in self.module.named_parameters(remove_duplicate=False)}
        return [(next(here[n] for n in names if n in here), owners) for names, owners in self.shared]

    def _exchanged(self, mine: torch.Tensor, owners: list[int]) -> list[torch.Tensor]:
        """Every owner's tensor, in the owners' order."""
        ranks = dist.get_process_group_ranks(self.group)
        sent = mine.contiguous()
        values = [sent if owner == self.here else torch.empty_like(sent) for owner in owners]
        calls = []
        for owner, value in zip(owners, values, strict=True):
            if owner != self.here:
                calls.append(dist.P2POp(dist.isend, sent, ranks[owner], self.group))
                calls.append(dist.P2POp(dist.irecv, value, ranks[owner], self.group))
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return values


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
