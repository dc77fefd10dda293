"""Every collective of one rank in order: its kind, its bytes, its group."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.torch_private import group_of_name
from shardwise.verify.agreement import Call
from shardwise.verify.values import Phase

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


class Operator(NamedTuple):
    """How to read a collective operator: which argument holds the whole tensor (-1: its result), which the group."""

    kind: str
    whole: int
    group: int


_OPERATORS = {
    "c10d::allreduce_": Operator("all_reduce", 0, 1),
    "c10d::allreduce_coalesced_": Operator("all_reduce", 0, 1),
    "c10d::broadcast_": Operator("broadcast", 0, 1),
    "c10d::reduce_": Operator("reduce", 0, 1),
    "c10d::allgather_": Operator("all_gather", 0, 2),
    "c10d::_allgather_base_": Operator("all_gather", 0, 2),
    "c10d::allgather_into_tensor_coalesced_": Operator("all_gather", 0, 2),
    "c10d::reduce_scatter_": Operator("reduce_scatter", 1, 2),
    "c10d::_reduce_scatter_base_": Operator("reduce_scatter", 1, 2),
    "c10d::reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 1, 2),
    "c10d::gather_": Operator("gather", 0, 2),
    "c10d::scatter_": Operator("scatter", 1, 2),
    "c10d::alltoall_": Operator("all_to_all", 1, 2),
    "c10d::alltoall_base_": Operator("all_to_all", 1, 2),
    "c10d::send": Operator("send", 0, 1),
    "c10d::recv_": Operator("receive", 0, 1),
    "c10d::barrier": Operator("barrier", 0, 1),
    "_c10d_functional::all_reduce": Operator("all_reduce", 0, 2),
    "_c10d_functional::all_reduce_": Operator("all_reduce", 0, 2),
    "_c10d_functional::broadcast": Operator("broadcast", 0, 2),
    "_c10d_functional::broadcast_": Operator("broadcast", 0, 2),
    "_c10d_functional::all_gather_into_tensor": Operator("all_gather", -1, 2),
    "_c10d_functional::all_gather_into_tensor_coalesced": Operator("all_gather", -1, 2),
    "_c10d_functional::reduce_scatter_tensor": Operator("reduce_scatter", 0, 3),
    "_c10d_functional::reduce_scatter_tensor_coalesced": Operator("reduce_scatter", 0, 3),
    "_c10d_functional::all_to_all_single": Operator("all_to_all", 0, 3),
    "_c10d_functional_autograd::all_gather_into_tensor": Operator("all_gather", -1, 2),
    "_c10d_functional_autograd::reduce_scatter_tensor": Operator("reduce_scatter", 0, 3),
    "_c10d_functional_autograd::all_to_all_single": Operator("all_to_all", 0, 3),
    "_dtensor::shard_dim_alltoall": Operator("all_to_all", 0, 3),
}
_WAITS = frozenset({"_c10d_functional::wait_tensor"})


class Traffic:
    """The calls so far, and the phase that the next ones belong to."""

    def __init__(self) -> None:
        self.phase: Phase = "built"
        self.calls: list[Call] = []

    def note(self, operator: Any, args: Any, result: Any) -> list[torch.Tensor]:
        """The tensors that cross, empty for an operator that is no collective.

        Raises: NotImplementedError for a collective that is not in the table: left out, it would go unseen.
        """
        if operator.namespace not in _NAMESPACES:
            return []
        name = operator.name().split(".")[0]
        if name in _WAITS:
            return []
        if name not in _OPERATORS:
            raise NotImplementedError(f"{name} is a collective that a dry run does not know")
        how = _OPERATORS[name]
        members = _ranks(args[how.group])
        whole = _tensors(result if how.whole < 0 else args[how.whole])
        peer = members[args[2]] if how.kind in ("send", "receive") else None
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        self.calls.append(Call(how.kind, size, members, self.phase, peer))
        return _tensors(args) + _tensors(result)


def _ranks(group: Any) -> tuple[int, ...]:
    found = group_of_name(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(found))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Lists of lists too; the rest of a collective's arguments are numbers and handles."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
