"""parallelize: the passes that make a module obey its Plan, in their order, on one screen."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ranks, recompute
from shardwise.errors import BadInput, ModelError
from shardwise.inputs.recipe import ModelSpec
from shardwise.models import inspect
from shardwise.names import canonical, keep_aliases, keep_holders
from shardwise.parallel import data_parallel, device_mesh, precision, roles, tensor_parallel
from shardwise.parallel.device_mesh import Mesh
from shardwise.parallel.outline import ties_across
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.rehearsal import require_parts
from shardwise.parallel.staging import Stage, split
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.parallel.ties import Ties
from shardwise.plan import check, schedules
from shardwise.plan.plan import Decision, Plan
from shardwise.resilience.guards import Guards, ties_of
from shardwise.torch_private import buffer_slots, parameter_slots


class Parallel:
    """What the step needs to know of a parallelized module.

    speaks: whether this rank's sums of losses count; of ranks that see the same samples one does.
    owned: the parameters whose squares this rank adds to the gradient norm; every number has one owner.
    """

    def __init__(
        self,
        plan: Plan,
        module: nn.Module,
        mesh: Mesh,
        gradients: data_parallel.GradientSum,
        pipe: "Pipe",
        tensor: TensorParallel | None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.gradients = gradients
        self.pipeline, self.ties = pipe.pipeline, pipe.ties
        self.tensor = tensor
        self.draws_apart = tensor is not None and tensor.sequence
        self.device = ranks.device()
        self.data_coord = plan.decision.mesh.data_coord(ranks.rank())
        self.speaks = mesh.index("tp") == 0 and mesh.index("cp") == 0 and (pipe.pipeline is None or pipe.pipeline.last)
        self.aliases: dict[str, str] = pipe.ties.alias if pipe.ties is not None else {}
        self.named_parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.owned = [p for name, p in self.named_parameters if name not in self.aliases and owns(mesh, p)]
        self.checked_gradients = False
        self.tied_names = ties_of(module)
        self.guards: Guards | None = None  # of an own loop, made by its first check_ranks
        self.last_step: LastStep | None = None
        self.layouts: dict[str, Any] = {}
        self.calls = 0

    def finish_gradients(self) -> None:
        """After the last backward of a step: every gradient is the sum over all ranks. Collective."""
        self.gradients.finish()
        if self.tensor is not None:
            self.tensor.finish()
        if self.ties is not None:
            self.ties.finish()


class LastStep(NamedTuple):
    """What guards compare of an own loop's last step: what this rank counted and what was divided by, by loss, and
    numbers that must be the same on every rank. `counted` is asked for later: it waits for the device."""

    counted: Callable[[], dict[str, float]]
    divided: dict[str, float]
    alike: dict[str, float]


class Pipe(NamedTuple):
    """This rank's part of a pipeline: its stages, their runtime, and the weights that are tied across stages."""

    stages: tuple[Stage, ...] = ()
    pipeline: Pipeline | None = None
    ties: Ties | None = None


def cut(module: nn.Module, units: list[nn.Module], decision: Decision, mesh: Mesh) -> Pipe:
    """Give this rank its stages of the module; nothing where there is no pipeline. Collective over the pipeline."""
    pp = mesh.degree("pp")
    if pp == 1:
        return Pipe()
    count = pp * decision.stages_per_rank
    mine = schedules.stages_of_rank(decision.schedule, mesh.index("pp"), pp, decision.stages_per_rank)
    tied = ties_across(module, units, count, decision.stage_blocks)
    stages = split(module, units, count, mine, decision.stage_blocks)
    pipeline = Pipeline(stages, mesh, decision.schedule, decision.stages_per_rank)
    return Pipe(stages, pipeline, Ties(tied, module, mesh, decision.schedule) if tied else None)


def owns(mesh: Mesh, parameter: torch.Tensor) -> bool:
    """Whether this rank counts for what it holds of a parameter: a shard, or the first of several equal copies."""
    split: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split = {name for name, placed in zip(names, parameter.placements, strict=True) if not placed.is_replicate()}
    return all(axis in split or mesh.index(axis) == 0 for axis in ("dp_replicate", "dp_shard", "cp", "tp"))


