"""shrink: a Plan for any cluster -> one with the same structure on a few CPU ranks. No torch.

What decides which code runs stays: the axes, zero, the schedule, stages a rank, recompute, ties, norms, the kind of
feed-forward, grouped heads, whether blocks, vocabulary, sequence and feed-forward divide evenly. Only sizes shrink.
Shrinking twice changes nothing.
"""

from typing import Literal

import msgspec

from shardwise.inputs.arch import Arch, Experts
from shardwise.inputs.hardware import MachineFacts, local_cluster
from shardwise.inputs.recipe import BatchSpec, DataSpec, Recipe, ScheduleSpec, TrainSpec
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Decision, Plan

# What a laptop runs side by side without a wait; no axis of three passes it. A plan that
# uses four axes at once takes sixteen all the same: on fewer, one of its axes would not be proved.
MOST_RANKS = 8
# Two ranks hide the order of a sum: a + b is b + a. The first of these that may be three is.
MAY_BE_THREE = ("dp_shard", "dp_replicate", "tp", "pp")
STEPS = 4
# Sizes that 2, 3 and 4 divide, and sizes that they do not.
EVEN_VOCABULARY, ODD_VOCABULARY = 72, 61
EVEN_SEQUENCE, ODD_SEQUENCE = 12, 11
EVEN_FFN, ODD_FFN = 48, 49
LONGEST = 16
MOST_HEADS_A_KEY = 8
# Families of Hugging Face turn a part of a head alone, which must come out even.
HF_HEAD_DIM = 16
# Three ranks share out five experts' rows unevenly, and some expert of them gets no token.
MOST_EXPERTS, MOST_EXPERTS_A_TOKEN, EXPERT_FFN = 5, 2, 10
# Large enough that four steps move every weight, and a norm that clips.
LEARNING_RATE, CLIP_NORM = 1e-2, 0.5
GIVEN = "a decoder of the same make, shrunk"
_GIB = 2**30


def shrink(plan: Plan, *, precision: Literal["fp64", "fp32"] = "fp64", compiled: bool = False) -> Plan:
    """The small Plan. fp64 shows faults of logic, fp32 those of rounding; blocks are compiled only if asked."""
    mesh = _mesh(plan.decision.mesh)
    decision = _decision(plan.decision, mesh, precision, compiled)
    arch = _arch(plan.arch, plan, mesh) if plan.arch is not None else None
    facts = MachineFacts(cpus=mesh.world, host_memory_bytes=8 * _GIB * mesh.world, torch_has_cuda=False)
    why = (f"shrunk for verification: {mesh.world} ranks on CPU cores",)
    return msgspec.structs.replace(
        plan, recipe=_recipe(plan, decision), cluster=local_cluster(facts), decision=decision, why=why, arch=arch
    )


def blocks_kept(decision: Decision, mesh: MeshShape) -> int:
    """Blocks of the small model: one a stage of the small mesh, and one more, so that stages are uneven."""
    return mesh.pp * int(getattr(decision, "stages_per_rank", 1)) + 1


def samples(plan: Plan) -> int:
    """Of the random data: two whole batches and a half, so that a short one and a reshuffle are part of four steps."""
    return 2 * plan.decision.global_batch + plan.decision.global_batch // 2


