"""The first planner: Recipe + Arch + Cluster -> Plan, by the rule of thumb that a practitioner would use.

Fits with its states on one device: data parallel, whole copies. To about 70B parameters: full sharding.
Above: tensor parallel in the node, pipeline across nodes, data parallel over the rest. Degrees that the user
fixes are obeyed. What a rank then holds: rough_memory.py. The plan may be infeasible: check.py says so, with fixes.
"""

import importlib.metadata
import math
from typing import Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Cluster, Precision
from shardwise.inputs.recipe import PipelineSchedule, PlanRequest, Recipe, device_span
from shardwise.plan import combinations
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Decision, Plan
from shardwise.plan.rough_memory import (
    PROCESS_BYTES,
    USABLE_SHARE,
    Bytes,
    Zero,
    activations_of_one,
    bytes_per_parameter,
    parameters_of_a_rank,
    states_of,
    states_of_a_rank,
    usable_bytes,
)
from shardwise.units import format_bytes, format_count

Recompute = Literal["none", "selective", "full"]

# States may take this much of what is usable; activations, gathered blocks and workspaces need the rest.
STATES_SHARE = 0.70
# Of what the states leave; gathered blocks, gradients in flight and workspaces take the rest.
ACTIVATIONS_SHARE = 0.7
# "About 70B": above, gathering every block over the network each step costs more than splitting inside it.
FULL_SHARD_LIMIT = 80e9
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
# Micro-batches for each stage of a pipeline that leave about a fifth of its time idle (p - 1 of m + p - 1).
MICRO_BATCHES_PER_STAGE = 4
# Larger forwards gain nothing on a core: the activations left its caches long before.
CPU_TOKENS_PER_MICRO_BATCH = 8192


def plan(recipe: Recipe, shape: Arch | int | None, cluster: Cluster, *, world: int | None = None) -> Plan:
    """The Plan for this recipe, model (its Arch, its parameter count, or not known yet) and cluster.

    `world` is the number of ranks that came; absent, the recipe or the cluster decides.

    Raises: RecipeError where the global batch is not a whole number of samples.
    """
    arch = shape if isinstance(shape, Arch) else None
    parameters = shape.parameters() if isinstance(shape, Arch) else shape
    batch = global_batch(recipe)
    precision, why_precision = precision_of(recipe, cluster)
    per_parameter = bytes_per_parameter(precision, recipe.optimizer)
    ranks, why_world = world_of(recipe, cluster, world, batch, parameters, per_parameter)
    request = recipe.train.plan if isinstance(recipe.train.plan, PlanRequest) else None
    if request is None:
        mesh, zero, why_mesh = _auto_mesh(ranks, shape, cluster, per_parameter)
    else:
        mesh, zero, why_mesh = _requested_mesh(request, ranks, shape, cluster, per_parameter)
    wanted = request or PlanRequest()
    schedule, stages_per_rank = _schedule(wanted, mesh.pp)
    decision = Decision(
        mesh=mesh,
        zero=zero,
        global_batch=batch,
        micro_batch=1,
        accumulation=math.ceil(batch / mesh.data_parallel),
        precision=precision,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        stage_blocks=wanted.stage_blocks,
        recompute=wanted.recompute,
        offload=wanted.offload,
        compile="off" if wanted.compile == "auto" else wanted.compile,
        compression=wanted.compression,
        bucket_cap_mb="default" if wanted.bucket_cap_mb == "auto" else wanted.bucket_cap_mb,
    )
    at_rest = states_of_a_rank(shape, per_parameter, decision)
    decision, why_recompute = _with_recompute(decision, request, recipe, cluster, arch, at_rest)
    decision, why_micro = _with_micro_batch(decision, recipe, cluster, arch, at_rest)
    decision, why_compile = _with_compile(decision, wanted, cluster)
    told = arch.left_out() if arch is not None else ()
    why = (*why_world, *why_mesh, why_precision, *why_recompute, why_micro, why_compile, *told)
    return Plan(recipe, cluster, decision, why, arch=arch, shardwise_version=importlib.metadata.version("shardwise"))