class Record:
    """Lies on a parallelized module, so that it goes when the module goes: a table of modules would hold what it holds
    of them. A copy of the module (an average of weights) has none.
    """

    def __init__(self, parallel: Parallel | None = None) -> None:
        self.parallel = parallel

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Record":
        return Record()

    def __reduce__(self) -> tuple[type["Record"], tuple[()]]:
        return Record, ()


_RECORD = "_shardwise"
_living: weakref.WeakSet[Parallel] = weakref.WeakSet()


def _recorded(module: nn.Module) -> Parallel | None:
    record = module.__dict__.get(_RECORD)
    return record.parallel if isinstance(record, Record) else None


def parallelize(
    module: nn.Module,
    plan: Plan,
    *,
    blocks: str = "auto",
    initialize: Callable[[nn.Module], None] | None = None,
    vocabulary_loss: bool = False,
) -> nn.Module:
    """Make `module` obey `plan`, in place, and return it.

    Once a module, and several modules may share a plan (a GAN's two). Build the optimizer afterwards. `initialize`, for
    a module built on the meta device, fills each rank's own shards. `vocabulary_loss`: under tensor parallel the loss
    takes logits as a DTensor over the vocabulary, as sw.next_token_loss does; else it gets them whole.

    Collective. Raises: PlanInfeasible, ModelError.
    """
    if _recorded(module) is not None:
        raise ModelError("This module is parallelized already.", fix="call parallelize once a module")
    check.require(plan, ranks.world())
    refuse_second_pipeline(plan)
    decision, recipe = plan.decision, plan.recipe
    ties = inspect.ties(module)

    # 1. What mixes samples is refused, or made one with the global batch.
    refuse_mixing(module, recipe.model)
    if recipe.model.sync_batchnorm:
        module = inspect.sync_batchnorm(module)
    # 2. Master precision; the compute copies come with the data-parallel pass or right before it.
    fp32_modules = precision.select_fp32_modules(module, recipe.model.fp32_modules)
    precision.to_master(module, decision.precision, fp32_modules)
    found = inspect.find_blocks(module, blocks)
    units = found.blocks
    split_roles = roles.of(module, units, recipe.model.roles) if decision.mesh.tp > 1 else None
    # What cannot be cut is refused before this rank waits for others.
    require_parts(module, found, decision, split_roles)
    mesh = device_mesh.build(decision.mesh)
    # 3. A pipeline's stages: what other ranks hold is dropped here, and every name stays.
    pipe = cut(module, units, decision, mesh)
    held = set(module.modules())
    units, fp32_modules = [u for u in units if u in held], [m for m in fp32_modules if m in held]
    ties = kept_ties(ties, module)
    # 4. Tensor parallel: each rank computes with its part of the weights.
    tensor: TensorParallel | None = None
    if split_roles is not None:
        tensor = tensor_parallel.apply(
            module, split_roles, mesh, sequence=plan.sequence_parallel, vocabulary_loss=vocabulary_loss
        )
    # 5. Recompute and compile each block before anything wraps it.
    change_blocks(units, decision)
    # What lies in a module kept in fp32 is fp32 with it, blocks too.
    units = [unit for unit in precision.outside(units, fp32_modules) if unit not in fp32_modules]
    # 6. Data parallel, with storage on the device: shards where it is sharded, whole copies elsewhere.
    gradients = spread(module, pipe, units, fp32_modules, mesh, decision, initialize)
    if pipe.ties is not None:
        pipe.ties.start()
    if precision.is_mixed(decision.precision):
        precision.cast_outputs(module)
    # 7. What was tied is still tied.
    if inspect.ties(module) != ties:
        raise ModelError("Tied weights came untied.", why=f"before: {ties}; after: {inspect.ties(module)}")

    made = Parallel(plan, module, mesh, gradients, pipe, tensor)
    module.__dict__[_RECORD] = Record(made)
    _living.add(made)
    keep_aliases(module, made.aliases)
    keep_holders(module, decision.mesh.stage_ranks(ranks.rank()))
    return module


