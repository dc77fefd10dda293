"""What makes a Plan infeasible: one small function a rule, each with a fix that a test applies.

A rule returns None where it holds. `apply` holds overrides of the recipe's own keys that make the violation
go away; None where only the user can choose.
"""

import math

from shardwise.errors import PlanInfeasible
from shardwise.plan import combinations, machines, planned_only, schedules, validity
from shardwise.plan.plan import Plan
from shardwise.plan.rough_memory import activation_bytes, bytes_at_rest, usable_bytes
from shardwise.plan.rule_of_thumb import has_no_bf16
from shardwise.plan.violation import REPLAN, Rule, Violation
from shardwise.units import format_bytes

_PLAIN_PIPELINE: dict[str, str | int] = {
    "train.plan.schedule": "auto",
    "train.plan.stages_per_rank": "auto",
    "train.plan.stage_blocks": "even",
}


def check(plan: Plan, world: int) -> tuple[Violation, ...]:
    """Every rule that this plan breaks on a world of this many ranks; empty where it can run."""
    return tuple(found for rule in RULES if (found := rule(plan, world)) is not None)


def require(plan: Plan, world: int) -> None:
    """Raises: PlanInfeasible that lists every violation."""
    found = check(plan, world)
    if not found:
        return
    first, *more = found
    rest = "".join(f"\n{one.what}\n  why: {one.why}\n  fix: {one.fix}" for one in more)
    raise PlanInfeasible(first.what, why=first.why, fix=first.fix + rest)


def degrees_make_the_world(plan: Plan, world: int) -> Violation | None:
    mesh = plan.decision.mesh
    if mesh.world == world:
        return None
    return Violation(
        rule="degrees_make_the_world",
        what=f"The degrees make {mesh.world} ranks, and there are {world}.",
        why=f"pp {mesh.pp} x dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp} "
        f"x tp {mesh.tp} = {mesh.world}",
        fix=f'train.plan = "auto", or start {mesh.world} ranks (train.devices = {mesh.world})',
        apply={"train.plan": "auto"},
    )


def zero_matches_sharding(plan: Plan, world: int) -> Violation | None:
    zero, shard = plan.decision.zero, plan.decision.mesh.dp_shard
    if validity.shards_match_zero(zero, shard):
        return None
    sharded = 1 if plan.decision.mesh.pp > 1 else 3
    if zero == 0:
        return Violation(
            rule="zero_matches_sharding",
            what=f"zero = 0 with dp_shard = {shard}.",
            why="zero 0 keeps whole copies: nothing is sharded",
            fix=f"train.plan.zero = {sharded}, or dp_shard = 1",
            apply={"train.plan.zero": sharded},
        )
    return Violation(
        rule="zero_matches_sharding",
        what=f"zero = {zero} with dp_shard = 1.",
        why=f"zero {zero} shards over dp_shard ranks, and one rank shards nothing",
        fix="train.plan.zero = 0, or a dp_shard above 1",
        apply={"train.plan.zero": 0},
    )


def buckets_need_whole_copies(plan: Plan, world: int) -> Violation | None:
    decision = plan.decision
    if decision.bucket_cap_mb == "default" or decision.zero == 0:
        return None
    return Violation(
        rule="buckets_need_whole_copies",
        what=f"bucket_cap_mb = {decision.bucket_cap_mb} with zero = {decision.zero}.",
        why="buckets belong to zero 0; sharding communicates block by block",
        fix='train.plan.bucket_cap_mb = "auto", or train.plan.zero = 0',
        apply={"train.plan.bucket_cap_mb": "auto"},
    )


def each_rank_has_a_sample(plan: Plan, world: int) -> Violation | None:
    batch, data = plan.decision.global_batch, plan.decision.mesh.data_parallel
    if validity.ranks_have_samples(batch, data):
        return None
    return Violation(
        rule="each_rank_has_a_sample",
        what=f"A global batch of {batch} is smaller than {data} data-parallel ranks.",
        why="each rank takes at least one sample a step",
        fix=f"start {batch} ranks (train.devices = {batch}), or a global_batch of at least {data}",
        apply={"train.devices": batch, **REPLAN},
    )


def devices_exist(plan: Plan, world: int) -> Violation | None:
    cluster = plan.cluster
    if cluster.kind == "cpu" or world <= cluster.devices:
        return None
    return Violation(
        rule="devices_exist",
        what=f"{world} ranks on {cluster.name}, which has {cluster.devices} GPUs.",
        why="each rank needs a GPU of its own",
        fix='train.devices = "auto" and train.plan = "auto"',
        apply={"train.devices": "auto", "train.plan": "auto"},
    )


