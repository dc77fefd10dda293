"""One precision: fp32 master parameters, compute copies in the plan's dtype, fp32 reductions and norms.

Under zero = 3 torch's MixedPrecisionPolicy does it; elsewhere ComputeCopies does the same with plain tensors, so that
bf16 means the same on one process, on replicated and on sharded ranks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import recompute
from shardwise.errors import ModelError
from shardwise.torch_private import parameter_slots, tree_map

COMPUTE_DTYPE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def master_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters, gradients and optimizer states at rest."""
    return torch.float64 if precision == "fp64" else torch.float32


def is_mixed(precision: str) -> bool:
    return precision in ("bf16", "fp16")


def policy(precision: str) -> MixedPrecisionPolicy:
    """For the root and the blocks. Outputs of the root are cast to fp32 by `cast_outputs`."""
    if not is_mixed(precision):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE[precision], reduce_dtype=torch.float32)


def fp32_policy(precision: str) -> MixedPrecisionPolicy:
    """For a module kept in fp32 inside a model that computes in another dtype."""
    return MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=COMPUTE_DTYPE[precision]
    )


def to_master(module: nn.Module, precision: str, fp32_modules: Iterable[nn.Module] = ()) -> None:
    """Cast floating parameters and buffers to the master dtype, in place.

    What is frozen has nothing to add to a master: it lies in the dtype that it computes in, outside of `fp32_modules`.
    """
    master, compute = master_dtype(precision), COMPUTE_DTYPE[precision]
    in_fp32 = {parameter for kept in fp32_modules for parameter in kept.parameters()}
    frozen = {parameter for parameter in module.parameters() if not parameter.requires_grad} - in_fp32
    for tensor in [*module.parameters(), *module.buffers()]:
        dtype = compute if tensor in frozen else master
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def select_fp32_modules(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The outermost modules at these paths, each with all that lies in it.

    Raises: ModelError for a path that is not there, or for the whole model.
    """
    found = []
    modules = dict(module.named_modules())
    for name in names:
        if name not in modules:
            raise ModelError(
                f"model.fp32_modules names {name!r}, which the model has not.",
                fix=f"use a path such as {', '.join(list(modules)[1:4])}",
            )
        if modules[name] is module:
            raise ModelError("model.fp32_modules names the whole model.", fix='train.precision = "fp32"')
        found.append(modules[name])
    return outside(list(dict.fromkeys(found)), found)


def outside(units: list[nn.Module], kept: list[nn.Module]) -> list[nn.Module]:
    """The units that lie in none of the kept modules."""
    inner = {one for module in kept for one in module.modules() if one is not module}
    return [unit for unit in units if unit not in inner]


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nested value; the rest stands as it is."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf,
        value,
    )


def cast_outputs(module: nn.Module) -> None:
    """The model's outputs leave in fp32, so that the loss is computed there."""
    module.register_forward_hook(lambda _module, _args, output: cast_floats(output, torch.float32))


class ComputeCopies:
    """Swaps a unit's parameters for copies in the compute dtype while its forward runs.

    The copy is part of the graph, so a gradient comes back through the cast into the fp32 master's `.grad`, where
    micro-batches are added up.
    """

    def __init__(
        self,
        unit: nn.Module,
        skip: set[nn.Module],
        param_dtype: torch.dtype,
        output_dtype: torch.dtype | None,
    ):
        self.owners = [owner for owner in _owned_modules(unit, skip) if parameter_slots(owner)]
        self.param_dtype = param_dtype
        self.output_dtype = output_dtype
        self.masters: list[tuple[nn.Module, str, nn.Parameter]] = []
        unit.register_forward_pre_hook(self.enter, with_kwargs=True)
        unit.register_forward_hook(self.leave, always_call=True)
        recompute.during(unit, self.swapped)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Copies in place once more, of the same values, for a block that runs again in backward."""
        self.put_copies()
        try:
            yield
        finally:
            self.put_masters()

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.put_copies()
        return cast_floats(args, self.param_dtype), cast_floats(kwargs, self.param_dtype)

    def put_copies(self) -> None:
        # One copy for each parameter, however many names it has, so that tied weights stay one.
        copies: dict[nn.Parameter, torch.Tensor] = {}
        for owner in self.owners:
            for name, parameter in parameter_slots(owner).items():
                if parameter is None or not parameter.is_floating_point() or not isinstance(parameter, nn.Parameter):
                    continue
                if parameter not in copies:
                    copies[parameter] = parameter.to(self.param_dtype)
                self.masters.append((owner, name, parameter))
        for owner, name, parameter in self.masters:
            parameter_slots(owner)[name] = copies[parameter]

    def put_masters(self) -> None:
        for owner, name, parameter in self.masters:
            parameter_slots(owner)[name] = parameter
        self.masters.clear()

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        self.put_masters()
        return output if self.output_dtype is None else cast_floats(output, self.output_dtype)


def _owned_modules(unit: nn.Module, skip: set[nn.Module]) -> list[nn.Module]:
    owned, stack = [], [unit]
    while stack:
        current = stack.pop()
        owned.append(current)
        stack.extend(child for child in current.children() if child not in skip)
    return owned


def apply_compute_copies(
    module: nn.Module, blocks: list[nn.Module], fp32_modules: list[nn.Module], precision: str
) -> None:
    """Mixed precision for a module whose parameters are plain tensors (one process, or replicated)."""
    dtype = COMPUTE_DTYPE[precision]
    units = {*blocks, *fp32_modules}
    for kept in fp32_modules:
        ComputeCopies(kept, units - {kept}, torch.float32, dtype)
    for block in blocks:
        ComputeCopies(block, units - {block}, dtype, None)
    ComputeCopies(module, units, dtype, None)
