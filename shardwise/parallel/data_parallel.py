"""The data-parallel kinds: none (one process), replicated with fixed buckets (zero = 0), sharded (zero = 1, 2, 3).

Gradients are summed, never averaged: the step divides once by what the global batch counts. What each ZeRO stage holds
and when is plan/zero.py's table.
"""

from collections.abc import Sequence
from typing import Protocol, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.errors import ModelError
from shardwise.parallel import precision
from shardwise.parallel.buckets import DEFAULT_CAP_BYTES, BucketedDataParallel
from shardwise.parallel.device_mesh import Mesh
from shardwise.plan import schedules
from shardwise.plan.plan import Decision


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


class Sharded:
    """FSDP2 over one root a stage of the pipeline; the ZeRO stage says when it gathers and when it reduces.

    1: a step gathers once and reduces once, in its last backward. 2: it reduces in every backward. 3: it also lets
    every block go after its forward and after its backward.
    """

    def __init__(self, roots: dict[int, FSDPModule], zero: int) -> None:
        self.roots, self.zero = roots, zero

    def before_backward(self, *, stage: int = 0, last: bool) -> None:
        root = self.roots[stage]
        root.set_requires_gradient_sync(last or self.zero > 1)
        root.set_reshard_after_backward(last or self.zero > 2)
        root.set_is_last_backward(last)

    def finish(self) -> None:
        return

    def reshard(self) -> None:
        """Where no backward comes, FSDP2 leaves whole the root, and below zero = 3 every block."""
        for root in self.roots.values():
            for unit in _units_of(cast(nn.Module, root)):
                unit.reshard()


def apply(
    module: nn.Module,
    stages: Sequence[nn.Module],
    units: Sequence[nn.Module],
    fp32_modules: Sequence[nn.Module],
    mesh: Mesh,
    decision: Decision,
) -> GradientSum:
    """Make a module's gradients sums over the data-parallel ranks, as the decision's ZeRO stage has it.

    `stages` are this rank's, each with its `index`; none without a pipeline. `units` are gathered one by one;
    `fp32_modules` compute in fp32. zero = 0 needs storage on the device; the others also take meta. Parameters may be
    DTensors on the tp mesh. Collective. Raises: ModelError.
    """
    if mesh.shape.data_parallel == 1:
        return SingleProcess()
    if decision.zero == 0:
        return BucketedDataParallel(
            module,
            group=mesh.group("dp_replicate"),
            cap_bytes=_cap(decision),
            stages=stages,
            # A weight's gradient may come after its stage's last announced backward.
            early=decision.schedule not in schedules.SPLIT_BACKWARD,
        )
    sharding = mesh.submesh("dp_replicate", "dp_shard")
    if sharding is None:
        raise ModelError("There is no rank to shard over.", fix="train.plan.zero = 0")
    roots = {int(getattr(stage, "index", 0)): stage for stage in stages or (module,)}
    _refuse_shared_between(list(roots.values()))
    return Sharded(
        {
            index: _shard(root, units, fp32_modules, mesh=sharding, zero=decision.zero, compute=decision.precision)
            for index, root in roots.items()
        },
        decision.zero,
    )


def _cap(decision: Decision) -> int:
    cap = decision.bucket_cap_mb
    return cap * 2**20 if isinstance(cap, int) else DEFAULT_CAP_BYTES


def _shard(
    root: nn.Module,
    units: Sequence[nn.Module],
    fp32_modules: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    zero: int,
    compute: str,
) -> FSDPModule:
    """Shard each of the units that lie in `root`, and as one more unit all else that it holds.

    A weight shared by two units moves to the root, the one unit that both lie in (fully_shard refuses it otherwise).
    """
    inside = set(root.modules())
    units, fp32_modules = ([one for one in several if one in inside] for several in (units, fp32_modules))
    root_owned = _parameters_of_several([*units, *fp32_modules]) | _tied_to_root(root, [*units, *fp32_modules])
    _refuse_fp32_in_the_root(root, fp32_modules, root_owned)

    def wrap(unit: nn.Module, policy: MixedPrecisionPolicy, ignored: set[nn.Parameter] | None = None) -> None:
        # None is torch's own choice for zero = 3: what the root gathers, backward needs at once.
        reshard = None if zero == 3 else False
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=ignored, reshard_after_forward=reshard)

    for kept in fp32_modules:
        if any(True for _ in kept.parameters(recurse=True)):
            wrap(kept, precision.fp32_policy(compute), root_owned)
    for unit in units:
        wrap(unit, precision.policy(compute), root_owned)
    wrap(root, precision.policy(compute))
    for sharded in _units_of(root):
        # Plain sums on every backend, over both axes of a hybrid: gloo has neither AVG nor PREMUL_SUM.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    return _units_of(root)[0]


def _units_of(root: nn.Module) -> list[FSDPModule]:
    """The root and the units in it, the root first."""
    return [unit for unit in root.modules() if isinstance(unit, FSDPModule)]


def _refuse_shared_between(roots: list[nn.Module]) -> None:
    """Raises: ModelError for a weight that two stages of this rank hold: each would gather and reduce it."""
    if len(roots) > 1 and (shared := _parameters_of_several(roots)):
        names = [name for root in roots for name, p in root.named_parameters() if p in shared]
        raise ModelError(
            f"{' and '.join(names).replace('/', '.')} are one weight in two stages of one rank.",
            why="each stage gathers and reduces its own weights",
            fix="train.plan.zero = 0, or stages_per_rank = 1",
        )


def _refuse_fp32_in_the_root(
    module: nn.Module, fp32_modules: Sequence[nn.Module], root_owned: set[nn.Parameter]
) -> None:
    """Raises: ModelError for a weight that a module kept in fp32 shares: the root would compute with it in bf16."""
    for kept in fp32_modules:
        for parameter in kept.parameters():
            if parameter in root_owned:
                names = [name for name, p in module.named_parameters(remove_duplicate=False) if p is parameter]
                raise ModelError(
                    f"{' and '.join(names)} are one weight, and only a part of its uses is kept in fp32.",
                    why="sharding gathers a shared weight once, in one dtype",
                    fix="train.plan.zero = 0, or leave the module out of fp32_modules",
                )


def _parameters_of_several(units: Sequence[nn.Module]) -> set[nn.Parameter]:
    seen: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(units):
        for parameter in unit.parameters():
            seen.setdefault(parameter, index)
    return {
        p for i, unit in enumerate(units) for p in unit.parameters() if seen[p] != i and not _inside(units, seen[p], i)
    }


def _inside(units: Sequence[nn.Module], first: int, second: int) -> bool:
    """Whether one of two units lies in the other (an fp32 module in a block): its parameters are its own."""
    return units[first] in set(units[second].modules()) or units[second] in set(units[first].modules())


def _tied_to_root(module: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    in_blocks = {p for block in blocks for p in block.parameters()}
    block_modules = {inner for block in blocks for inner in block.modules()}
    outside = {p for inner in module.modules() if inner not in block_modules for p in inner.parameters(recurse=False)}
    return in_blocks & outside
