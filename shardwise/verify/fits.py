"""Whether the bytes that a dry run counted fit the device, and what to change where they do not. No torch."""

from collections.abc import Sequence

from shardwise.inputs.recipe import PlanRequest
from shardwise.plan import combinations
from shardwise.plan.plan import Plan
from shardwise.plan.rough_memory import activation_bytes
from shardwise.plan.violation import Violation
from shardwise.units import format_bytes
from shardwise.verify.values import CATEGORIES, LiveBytes, RankRun

Overrides = dict[str, str | int]

_SHARDED: Overrides = {"train.plan.zero": 3, "train.plan.dp_shard": "auto", "train.plan.dp_replicate": "auto"}
# What grows with the samples of a micro-batch; the rest is the model's.
_OF_THE_BATCH = ("activations", "other", "communication")


def fits(plan: Plan, runs: Sequence[RankRun], limit: int) -> tuple[Violation, ...]:
    """A violation where the fullest rank's peak is above what a rank may use, with the numbers by category."""
    fullest = max(runs, key=lambda run: run.peak.live.total)
    peak = fullest.peak
    if peak.live.total <= limit:
        return ()
    parts = sorted(((getattr(peak.live, name), name) for name in CATEGORIES), reverse=True)
    listed = ", ".join(f"{name} {format_bytes(size)}" for size, name in parts if size)
    fix, apply = smaller(plan, peak.live, limit)
    return (
        Violation(
            rule="peak_fits",
            what=f"{format_bytes(peak.live.total)} of live tensors at the peak of rank {fullest.rank} "
            f"({peak.phase}), {format_bytes(limit)} usable on {plan.cluster.device.name}.",
            why=f"{listed}; what a dry run does not cover comes on top",
            fix=fix,
            apply=apply,
        ),
    )


def smaller(plan: Plan, live: LiveBytes, limit: int) -> tuple[str, Overrides | None]:
    """What to change, and the same as overrides; None where only the user can choose.

    First what leaves the steps as they are: a smaller micro-batch, then recompute where kept activations weigh most,
    else sharding. Halving is certain to lower the peak; whether it then fits, the next dry run says.
    """
    decision = plan.decision
    of_the_batch = sum(getattr(live, name) for name in _OF_THE_BATCH)
    fixed = live.total - of_the_batch
    if of_the_batch > fixed or (fixed <= limit and not _can_shard(plan)):
        return _smaller_batch(plan, of_the_batch, limit - fixed)
    if _can_shard(plan):
        return 'train.plan.zero = 3 and dp_shard = "auto"', {**_degrees(plan), **_SHARDED}
    if decision.zero == 3:
        return "more devices, or a smaller model", None
    return "a larger train.plan.tp or pp, more devices, or a smaller model", None


def _smaller_batch(plan: Plan, kept: int, room: int) -> tuple[str, Overrides | None]:
    """`kept`: bytes of the micro-batches at the peak; `room`: what the model's own leave of the limit."""
    decision = plan.decision
    if decision.micro_batch > 1:
        one = kept // decision.micro_batch
        fitting = max(1, min(decision.micro_batch // 2, room // max(1, one)))
        return f"batch.micro_batch = {fitting}", {"batch.micro_batch": fitting}
    option = _more_recompute(plan)
    if option is not None:
        return f'train.plan.recompute = "{option}"', {**_degrees(plan), "train.plan.recompute": option}
    return "a larger train.plan.tp, or a shorter data.sequence_length", None


def _degrees(plan: Plan) -> Overrides:
    """The decided degrees as overrides where the recipe left them open: a key under train.plan ends its "auto"."""
    decision = plan.decision
    if isinstance(plan.recipe.train.plan, PlanRequest):
        return {}
    axes = {f"train.plan.{axis}": getattr(decision.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
    pipeline = {"train.plan.schedule": decision.schedule, "train.plan.stages_per_rank": decision.stages_per_rank}
    if decision.stage_blocks != "even":
        pipeline["train.plan.stage_blocks"] = str(list(decision.stage_blocks))
    return {**axes, "train.plan.zero": decision.zero, **(pipeline if decision.mesh.pp > 1 else {})}


def _more_recompute(plan: Plan) -> str | None:
    """The next kind that keeps less; None where there is none or the rule of thumb knows that it keeps as much."""
    if plan.decision.recompute == "full":
        return None
    now, full = activation_bytes(plan), activation_bytes(plan, recompute="full")
    return "full" if now is None or full is None or full < now else None


def _can_shard(plan: Plan) -> bool:
    """Whether data-parallel ranks hold copies of what they could share, and what composes lets them."""
    decision = plan.decision
    if decision.zero == 3 or decision.mesh.data_parallel == 1:
        return False
    return not combinations.refusals(combinations.cell_of(decision)._replace(data="zero3"))