def global_batch(recipe: Recipe) -> int:
    """Samples of one step.

    Raises: RecipeError where tokens_per_step is not a multiple of sequence_length.
    """
    batch, length = recipe.batch, recipe.data.sequence_length
    if batch.global_batch is not None:
        return batch.global_batch
    if batch.tokens_per_step is None:
        raise RecipeError("[batch] has no size.", fix="write global_batch = 64 under [batch]")
    samples, rest = divmod(batch.tokens_per_step, length)
    if rest == 0:
        return samples
    near = [count * length for count in (samples, samples + 1) if count]
    raise RecipeError(
        f"batch.tokens_per_step = {batch.tokens_per_step} is not a multiple of data.sequence_length = {length}.",
        why="a step takes whole samples",
        fix=f"batch.tokens_per_step = {' or '.join(map(str, near))}",
    )


def precision_of(recipe: Recipe, cluster: Cluster) -> tuple[Precision, str]:
    """The precision that trains, and why."""
    asked = recipe.train.precision
    if asked != "auto":
        return asked, f"{asked}: asked for"
    if cluster.kind == "cpu":
        return "fp32", "fp32: CPU cores compute bf16 no faster"
    if has_no_bf16(cluster):
        return "fp16", f"fp16 with a loss scaler: {cluster.device.name} has no bf16 units"
    return "bf16", "bf16 compute with fp32 masters, reductions and norms: the default on GPUs"


def has_no_bf16(cluster: Cluster) -> bool:
    """True for a catalogued GPU without bf16 units; a GPU that is not in it gets the benefit of the doubt."""
    device = cluster.device
    known = device.dense_fp16_flops_per_second is not None
    return device.kind == "gpu" and known and device.dense_bf16_flops_per_second is None