def precision_exists(plan: Plan, world: int) -> Violation | None:
    if plan.decision.precision == "fp8":
        return _fp8_is_planned_only(plan)
    if plan.decision.precision != "bf16" or not has_no_bf16(plan.cluster):
        return None
    return Violation(
        rule="precision_exists",
        what=f"bf16 on {plan.cluster.device.name}, which has no bf16 units.",
        why="it would be emulated, slower than fp32",
        fix='train.precision = "fp16"',
        apply={"train.precision": "fp16"},
    )


def _fp8_is_planned_only(plan: Plan) -> Violation:
    device = plan.cluster.device
    known = device.dense_fp8_flops_per_second is not None
    instead = "fp32" if plan.cluster.kind == "cpu" else "fp16" if has_no_bf16(plan.cluster) else "bf16"
    return Violation(
        rule="precision_exists",
        what="fp8 is planned only: this engine does not train in it yet."
        if known
        else f"fp8 on {device.name}, which has no fp8 units.",
        why="its products and scales are not part of the engine yet" if known else "no speed is known for it there",
        fix=f'train.precision = "{instead}"',
        apply={"train.precision": instead},
    )


def sequence_fits_the_model(plan: Plan, world: int) -> Violation | None:
    length = plan.recipe.data.sequence_length
    if plan.arch is None or _own_data(plan) or length <= plan.arch.max_sequence_length:
        return None
    longest = plan.arch.max_sequence_length
    tokens = plan.recipe.batch.tokens_per_step
    fitting = longest if tokens is None else max(size for size in range(1, longest + 1) if tokens % size == 0)
    return Violation(
        rule="sequence_fits_the_model",
        what=f"data.sequence_length = {length}, and {plan.arch.name} takes at most {longest}.",
        why="positions beyond max_sequence_length were never meant to be seen",
        fix=f"data.sequence_length = {fitting}",
        apply={"data.sequence_length": fitting},
    )


def _own_data(plan: Plan) -> bool:
    """Whether the samples are the user's: what a recipe's [data] says of text is then not about them."""
    return plan.recipe.data.given is not None


def vocabulary_holds_the_tokens(plan: Plan, world: int) -> Violation | None:
    if plan.arch is None or _own_data(plan) or not _takes_bytes(plan) or plan.arch.vocab_size >= 257:
        return None
    return Violation(
        rule="vocabulary_holds_the_tokens",
        what=f"{plan.arch.name} has {plan.arch.vocab_size} token ids, and byte tokens need 257.",
        why="256 bytes and a separator between documents",
        fix="vocab_size = 257 or more in the model's config",
    )


def _takes_bytes(plan: Plan) -> bool:
    tokenizer = plan.recipe.data.tokenizer
    return tokenizer == "bytes" or (tokenizer == "auto" and plan.recipe.model.hf is None)


def heads_divide(plan: Plan, world: int) -> Violation | None:
    tp = plan.decision.mesh.tp
    if plan.arch is None or validity.heads_divide(plan.arch, tp):
        return None
    dividing = math.gcd(tp, plan.arch.num_heads, plan.arch.num_kv_heads)
    heads = math.gcd(plan.arch.num_heads, plan.arch.num_kv_heads)
    others = [str(degree) for degree in range(2, heads + 1) if heads % degree == 0 and degree != dividing]
    return Violation(
        rule="heads_divide",
        what=f"tp = {tp} does not divide {plan.arch.num_heads} heads and {plan.arch.num_kv_heads} key-value heads.",
        why="tensor parallel gives each rank whole heads",
        fix=f"train.plan.tp = {' or '.join([str(dividing), *others])}",
        apply={"train.plan.tp": dividing, **REPLAN},
    )


