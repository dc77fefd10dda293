"""What is planned, priced and written into a Plan, and not run by this engine yet: one rule each, with its fix."""

from shardwise.inputs.arch import Arch
from shardwise.inputs.recipe import PlanRequest
from shardwise.plan.plan import Decision, Plan
from shardwise.plan.violation import REPLAN, Rule, Violation

# Axes that have not met experts yet: why, of each.
NOT_WITH_EXPERTS = {
    "tp": "experts are not split over a tensor group yet",
    "pp": "stages of blocks with experts are not proved yet",
}


def against_experts(decision: Decision, arch: Arch | None) -> dict[str, str]:
    """The axes of a decision that have not met this model's experts yet, each with the reason."""
    if arch is None or arch.experts is None:
        return {}
    return {name: why for name, why in NOT_WITH_EXPERTS.items() if getattr(decision.mesh, name) > 1}


def axis_runs(axis: str, later: str) -> Rule:
    """The rule that the engine does not run this axis yet."""

    def rule(plan: Plan, world: int) -> Violation | None:
        degree = getattr(plan.decision.mesh, axis)
        if degree == 1:
            return None
        by_hand = isinstance(plan.recipe.train.plan, PlanRequest)
        return Violation(
            rule=f"{axis}_runs",
            what=f"{axis} = {degree} is planned only: this engine does not run it yet.",
            why=f"{later} is not part of the engine yet; data parallel and full sharding are",
            fix=f"train.plan.{axis} = 1" if by_hand else "train.plan.zero = 3 (full sharding over all ranks)",
            apply={f"train.plan.{axis}": 1, **REPLAN} if by_hand else {"train.plan.zero": 3},
        )

    return rule


def experts_run(plan: Plan, world: int) -> Violation | None:
    """Axes that have not met experts yet."""
    against = against_experts(plan.decision, plan.arch)
    if not against:
        return None
    axes = [f"{axis} = {getattr(plan.decision.mesh, axis)}" for axis in against]
    return Violation(
        rule="experts_run",
        what=f"{' and '.join(axes)} with experts is planned only: this engine does not run it yet.",
        why="; ".join(against.values()) + "; data parallel and full sharding of experts run",
        fix=" and ".join(f"train.plan.{axis} = 1" for axis in against),
        apply={**{f"train.plan.{axis}": 1 for axis in against}, "train.plan.schedule": "auto",
               "train.plan.stages_per_rank": "auto", **REPLAN},
    )  # fmt: skip


def option_runs(key: str) -> Rule:
    """The rule that the engine runs only "none" of this option yet."""

    def rule(plan: Plan, world: int) -> Violation | None:
        value = getattr(plan.decision, key)
        if value == "none":
            return None
        return Violation(
            rule=f"{key}_runs",
            what=f'{key} = "{value}" is planned only: this engine does not run it yet.',
            why=f"{key} is not part of the engine yet",
            fix=f'train.plan.{key} = "none"',
            apply={f"train.plan.{key}": "none"},
        )

    return rule


def model_runs(plan: Plan, world: int) -> Violation | None:
    problem = plan.arch.engine_problem() if plan.arch is not None else ""
    if plan.recipe.model.hf is None and not problem:
        return None
    if plan.recipe.model.hf is None:
        return Violation(
            rule="model_runs",
            what=f"{plan.arch.name if plan.arch else ''} is planned only: this engine does not build it yet.",
            why=problem,
            fix=_another_model(plan),
        )
    return Violation(
        rule="model_runs",
        what=f"model.hf = {plan.recipe.model.hf!r} is planned only: this engine does not build it yet.",
        why="Hugging Face models are not part of the engine yet",
        fix='model.preset = "decoder-2m", model.config = "config.json" or model.factory = "my.module:build"',
    )


def _another_model(plan: Plan) -> str:
    if plan.arch is not None and plan.arch.engine_problem().find("output_router_logits") >= 0:
        return "output_router_logits = false in its config.json (no balancing loss), or another shape"
    return 'model.preset = "llama-3-8b" or another Llama-style shape, or model.factory = "my.module:build"'


def trainable_runs(plan: Plan, world: int) -> Violation | None:
    if plan.recipe.model.trainable == "full":
        return None
    return Violation(
        rule="trainable_runs",
        what="model.trainable is planned only: this engine trains a shape's every parameter.",
        why="frozen parts and adapters of a shape are not part of the engine yet; those of your own module are",
        fix='model.trainable = "full", or a module with its adapters by model.factory = "my.module:build"',
        apply={"model.trainable": "full"},
    )


def trackers_run(plan: Plan, world: int) -> Violation | None:
    if not plan.recipe.log:
        return None
    return Violation(
        rule="trackers_run",
        what=f"log = {list(plan.recipe.log)}, and no tracker is built yet.",
        why="events go to JSON lines in the run's events folder, which a tracker can read",
        fix="log = []",
        apply={"log": "[]"},
    )


RULES: tuple[Rule, ...] = (
    axis_runs("cp", "context parallel"),
    axis_runs("ep", "expert parallel"),
    experts_run,
    option_runs("offload"),
    option_runs("compression"),
    model_runs,
    trainable_runs,
    trackers_run,
)
