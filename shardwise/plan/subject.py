"""The Subject of a search: recipe, model and machines as the cost model and the space take them. No torch."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES
from shardwise.cost.workload import OURS, SHARDWISE_FP32, SHARDWISE_MIXED, Stack, Trainable, Workload
from shardwise.errors import RecipeError
from shardwise.inputs.arch import Arch
from shardwise.inputs.arch.names import trained_share
from shardwise.inputs.hardware import Cluster, NodeGroup
from shardwise.inputs.recipe import PlanRequest, Recipe
from shardwise.plan import machines, planned_only, rough_memory, rule_of_thumb, space
from shardwise.plan.space import Task
from shardwise.units import MIB

# What the cost model calls the projections of a block.
PROJECTIONS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
# One layer for queries, keys and values: counted as three.
TOGETHER = ("qkv_proj", "query_key_value", "c_attn")


class Subject(NamedTuple):
    """What is planned: the work, the machines, the space, bytes that a rank may use; and whether the engine runs it.

    planned_only: why not, of the model and its precision; each plan may have reasons of its own. groups: the machines
    as they are, where `cluster` counts groups that differ as equal ones.
    """

    workload: Workload
    cluster: Cluster
    task: Task
    limit: float
    runs: bool = True
    planned_only: tuple[str, ...] = ()
    groups: tuple[NodeGroup, ...] = ()

    @property
    def peak_flops_per_second(self) -> float | None:
        """Of a device in this precision; of groups that differ the mean, which utilisation is counted against."""
        groups = self.groups or self.cluster.groups
        peaks = [group.node.device.peak_flops_per_second(self.workload.precision) for group in groups]
        if None in peaks:
            return None
        total = sum(group.devices * peak for group, peak in zip(groups, peaks, strict=True) if peak is not None)
        return total / sum(group.devices for group in groups)


def of(
    recipe: Recipe, arch: Arch, cluster: Cluster, *, world: int | None = None, fixed: Mapping[str, int] | None = None
) -> Subject:
    """`world`: the ranks that came; absent, the recipe or the cluster decides. `fixed` beside what the recipe fixes.

    Groups of machines that differ get equal shares, and count as what the weakest can do. All GPUs are used where some
    degrees make them all; a batch too small for that has as many ranks as samples.
    Raises: RecipeError where the global batch is not a whole number of samples.
    """
    batch = rule_of_thumb.global_batch(recipe)
    precision, _ = rule_of_thumb.precision_of(recipe, cluster)
    each = rough_memory.bytes_per_parameter(precision, recipe.optimizer)
    ranks, _ = rule_of_thumb.world_of(recipe, cluster, world, batch, arch.parameters(), each)
    together = {**fixed_by(recipe, cluster), **(fixed or {})}
    task = _task(recipe, arch, cluster, cluster.devices if _all_gpus(recipe, cluster, world) else ranks, together)
    if task.world != ranks and next(space.meshes(task), None) is None:
        task = _task(recipe, arch, cluster, ranks, together)
    stack, trainable = stack_of(precision, each.states), trainable_of(recipe, arch, precision)
    workload = Workload(arch, recipe.data.sequence_length, batch, precision, stack, trainable)
    why_not = _planned_only(recipe, arch, precision)
    limit = limit_of(cluster, task.world)
    return Subject(workload, machines.alike(cluster), task, limit, not why_not, why_not, cluster.groups)


def trainable_of(recipe: Recipe, arch: Arch, precision: str) -> Trainable:
    """What gets gradients, as the cost model counts it. Raises: RecipeError where a pattern names nothing.

    A frozen weight lies in the dtype that it computes in.
    """
    asked = recipe.model.trainable
    if asked == "full":
        return Trainable()
    held = {"fp64": 8.0, "fp32": 4.0}.get(precision, 2.0)
    if asked.lora is None and recipe.model.hf is not None:
        return Trainable()  # Patterns are of its own names, which a shape has not: counted as if all were trained.
    if asked.lora is None:
        return Trainable("frozen", share=trained_share(arch, asked.frozen), base_bytes=held)
    names = ("q_proj", "v_proj") if asked.lora.targets == "auto" else asked.lora.targets
    names = tuple(one for name in names for one in (("q_proj", "k_proj", "v_proj") if name in TOGETHER else (name,)))
    if unknown := [name for name in names if name not in PROJECTIONS]:
        raise RecipeError(
            f"model.trainable.lora.targets: {unknown[0]!r} is no layer that a plan can count.",
            why=f"of a block it knows {', '.join(PROJECTIONS)}",
            fix='targets = "auto", or some of these',
        )
    targets = tuple(PROJECTIONS[name] for name in names)
    base_bytes = asked.lora.base_bits / 8 if asked.lora.base_bits < 16 else held
    return Trainable("lora", rank=asked.lora.rank, targets=targets, base_bytes=base_bytes)


def _planned_only(recipe: Recipe, arch: Arch, precision: str) -> tuple[str, ...]:
    found = (
        planned_only.engine_problem(arch, recipe.model.hf),
        planned_only.trainable_problem(recipe.model),
        "fp8 is planned only" if precision == "fp8" else "",
    )
    return tuple(reason for reason in found if reason)


def _all_gpus(recipe: Recipe, cluster: Cluster, world: int | None) -> bool:
    asked = recipe.train.devices != "auto" or rule_of_thumb.fixed_world(recipe) is not None
    return cluster.kind == "gpu" and world is None and not asked


def _task(recipe: Recipe, arch: Arch, cluster: Cluster, ranks: int, fixed: Mapping[str, int]) -> Task:
    micro = recipe.batch.micro_batch
    return Task(
        arch=arch,
        sequence_length=recipe.data.sequence_length,
        global_batch=rule_of_thumb.global_batch(recipe),
        world=ranks,
        devices_per_node=ranks if cluster.kind == "cpu" and cluster.nodes == 1 else machines.reach(cluster),
        most_micro_batch=None if micro == "auto" else micro,
        fixed_length=recipe.data.length_is_known,
        fixed=fixed,
    )


def stack_of(precision: str, states: int) -> Stack:
    """How this engine holds parameters. `states`: bytes of the optimizer's, a parameter."""
    stack = SHARDWISE_FP32 if precision == "fp32" else SHARDWISE_MIXED
    if precision == "fp64":
        stack = Stack(OURS, weights=0, masters=8, gathered=8, gradients=8, reduced=8, states=states)
    return msgspec.structs.replace(stack, states=states)