def sequence_divides(plan: Plan, world: int) -> Violation | None:
    """Sequence parallel in a pipeline: a later stage knows a sequence's length by its parts alone, so all are equal.

    Our decoder is split by position unless that is turned off; roles of the user's own may leave it whole.
    """
    length, mesh, model = plan.recipe.data.sequence_length, plan.decision.mesh, plan.recipe.model
    asked = plan.sequence_parallel
    split = plan.ours and not model.roles if asked == "auto" else asked
    if validity.positions_divide(length, mesh.pp, mesh.tp, split) or not plan.recipe.data.length_is_known:
        return None
    if heads_divide(plan, world) is not None:  # its fix takes another tp
        return None
    return Violation(
        rule="sequence_divides",
        what=f"data.sequence_length = {length} does not divide by tp = {mesh.tp}, in a pipeline.",
        why="sequence parallel gives each of the tp ranks as many positions, and stages pass on only those",
        fix=f"model.sequence_parallel = false, or data.sequence_length = {max(1, length // mesh.tp) * mesh.tp}",
        apply={"model.sequence_parallel": "false"},
    )


def schedule_belongs_to_a_pipeline(plan: Plan, world: int) -> Violation | None:
    decision = plan.decision
    if decision.mesh.pp > 1 and decision.schedule != "none":
        return None
    alone = decision.mesh.pp == 1 and decision.schedule == "none"
    if alone and decision.stages_per_rank == 1 and decision.stage_blocks == "even":
        return None
    sizes = "" if decision.stage_blocks == "even" else f" and stage_blocks = {list(decision.stage_blocks)}"
    return Violation(
        rule="schedule_belongs_to_a_pipeline",
        what=f'schedule = "{decision.schedule}" and stages_per_rank = {decision.stages_per_rank}{sizes} '
        f"with pp = {decision.mesh.pp}.",
        why="a schedule orders the stages of a pipeline, and every pipeline has one",
        fix='train.plan.schedule = "auto", stages_per_rank = "auto" and stage_blocks = "even", or pp = 2 or more',
        apply=_PLAIN_PIPELINE,
    )


def schedule_has_its_micro_batches(plan: Plan, world: int) -> Violation | None:
    decision = plan.decision
    pp = decision.mesh.pp
    if pp == 1 or decision.schedule == "none":
        return None
    problem = schedules.requires(decision.schedule, pp, decision.stages_per_rank, decision.accumulation)
    if not problem:
        return None
    return Violation(
        rule="schedule_has_its_micro_batches",
        what=f"{problem}: micro-batches are {decision.accumulation}, stages a rank {decision.stages_per_rank}.",
        why="its order of forwards and backwards is made for such numbers; 1f1b takes any number of micro-batches",
        fix='train.plan.schedule = "1f1b" and stages_per_rank = "auto"',
        apply={"train.plan.schedule": "1f1b", "train.plan.stages_per_rank": "auto"},
    )


def each_stage_has_a_block(plan: Plan, world: int) -> Violation | None:
    decision = plan.decision
    pp, stages = decision.mesh.pp, decision.mesh.pp * decision.stages_per_rank
    if plan.arch is None or pp == 1 or validity.stages_have_blocks(plan.arch, stages):
        return None
    fewer = pp <= plan.arch.num_layers
    plain: dict[str, str | int] = {"train.plan.schedule": "1f1b", "train.plan.stages_per_rank": 1}
    return Violation(
        rule="each_stage_has_a_block",
        what=f"pp = {pp} x {decision.stages_per_rank} stages a rank = {stages} stages, and the model has "
        f"{plan.arch.num_layers} blocks.",
        why="each stage of a pipeline holds at least one block",
        fix='train.plan.schedule = "1f1b" and stages_per_rank = 1' if fewer else "train.plan.pp = 1, or fewer stages",
        apply=plain if fewer else {"train.plan.pp": 1, **_PLAIN_PIPELINE, **REPLAN},
    )


def stages_share_the_blocks(plan: Plan, world: int) -> Violation | None:
    decision = plan.decision
    sizes, stages = decision.stage_blocks, decision.mesh.pp * decision.stages_per_rank
    if sizes == "even" or plan.arch is None or decision.mesh.pp == 1 or plan.arch.num_layers < stages:
        return None
    problem = schedules.cannot_share(plan.arch.num_layers, stages, sizes)
    if not problem:
        return None
    return Violation(
        rule="stages_share_the_blocks",
        what=f"stage_blocks: {problem}.",
        why=f"each of the {stages} stages has a number of its own, of at least 1, and every block is in one",
        fix='train.plan.stage_blocks = "even", or numbers that sum to the model\'s blocks',
        apply={"train.plan.stage_blocks": "even"},
    )