def world_of(
    recipe: Recipe,
    cluster: Cluster,
    world: int | None,
    batch: int,
    parameters: int | None,
    per_parameter: Bytes,
) -> tuple[int, tuple[str, ...]]:
    """How many ranks, and why."""
    if world is not None:
        return world, (f"{world} {_plural(world, 'rank')}: as started",)
    span = device_span(recipe.train.devices)
    if span is not None:
        least, most = span
        ranks = most if cluster.kind == "cpu" else min(most, max(least, cluster.devices))
        return ranks, (f"{ranks} {_plural(ranks, 'device')}: asked for by train.devices",)
    fixed = fixed_world(recipe)
    if fixed is not None:
        return fixed, (f"{fixed} {_plural(fixed, 'rank')}: the product of the degrees in train.plan",)
    ranks, reason = cluster.devices, f"all of {cluster.name}"
    if cluster.kind == "cpu":
        # Each core's rank holds a whole copy here; sharding over one host's memory saves nothing.
        host = cluster.node.host_memory_bytes or cluster.device.hbm_bytes * cluster.node.devices
        each = PROCESS_BYTES + (parameters or 0) * per_parameter.total
        fitting = max(1, int(host * USABLE_SHARE) // each)
        if fitting < ranks:
            ranks, reason = fitting, f"{format_bytes(each)} a rank of {format_bytes(host)} host memory"
    if batch < ranks:
        ranks, reason = batch, f"not more than global_batch = {batch}"
    kind = "CPU core" if cluster.kind == "cpu" else "GPU"
    return ranks, (f"{ranks} {_plural(ranks, 'rank')}, one a {kind}: {reason}",)


def fixed_world(recipe: Recipe) -> int | None:
    """The ranks that the degrees in train.plan make; None where some are left open."""
    request = recipe.train.plan
    if request == "auto" or request.dp_replicate == "auto" or request.dp_shard == "auto":
        return None
    return request.pp * request.cp * request.tp * request.dp_replicate * request.dp_shard


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _fits(parameters: int | None, per_parameter: Bytes, cluster: Cluster, ranks: int) -> tuple[bool, str]:
    """Whether one device holds the model with its states, and the sentence with the numbers."""
    if parameters is None:
        return True, "the model's size is not known before it is built: taken to fit on one device"
    need, have = parameters * per_parameter.total, int(usable_bytes(cluster, ranks) * STATES_SHARE)
    fits = need <= have
    where = "device" if cluster.kind == "gpu" else "rank"
    return fits, (
        f"{format_count(parameters)} parameters x {per_parameter.total} bytes = {format_bytes(need)}, which "
        f"{'fits' if fits else 'does not fit'} in {format_bytes(have)} a {where} "
        f"({STATES_SHARE:.0%} of what is usable; the rest is for activations)"
    )


def _auto_mesh(
    ranks: int, shape: Arch | int | None, cluster: Cluster, per_parameter: Bytes
) -> tuple[MeshShape, Zero, tuple[str, ...]]:
    parameters = shape.parameters() if isinstance(shape, Arch) else shape
    fits, reason = _fits(parameters, per_parameter, cluster, ranks)
    if ranks == 1:
        return MeshShape(), 0, (reason, "one rank: nothing to split")
    if fits:
        return (
            MeshShape(dp_replicate=ranks),
            0,
            (reason, "zero 0: each rank keeps a whole copy, gradients are summed"),
        )
    if parameters is None or parameters <= FULL_SHARD_LIMIT:
        chosen = f"zero 3: weights, gradients and states are sharded over {ranks} ranks (full shard to about 70B)"
        return MeshShape(dp_shard=ranks), 3, (reason, chosen)
    return _three_axes(ranks, shape if isinstance(shape, Arch) else parameters, cluster, per_parameter, reason)


def _three_axes(
    ranks: int, shape: Arch | int, cluster: Cluster, per_parameter: Bytes, reason: str
) -> tuple[MeshShape, Zero, tuple[str, ...]]:
    """Tensor parallel in the node, the shortest pipeline that fits, data parallel (ZeRO 1) over the rest.

    A pipeline's degree need not divide the layers: its stages may be uneven by one block.
    """
    arch = shape if isinstance(shape, Arch) else None
    heads = math.gcd(arch.num_heads, arch.num_kv_heads) if arch else 8
    in_node = math.gcd(cluster.node.devices, ranks)
    tp = max(degree for degree in range(1, min(in_node, 8) + 1) if in_node % degree == 0 and heads % degree == 0)
    layers = arch.num_layers if arch else ranks
    degrees = [pp for pp in range(1, min(layers, ranks // tp) + 1) if ranks % (tp * pp) == 0]
    have = usable_bytes(cluster, ranks) * STATES_SHARE

    def at_rest(pp: int) -> int:
        mesh = MeshShape(pp=pp, tp=tp, dp_shard=ranks // (tp * pp))
        return states_of(parameters_of_a_rank(shape, mesh, "1f1b"), per_parameter, mesh, 1)

    pp = next((pp for pp in degrees if at_rest(pp) <= have), degrees[-1])
    shard = ranks // (tp * pp)
    mesh = MeshShape(pp=pp, tp=tp, dp_shard=shard)
    uneven = arch is not None and layers % pp != 0
    why = (
        reason,
        f"tp = {tp}: inside the node, where the links are fast ({cluster.node.link.kind})",
        f"pp = {pp}: the shortest pipeline whose share, {format_bytes(at_rest(pp))}, "
        f"{'fits' if at_rest(pp) <= have else 'comes nearest to'} {format_bytes(have)}"
        + (f"; stages of {math.ceil(layers / pp)} and {layers // pp} blocks" if uneven else ""),
        f"dp = {shard}: the rest, with states sharded (zero 1)" if shard > 1 else "dp = 1: nothing is left",
    )
    return mesh, 1 if shard > 1 else 0, why


def _requested_mesh(
    request: PlanRequest, ranks: int, shape: Arch | int | None, cluster: Cluster, per_parameter: Bytes
) -> tuple[MeshShape, Zero, tuple[str, ...]]:
    """The degrees that train.plan fixes; the data-parallel ones that it leaves are filled.

    Under a pipeline sharding is zero 1: stages keep weights and gradients whole until their last micro-batch.
    """
    data = max(1, ranks // (request.pp * request.cp * request.tp))
    parts = MeshShape(pp=request.pp, tp=request.tp)
    part = None if shape is None else parameters_of_a_rank(shape, parts, *_schedule(request, request.pp))
    fits, reason = _fits(part, per_parameter, cluster, ranks)
    if request.pp * request.tp > 1:
        reason = f"the fullest of {request.pp * request.tp} ranks that hold the model together: {reason}"
    whole = request.zero == 0 or (request.zero == "auto" and fits)
    replicate, shard = _data_degrees(request, data, whole)
    mesh = MeshShape(pp=request.pp, dp_replicate=replicate, dp_shard=shard, cp=request.cp, tp=request.tp, ep=request.ep)
    if request.zero == "auto":
        sharded: Zero = 1 if request.pp > 1 else 3
        return mesh, 0 if shard == 1 else sharded, (reason, "degrees: as train.plan says")
    if mesh.world == 1 and ranks == 1:
        return mesh, 0, (reason, f"one rank: nothing to shard, zero {request.zero} is the same as zero 0")
    return mesh, request.zero, (reason, f"degrees and zero = {request.zero}: as train.plan says")


def _data_degrees(request: PlanRequest, data: int, whole: bool) -> tuple[int, int]:
    """dp_replicate and dp_shard: as asked for, else what is left of the data-parallel ranks."""
    replicate, shard = request.dp_replicate, request.dp_shard
    if replicate == "auto" and shard == "auto":
        return (data, 1) if whole else (1, data)
    if replicate == "auto":
        return max(1, data // shard) if shard != "auto" else 1, shard if shard != "auto" else 1
    return replicate, max(1, data // replicate) if shard == "auto" else shard


def _with_recompute(
    decision: Decision, request: PlanRequest | None, recipe: Recipe, cluster: Cluster, arch: Arch | None, at_rest: int
) -> tuple[Decision, tuple[str, ...]]:
    """The least recompute with which micro-batches of one sample fit; what train.plan says is obeyed."""
    if request is not None:
        return decision, (f"recompute {request.recompute}: asked for",) if request.recompute != "none" else ()
    if arch is None or not recipe.data.length_is_known or cluster.kind == "cpu":
        return decision, ()
    length, room = recipe.data.sequence_length, _room(cluster, decision, at_rest)
    needs = {option: activations_of_one(arch, length, decision, option) for option in RECOMPUTE}
    least: Recompute = next((option for option in RECOMPUTE if needs[option] <= room), "none")
    if least == "none":
        return decision, ()
    why = (
        f"recompute {least}: a sample's activations, {format_bytes(needs['none'])}, become {format_bytes(needs[least])}"
    )
    return msgspec.structs.replace(decision, recompute=least), (why,)


def _with_micro_batch(
    decision: Decision, recipe: Recipe, cluster: Cluster, arch: Arch | None, at_rest: int
) -> tuple[Decision, str]:
    """The decision with even micro-batches and their number, and why."""
    each = math.ceil(decision.global_batch / decision.mesh.data_parallel)
    most, why = _micro_batch(decision, recipe, cluster, arch, at_rest, each)
    count = math.ceil(each / most)
    if recipe.batch.micro_batch == "auto" and decision.schedule.startswith("interleaved"):
        count = _whole_rounds(count, decision.mesh.pp, each)
    even = math.ceil(decision.global_batch / (decision.mesh.data_parallel * count))
    return msgspec.structs.replace(decision, micro_batch=even, accumulation=count), why


def _whole_rounds(count: int, pp: int, each: int) -> int:
    """A multiple of pp near `count`, which interleaved schedules take; `count` where samples are fewer than pp."""
    more = math.ceil(count / pp) * pp
    if more <= each:
        return more
    return more - pp if more > pp else count


def _micro_batch(
    decision: Decision, recipe: Recipe, cluster: Cluster, arch: Arch | None, at_rest: int, each: int
) -> tuple[int, str]:
    """Samples of one forward on one rank, at most, of the `each` that it takes a step, and why."""
    asked, mesh = recipe.batch.micro_batch, decision.mesh
    if asked != "auto":
        return min(asked, each), f"micro-batch of at most {asked}: asked for"
    wanted, bubble = each, "a rank's whole share"
    if mesh.pp > 1:
        wanted = max(1, each // (MICRO_BATCHES_PER_STAGE * mesh.pp))
        count = math.ceil(each / wanted)
        bubble = f"{count} of them for {mesh.pp} stages: the more, the smaller the pipeline's bubble"
    if arch is None:
        return wanted, f"micro-batch {wanted}: {bubble}, as activations are not known before the model is"
    length = recipe.data.sequence_length
    if cluster.kind == "cpu":
        micro = max(1, min(wanted, CPU_TOKENS_PER_MICRO_BATCH // length))
        if micro == wanted:
            return micro, f"micro-batch {micro}: {bubble}, {micro * length} tokens"
        return micro, f"micro-batch of at most {micro}: about {CPU_TOKENS_PER_MICRO_BATCH} tokens a forward on a core"
    one = activations_of_one(arch, length, decision, decision.recompute)
    room = _room(cluster, decision, at_rest)
    micro = max(1, min(wanted, room // max(1, one)))
    return micro, (
        f"micro-batch of at most {micro}: about {format_bytes(one)} of activations a sample"
        f"{' in all that are in flight' if mesh.pp > 1 else ''}, {format_bytes(room)} for them"
        + (f"; {bubble}" if mesh.pp > 1 and micro == wanted else "")
    )


def _schedule(wanted: PlanRequest, pp: int) -> tuple[Literal["none"] | PipelineSchedule, int]:
    """The pipeline's schedule and its stages a rank: 1F1B with one, unless asked otherwise."""
    schedule = wanted.schedule
    if schedule == "auto":
        schedule = "1f1b" if wanted.stages_per_rank in ("auto", 1) else "interleaved-1f1b"
        if pp == 1:
            return "none", 1 if wanted.stages_per_rank == "auto" else wanted.stages_per_rank
    if wanted.stages_per_rank != "auto":
        return schedule, wanted.stages_per_rank
    return schedule, 1 if schedule in ("gpipe", "1f1b") else 2


def _room(cluster: Cluster, decision: Decision, at_rest: int) -> int:
    """Bytes that activations may take beside the states."""
    return int(max(0, usable_bytes(cluster, decision.mesh.world) - at_rest) * ACTIVATIONS_SHARE)


def _with_compile(decision: Decision, wanted: PlanRequest, cluster: Cluster) -> tuple[Decision, str]:
    """Each block compiled on GPUs where the table of combinations has it run, unless asked otherwise."""
    if wanted.compile != "auto":
        return decision, f"compile {wanted.compile}: asked for"
    if cluster.kind == "cpu":
        return decision, "compile off: on CPU it costs seconds before the first step"
    compiled = msgspec.structs.replace(decision, compile="blocks")
    against = [reason for reason in combinations.refusals(combinations.cell_of(compiled)) if reason.part == "compile"]
    if against:
        return decision, f"compile off: {against[0].why}"
    return compiled, "each block compiled: the default on GPUs"
