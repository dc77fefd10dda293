"""From an OptimizerSpec to a torch optimizer, and the little that a step asks of any optimizer."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.inputs.recipe import OptimizerSpec, ScheduleSpec
from shardwise.optimizer.schedules import Schedule

# Updates in which each number depends on its own gradient and state alone, so that a shard's update is the
# shard of the update. Exact classes: a subclass may do anything.
ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)


def build(spec: OptimizerSpec, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a recipe over the trainable parameters of `module`, as they lie there now.

    Weight decay acts on matrices (two dims and more, embeddings too), not on norms and biases.
    Raises: ModelError where nothing is trainable.
    """
    groups = decay_groups(module, spec.weight_decay)
    if spec.name == "sgd":
        # torch has no fused SGD for sharded parameters.
        sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, fused=not sharded)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups: what decays and what does not. A tied parameter stands once; a frozen one not at all.

    Raises: ModelError where nothing is trainable.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ModelError(
            f"{type(module).__name__} has no trainable parameter.",
            fix="leave requires_grad on for what is to be trained",
        )
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def schedule(spec: ScheduleSpec) -> Schedule:
    """The schedule of a recipe."""
    return Schedule(spec)


def apply_schedule(optimizer: torch.optim.Optimizer, base_lrs: Sequence[float], factor: float) -> None:
    """Set each group's learning rate to its base times `factor`."""
    for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(base * factor)
        else:
            group["lr"] = base * factor


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True for the classes in ELEMENTWISE: only these may update shards of a parameter."""
    return type(optimizer) in ELEMENTWISE