def change_blocks(units: list[nn.Module], decision: Decision) -> None:
    """Recompute first, so that it is compiled with its block; blocks of one shape share one compilation."""
    if decision.recompute != "none":
        for block in units:
            recompute.wrap(block, decision.recompute)
    if decision.compile == "blocks":
        for block in units:
            recompute.compile_block(block)


def spread(
    module: nn.Module,
    pipe: Pipe,
    units: list[nn.Module],
    fp32_modules: list[nn.Module],
    mesh: Mesh,
    decision: Decision,
    initialize: Callable[[nn.Module], None] | None,
) -> data_parallel.GradientSum:
    """Over the data-parallel ranks, with storage: shards are cut before they get it, so that no rank holds the whole;
    buckets and compute copies are made of tensors that have it. Collective.
    """
    device = ranks.device()
    if decision.zero and mesh.device_mesh is not None:
        gradients = data_parallel.apply(module, pipe.stages, units, fp32_modules, mesh, decision)
        place(module, device, module.to_empty, initialize)
        return gradients
    place(module, device, partial(empty_on, module), initialize)
    if precision.is_mixed(decision.precision):
        precision.apply_compute_copies(module, units, fp32_modules, decision.precision)
    return data_parallel.apply(module, pipe.stages, units, fp32_modules, mesh, decision)


def refuse_second_pipeline(plan: Plan) -> None:
    """Raises: ModelError where another module is cut into stages by this very plan."""
    if plan.decision.mesh.pp > 1 and any(other.plan is plan for other in _living):
        raise ModelError(
            "A second module under one plan with a pipeline.",
            why="a step runs one module through its stages; two would wait for each other",
            fix="train.plan.pp = 1 for training that needs several modules (a GAN)",
        )


def kept_ties(ties: list[tuple[str, ...]], module: nn.Module) -> list[tuple[str, ...]]:
    """The ties between names that this rank still holds."""
    here = {canonical(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    kept = [tuple(name for name in group if name in here) for group in ties]
    return [group for group in kept if len(group) > 1]


def place(
    module: nn.Module,
    device: torch.device,
    give_storage: Callable[..., object],
    initialize: Callable[[nn.Module], None] | None,
) -> None:
    """Onto the device: moved where it was built, given storage and initialised where it is on meta."""
    if initialize is not None:
        give_storage(device=device)
        initialize(module)
    if any(tensor.device != device for tensor in [*module.parameters(), *module.buffers()]):
        module.to(device)


def empty_on(module: nn.Module, device: torch.device) -> None:
    """Give a module on meta uninitialised storage; Module.to_empty would make one tensor a name and untie weights."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for owner in module.modules():
        for slots in (parameter_slots(owner), buffer_slots(owner)):
            for name, tensor in slots.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                slots[name] = made[tensor]


def refuse_mixing(module: nn.Module, spec: ModelSpec) -> None:
    """Raises: ModelError for a module that mixes the samples of a micro-batch, unless the user accepts that."""
    found = inspect.mixes_samples(module)
    if spec.sync_batchnorm:
        found = [one for one in found if "BatchNorm" not in one.kind]
    if found and spec.mixes_samples == "refuse":
        first = found[0]
        raise ModelError(
            f"{first.name} ({first.kind}) mixes the samples of a micro-batch"
            + (f", and {len(found) - 1} more do." if len(found) > 1 else "."),
            why=first.why,
            fix=first.fix,
        )


def parallel_of(module: nn.Module) -> Parallel:
    """Raises: BadInput for a module that `parallelize` never saw."""
    found = _recorded(module)
    if found is None:
        raise BadInput(
            f"{type(module).__name__} is not parallelized.",
            fix="call model = sw.parallelize(model, plan) first",
        )
    return found
