"""The data-parallel kinds: none (one process), replicated with fixed buckets (zero = 0), full shard (zero = 3).

Gradients are summed, never averaged: the step divides once by what the global batch counts.
"""

from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.errors import ModelError
from shardwise.parallel import precision
from shardwise.parallel.buckets import DEFAULT_CAP_BYTES, BucketedDataParallel


class GradientSum(Protocol):
    """How one module's gradients become the sum over the data-parallel ranks."""

    def before_backward(self, *, stage: int = 0, last: bool) -> None:
        """Right before each micro-batch's backward; `last`: none follows it in this step (of this stage)."""

    def finish(self) -> None:
        """After the last backward of a step. Collective."""

    def reshard(self) -> None:
        """Back to shards at rest, after a forward without a backward."""


class SingleProcess:
    """Nothing to add up."""

    def before_backward(self, *, stage: int = 0, last: bool) -> None:
        return

    def finish(self) -> None:
        return

    def reshard(self) -> None:
        return


class FullShard:
    """FSDP2 reduces inside each backward, so that gradients stay sharded between micro-batches (ZeRO 3)."""

    def __init__(self, units: list[FSDPModule]) -> None:
        self.units = units

    def before_backward(self, *, stage: int = 0, last: bool) -> None:
        return

    def finish(self) -> None:
        return

    def reshard(self) -> None:
        """FSDP2 leaves the root whole after a forward that has no backward."""
        for unit in self.units:
            unit.reshard()


def replicated(module: nn.Module, bucket_cap_mb: int | str) -> BucketedDataParallel:
    """zero = 0: whole parameters on every rank. Collective at each step."""
    cap = bucket_cap_mb * 2**20 if isinstance(bucket_cap_mb, int) else DEFAULT_CAP_BYTES
    return BucketedDataParallel(module, cap_bytes=cap)


def full_shard(
    module: nn.Module,
    blocks: list[nn.Module],
    fp32_modules: list[nn.Module],
    *,
    mesh: DeviceMesh,
    compute: str,
) -> FullShard:
    """zero = 3: each block is gathered for its own forward and backward; the root keeps the rest. Collective.

    A weight shared by two units moves to the root, the one unit that both lie in (fully_shard refuses it otherwise).
    """
    shared = _parameters_of_several([*blocks, *fp32_modules])
    root_owned = shared | _tied_to_root(module, [*blocks, *fp32_modules])
    _refuse_fp32_in_the_root(module, fp32_modules, root_owned)
    for kept in fp32_modules:
        if any(True for _ in kept.parameters(recurse=True)):
            fully_shard(kept, mesh=mesh, mp_policy=precision.fp32_policy(compute), ignored_params=root_owned)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision.policy(compute), ignored_params=root_owned)
    fully_shard(module, mesh=mesh, mp_policy=precision.policy(compute))
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        # Plain sums on every backend: gloo has neither AVG nor PREMUL_SUM.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
    return FullShard(units)


def _refuse_fp32_in_the_root(module: nn.Module, fp32_modules: list[nn.Module], root_owned: set[nn.Parameter]) -> None:
    """Raises: ModelError for a weight that a module kept in fp32 shares: the root would compute with it in bf16."""
    for kept in fp32_modules:
        for parameter in kept.parameters():
            if parameter in root_owned:
                names = [name for name, p in module.named_parameters(remove_duplicate=False) if p is parameter]
                raise ModelError(
                    f"{' and '.join(names)} are one weight, and only a part of its uses is kept in fp32.",
                    why="zero = 3 gathers a shared weight once, in one dtype",
                    fix="train.plan.zero = 0, or leave the module out of fp32_modules",
                )


def _parameters_of_several(units: list[nn.Module]) -> set[nn.Parameter]:
    seen: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(units):
        for parameter in unit.parameters():
            seen.setdefault(parameter, index)
    return {
        p for i, unit in enumerate(units) for p in unit.parameters() if seen[p] != i and not _inside(units, seen[p], i)
    }


def _inside(units: list[nn.Module], first: int, second: int) -> bool:
    """Whether one of two units lies in the other (an fp32 module in a block): its parameters are its own."""
    return units[first] in set(units[second].modules()) or units[second] in set(units[first].modules())


def _tied_to_root(module: nn.Module, blocks: list[nn.Module]) -> set[nn.Parameter]:
    in_blocks = {p for block in blocks for p in block.parameters()}
    block_modules = {inner for block in blocks for inner in block.modules()}
    outside = {p for inner in module.modules() if inner not in block_modules for p in inner.parameters(recurse=False)}
    return in_blocks & outside