def _mesh(mesh: MeshShape) -> MeshShape:
    """Each axis of a degree above one becomes 2, and one of them 3 where it was longer and MOST_RANKS allow it."""
    axes = {axis: min(2, getattr(mesh, axis)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    small = MeshShape(**axes)
    for axis in MAY_BE_THREE:
        longer = msgspec.structs.replace(small, **{axis: 3})
        if getattr(mesh, axis) >= 3 and longer.world <= MOST_RANKS:
            return longer
    return small


def _decision(decision: Decision, mesh: MeshShape, precision: Literal["fp64", "fp32"], compiled: bool) -> Decision:
    # A pipeline takes whole rounds of its ranks, and two show its steady state. Elsewhere a number that no degree is:
    # a factor found in a gradient then has one meaning.
    accumulation = 2 * mesh.pp if mesh.pp > 1 else 5
    # Two samples a micro-batch, less one: the micro-batches of a step then differ in size.
    global_batch = 2 * accumulation * mesh.data_parallel - 1
    return msgspec.structs.replace(
        decision,
        mesh=mesh,
        stage_blocks=_stage_blocks(decision, mesh),
        global_batch=global_batch,
        micro_batch=2,
        accumulation=accumulation,
        precision=precision,
        compile=decision.compile if compiled else "off",
        bucket_cap_mb="default" if decision.bucket_cap_mb == "default" else 1,
    )


def _stage_blocks(decision: Decision, mesh: MeshShape) -> Literal["even"] | tuple[int, ...]:
    """One block a stage, and the one more where the original's longest stage is."""
    sizes = decision.stage_blocks
    if sizes == "even" or max(sizes) == 1:
        return "even"
    stages = mesh.pp * decision.stages_per_rank
    longest = sizes.index(max(sizes)) * stages // len(sizes)
    return tuple(1 + (stage == longest) for stage in range(stages))


def _arch(arch: Arch, plan: Plan, mesh: MeshShape) -> Arch:
    """A narrow decoder of the same make, with one block more than stages where the original has more."""
    old = plan.decision.mesh
    keys = mesh.tp * min(2, max(1, arch.num_kv_heads // old.tp))
    heads = keys * min(MOST_HEADS_A_KEY, arch.num_heads // arch.num_kv_heads)
    head_dim = min(arch.head_dim, 8 if heads <= 8 else 4)
    wider = 0 if arch.hidden_size == arch.num_heads * arch.head_dim else 4
    if not plan.ours:
        head_dim, wider = HF_HEAD_DIM, 0
    return msgspec.structs.replace(
        arch,
        vocab_size=EVEN_VOCABULARY if arch.vocab_size % (old.tp * old.dp_shard) == 0 else ODD_VOCABULARY,
        hidden_size=heads * head_dim + wider,
        num_layers=min(arch.num_layers, blocks_kept(plan.decision, mesh)),
        num_heads=heads,
        num_kv_heads=keys,
        head_dim=head_dim,
        ffn_size=EVEN_FFN if arch.ffn_size % old.tp == 0 else ODD_FFN,
        max_sequence_length=LONGEST,
        dropout=0.0,
        experts=_experts(arch.experts) if arch.experts is not None else None,
    )


def _experts(experts: Experts) -> Experts:
    """Few and narrow: more than a token goes through, where there were; and a dense block before them where one was."""
    each = min(experts.per_token, MOST_EXPERTS_A_TOKEN)
    return msgspec.structs.replace(
        experts,
        count=each if experts.count == experts.per_token else min(experts.count, MOST_EXPERTS),
        per_token=each,
        ffn_size=EXPERT_FFN,
        shared_ffn_size=EXPERT_FFN if experts.shared_ffn_size else 0,
        dense_layers=min(experts.dense_layers, 1),
    )


def _recipe(plan: Plan, decision: Decision) -> Recipe:
    """The recipe of the small plan: random tokens, and steps that move the weights far enough to be compared."""
    recipe, length = plan.recipe, plan.recipe.data.sequence_length
    kept = blocks_kept(plan.decision, decision.mesh)
    model = msgspec.structs.replace(
        recipe.model,
        fp32_modules=tuple(name for name in recipe.model.fp32_modules if _within(name, kept)),
        unused_parameters=tuple(name for name in recipe.model.unused_parameters if _within(name, kept)),
    )
    if plan.ours:
        choice: dict[str, str | None] = {"preset": None, "config": None, "hf": None, "factory": None}
        model = msgspec.structs.replace(model, **choice, given=GIVEN)
    optimizer = msgspec.structs.replace(
        recipe.optimizer,
        lr=LEARNING_RATE,
        clip_norm="off" if recipe.optimizer.clip_norm == "off" else CLIP_NORM,
        schedule=ScheduleSpec(),
    )
    return msgspec.structs.replace(
        recipe,
        run="",
        model=model,
        data=DataSpec(
            given="random tokens",
            sequence_length=EVEN_SEQUENCE if length % plan.decision.mesh.tp == 0 else ODD_SEQUENCE,
        ),
        batch=BatchSpec(global_batch=decision.global_batch),
        optimizer=optimizer,
        train=TrainSpec(steps=STEPS, precision=decision.precision),
        log=(),
    )


def _within(name: str, kept: int) -> bool:
    """Whether a module's name has no index of a block that is cut off."""
    return all(int(part) < kept for part in name.split(".") if part.isdigit())