def combination_runs(plan: Plan, world: int) -> Violation | None:
    """The table of plan/combinations.py; the fix meets every reason that it gives, one after another."""
    cell = combinations.cell_of(plan.decision)
    reasons = combinations.refusals(cell)
    if not reasons:
        return None
    apply = {key: value for reason in reasons for key, value in combinations.overrides(reason).items()}
    parts = [f"schedule {cell.schedule}", f"zero {plan.decision.zero}", f"recompute {cell.recompute}"]
    parts += [f"compile {cell.compile}", f"tp {plan.decision.mesh.tp}"]
    return Violation(
        rule="combination_runs",
        what=f"{', '.join(parts)} do not go together.",
        why="; ".join(reason.why for reason in reasons),
        fix=" and ".join(f"{key} = {value if isinstance(value, int) else repr(value)}" for key, value in apply.items()),
        apply=apply,
    )


def tensor_parallel_stays_in_a_node(plan: Plan, world: int) -> Violation | None:
    tp, devices = plan.decision.mesh.tp, machines.reach(plan.cluster)
    if validity.stays_in_a_node(tp, devices) or plan.cluster.kind == "cpu":
        return None
    return Violation(
        rule="tensor_parallel_stays_in_a_node",
        what=f"tp = {tp} is more than the {devices} devices of a node.",
        why="tensor parallel communicates in every layer, which only the links inside a node carry",
        fix=f"train.plan.tp = {devices}, or fewer",
        apply={"train.plan.tp": devices, **REPLAN},
    )


def _predicted_to_fit(plan: Plan) -> bool:
    """Whether the cost model has judged this plan, at the upper end of its interval: it knows more than these rules."""
    estimate = plan.estimate
    return estimate is not None and estimate.memory_bytes_interval[1] <= estimate.memory_limit_bytes


def states_fit(plan: Plan, world: int) -> Violation | None:
    if _predicted_to_fit(plan):
        return None
    need = bytes_at_rest(plan)
    have = usable_bytes(plan.cluster, world)
    if need is None or need <= have:
        return None
    sharded = plan.decision.zero == 0 and world > 1 and need / world <= have
    return Violation(
        rule="states_fit",
        what=f"{format_bytes(need)} needed per rank between steps, {format_bytes(have)} usable on "
        f"{plan.cluster.device.name}.",
        why="weights, gradients and optimizer states alone, before any activation",
        fix='train.plan.zero = 3 and dp_shard = "auto"' if sharded else "more devices, or a smaller model",
        apply={"train.plan.zero": 3, **REPLAN} if sharded and plan.cluster.kind == "gpu" else None,
    )


def activations_fit(plan: Plan, world: int) -> Violation | None:
    """By the rule of thumb for activations: states and those of the micro-batches in flight, on the fullest rank."""
    if _predicted_to_fit(plan):
        return None
    states, kept = bytes_at_rest(plan), activation_bytes(plan)
    have = usable_bytes(plan.cluster, world)
    if states is None or kept is None or states > have or states + kept <= have:
        return None
    apply: dict[str, str | int] | None = None
    for option in ("selective", "full"):
        less = activation_bytes(plan, recompute=option)
        if plan.decision.recompute in ("none", "selective") and less is not None and states + less <= have:
            apply = {"train.plan.recompute": option}
            break
    fix = f'train.plan.recompute = "{option}"' if apply else "a smaller batch.micro_batch, or a shorter sequence_length"
    if apply is None and plan.decision.micro_batch > 1:
        one = kept // plan.decision.micro_batch
        fitting = (have - states) // max(1, one)
        apply = {"batch.micro_batch": fitting} if fitting else None
    return Violation(
        rule="activations_fit",
        what=f"About {format_bytes(kept)} of activations beside {format_bytes(states)} of states per rank, and "
        f"{format_bytes(have)} usable on {plan.cluster.device.name}.",
        why=f"micro-batches of {plan.decision.micro_batch} samples of {plan.recipe.data.sequence_length} tokens, "
        "kept from forward to backward",
        fix=fix,
        apply=apply,
    )


RULES: tuple[Rule, ...] = (
    degrees_make_the_world,
    devices_exist,
    zero_matches_sharding,
    *planned_only.RULES,
    buckets_need_whole_copies,
    each_rank_has_a_sample,
    precision_exists,
    sequence_fits_the_model,
    vocabulary_holds_the_tokens,
    heads_divide,
    sequence_divides,
    schedule_belongs_to_a_pipeline,
    schedule_has_its_micro_batches,
    each_stage_has_a_block,
    stages_share_the_blocks,
    combination_runs,
    tensor_parallel_stays_in_a_node,
    states_fit,
    activations_fit,
)
