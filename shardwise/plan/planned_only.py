"""What is planned, priced and written into a Plan, and not run by this engine yet: one rule each, with its fix."""

from shardwise.inputs.arch import Arch
from shardwise.inputs.recipe import ModelSpec, PlanRequest
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
               "train.plan.stages_per_rank": "auto", "train.plan.stage_blocks": "even", **REPLAN},
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


def shares_run(plan: Plan, world: int) -> Violation | None:
    if plan.decision.shares == "equal":
        return None
    return Violation(
        rule="shares_run",
        what=f"shares = {list(plan.decision.shares)} is planned only: this engine gives each rank as many samples.",
        why="uneven shares of the batch are not part of the engine yet",
        fix='train.plan = "auto": shares are equal then, or stages have blocks by speed',
        apply={"train.plan": "auto"},
    )


def model_runs(plan: Plan, world: int) -> Violation | None:
    problem = "" if plan.arch is None else engine_problem(plan.arch, plan.recipe.model.hf)
    if not problem:
        return None
    return Violation(
        rule="model_runs",
        what=f"{plan.arch.name if plan.arch else ''} is planned only: this engine does not build it yet.",
        why=problem,
        fix=_another_model(plan),
    )


def engine_problem(arch: Arch, hf: str | None) -> str:
    """Why this engine does not train a shape: as our own decoder, or as transformers' module; empty where it does."""
    return arch.engine_problem() if hf is None else ""


def _another_model(plan: Plan) -> str:
    if not plan.ours:
        return 'a dense model for model.hf, or model.factory = "my.module:build"'
    if plan.arch is not None and "output_router_logits" in plan.arch.engine_problem():
        return "output_router_logits = false in its config.json (no balancing loss), or another shape"
    return 'model.preset = "llama-3-8b" or another Llama-style shape, or model.factory = "my.module:build"'


def trainable_runs(plan: Plan, world: int) -> Violation | None:
    problem = trainable_problem(plan.recipe.model)
    if not problem:
        return None
    return Violation(
        rule="trainable_runs",
        what="model.trainable is planned only here.",
        why=problem,
        fix='model.trainable = "full"; model.hf; or a module with its adapters by model.factory = "my.module:build"',
        apply={"model.trainable": "full"},
    )


def trainable_problem(model: ModelSpec) -> str:
    """Why this engine does not train a part of a model alone; empty where it does."""
    if model.trainable == "full":
        return ""
    if model.hf is None and model.given is None:
        return "frozen parts and adapters of a shape are planned only: those of a model of Hugging Face run"
    lora = model.trainable.lora
    if lora is not None and lora.base_bits != 16:
        return f"weights of {lora.base_bits} bits (QLoRA) are planned only: a quantised weight has no shards to read"
    return ""


def adapters_stay_whole(plan: Plan, world: int) -> Violation | None:
    trainable, mesh = plan.recipe.model.trainable, plan.decision.mesh
    if trainable == "full" or trainable.lora is None or mesh.tp == 1:
        return None
    return Violation(
        rule="adapters_stay_whole",
        what=f"Adapters with tp = {mesh.tp} are planned only: this engine does not split them yet.",
        why="an adapter's two products lie beside a layer that tensor parallel cuts, and are cut otherwise",
        fix="train.plan.tp = 1: zero 3 shards the frozen weights over all ranks",
        apply={"train.plan.tp": 1, **REPLAN},
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
    shares_run,
    model_runs,
    trainable_runs,
    adapters_stay_whole,
    trackers_run,
)