def limit_of(cluster: Cluster, ranks: int) -> float:
    """Bytes that a rank may use: all of a GPU's, as the model counts context and allocator too; a share of a host's."""
    return cluster.smallest_device.hbm_bytes if cluster.kind == "gpu" else rough_memory.usable_bytes(cluster, ranks)


def fixed_by(recipe: Recipe, cluster: Cluster) -> dict[str, int]:
    """The columns that a recipe fixes.

    On CPU cores blocks are not compiled unasked, which costs more than it gives, and there is no other memory to go to.
    """
    fixed: dict[str, int] = {"compiled": 0, "offload": 0} if cluster.kind == "cpu" else {}
    model, request = recipe.model, recipe.train.plan
    if model.hf is not None and model.trainable != "full" and model.trainable.lora is not None:
        fixed["tp"] = 1  # as planned_only.adapters_stay_whole says
    if model.sequence_parallel != "auto" or model.roles or model.hf is not None:
        # "auto" splits our own decoder alone; of others it is not known what looks at several positions.
        fixed["sequence_parallel"] = int(model.sequence_parallel is True)
    if not isinstance(request, PlanRequest):
        # Which layers of a family can be split shows when it is built: nothing is planned on it unasked.
        return fixed if model.hf is None else {**fixed, "tp": 1}
    fixed |= {name: getattr(request, name) for name in ("pp", "cp", "tp", "ep")}
    fixed |= {"recompute": RECOMPUTE.index(request.recompute), "offload": OFFLOAD.index(request.offload)}
    wished = {name: getattr(request, name) for name in ("dp_replicate", "dp_shard", "zero", "stages_per_rank")}
    fixed |= {name: value for name, value in wished.items() if value != "auto"}
    if request.schedule != "auto":
        fixed["schedule"] = SCHEDULES.index(request.schedule)
    if request.compile != "auto":
        fixed["compiled"] = int(request.compile == "blocks")
    if request.bucket_cap_mb != "auto":
        fixed["bucket_bytes"] = request.bucket_cap_mb * MIB
    return fixed
