"""The planner's front door: a Plan for a recipe, a model and machines, by the search where the model's shape is known.

What the user wrote down by hand (train.plan as a table) and modules of unknown shape are filled in by the rule of
thumb; its plan also stands beside the searched ones. No torch.
"""

import functools
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.cost.candidates import RECOMPUTE
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Cluster
from shardwise.inputs.recipe import Recipe
from shardwise.plan import choice, evaluate, rule_of_thumb, search, uneven
from shardwise.plan.choice import ALIKE, Choice
from shardwise.plan.plan import Decision, Plan
from shardwise.plan.questions import Question
from shardwise.plan.schedules import in_runs
from shardwise.plan.search import CostModel, Found
from shardwise.plan.subject import Subject
from shardwise.units import format_bytes, format_seconds

# Plans that the engine's own choice is made among.
LOOKED_AT = 8


# Subspaces without an axis or two, each looked through for what is as fast and plainer.
PLAINER: tuple[Mapping[str, int], ...] = (
    {"pp": 1, "tp": 1, "cp": 1, "ep": 1},
    {"pp": 1, "cp": 1, "ep": 1},
    {"tp": 1, "cp": 1, "ep": 1},
)


class Searched(NamedTuple):
    """What a search found: plans best first, of all and of those that the engine runs; and how long it took."""

    question: Question
    subject: Subject
    found: Found
    best: tuple[Choice, ...]
    running: tuple[Choice, ...]
    seconds: float

    @property
    def chosen(self) -> Choice | None:
        """What becomes the Plan: the plainest of those as fast as the fastest that runs; the fastest where none runs.

        No prediction tells two percent apart, and fewer axes have fewer ways to go wrong. None where nothing fits.
        """
        if not self.running:
            return self.best[0] if self.best else None
        limit = self.running[0].estimate.step_seconds * (1 + ALIKE)
        return min((one for one in self.running if one.estimate.step_seconds <= limit), key=_plainness)

    @property
    def candidates(self) -> tuple[Choice, ...]:
        """At most as many as asked for, best first, the chosen one among them.

        Planned-only ones are told where they are faster than what runs: at most half, so that what runs is seen; where
        nothing runs, all are planned only.
        """
        top = self.found.best.most
        if not self.running or self.chosen is None:
            return self.best[:top]
        limit = self.running[0].estimate.step_seconds
        faster = [one for one in self.best if one.planned_only and one.estimate.step_seconds < limit][: top // 2]
        told = [*faster, *self.running[: top - len(faster)]]
        told = told if self.chosen in told else [*told[:-1], self.chosen]
        return tuple(sorted(told, key=lambda one: one.estimate.step_seconds))


def _plainness(one: Choice) -> tuple[int, ...]:
    """Smaller is plainer: axes, then what is sharded, recomputed, moved or cut finer."""
    decided, mesh = one.decision, one.decision.mesh
    axes = sum(degree > 1 for degree in (*mesh.degrees, mesh.ep))
    options = (RECOMPUTE.index(decided.recompute), int(decided.offload != "none"), decided.stages_per_rank)
    axes += decided.stage_blocks != "even"
    return (axes, decided.zero, *options, int(decided.bucket_cap_mb != "default"))


def costs() -> CostModel:
    """The cost model: imported when something is planned."""
    from shardwise.cost.floor import bytes_floor, data_floor, keeping_floor
    from shardwise.cost.memory import memory
    from shardwise.cost.step import step

    return CostModel(memory, step, functools.partial(memory, rank="first"), bytes_floor, data_floor, keeping_floor)


def searched(
    question: Question, model: CostModel, top: int = 5, clock: Callable[[], float] = time.perf_counter
) -> Searched:
    """Search, and say what each of the best plans takes."""
    start = clock()
    subject = question.subject()
    found = search.search(subject, model, top)
    running = list(evaluate.choices(subject, model, found.running.table))
    running += _plainer(question, subject, model, running)
    differing = uneven.choices(subject, model)
    running += [one for one in differing if not one.planned_only]
    best = _fastest_first([*evaluate.choices(subject, model, found.best.table), *differing])[:top]
    return Searched(question, subject, found, best, _fastest_first(running), clock() - start)


def _fastest_first(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Each decision once."""
    once = {one.decision: one for one in choices}
    return tuple(sorted(once.values(), key=lambda one: one.estimate.step_seconds))


def _plainer(question: Question, subject: Subject, model: CostModel, running: Sequence[Choice]) -> list[Choice]:
    """Plans with fewer axes that are as fast, which the few fastest may leave out."""
    if not running:
        return []
    ceiling = running[0].estimate.step_seconds * (1 + ALIKE)
    found: list[Choice] = []
    for fixed in PLAINER:
        if all(subject.task.fixed.get(axis, 1) == 1 for axis in fixed):
            task = replace(subject.task, fixed={**subject.task.fixed, **fixed})
            there = search.search(subject._replace(task=task), model, LOOKED_AT, ceiling)
            found += evaluate.choices(subject, model, there.running.table)
    return found


def can_predict(recipe: Recipe, cluster: Cluster) -> bool:
    """Whether the machines' speed is known: the peak of the precision, and the memory's bandwidth."""
    device = cluster.device
    peak = device.peak_flops_per_second(rule_of_thumb.precision_of(recipe, cluster)[0])
    return peak is not None and (device.kind == "cpu" or device.hbm_bytes_per_second is not None)


def plan(recipe: Recipe, shape: Arch | int | None, cluster: Cluster, *, world: int | None = None) -> Plan:
    """The Plan that the engine obeys: the fastest that it runs and that fits for sure; else the rule of thumb's.

    Raises: RecipeError where the global batch is not a whole number of samples.
    """
    by_hand, known = recipe.train.plan != "auto", can_predict(recipe, cluster) and recipe.data.length_is_known
    if by_hand or not known or not isinstance(shape, Arch):
        return rule_of_thumb.plan(recipe, shape, cluster, world=world)
    done = searched(Question(recipe, shape, cluster, {}, world), costs(), LOOKED_AT)
    if not done.running or done.chosen is None:
        return rule_of_thumb.plan(recipe, shape, cluster, world=world)
    return plan_of(recipe, shape, cluster, done.chosen, reasons(done.subject, done.found, done.chosen, recipe))


def plan_of(recipe: Recipe, arch: Arch, cluster: Cluster, chosen: Choice, why: tuple[str, ...]) -> Plan:
    """The Plan of a Choice."""
    version = importlib.metadata.version("shardwise")
    return Plan(recipe, cluster, chosen.decision, why, arch=arch, shardwise_version=version, estimate=chosen.estimate)


def reasons(subject: Subject, found: Found, chosen: Choice, recipe: Recipe) -> tuple[str, ...]:
    """Why this plan: what was searched, what it takes, what bounds it."""
    estimate = chosen.estimate
    slowest = sorted(estimate.seconds.items(), key=lambda part: -part[1])[:2]
    parts = " and ".join(f"{share(seconds, estimate.step_seconds)} {words(name)}" for name, seconds in slowest)
    fullest = max(estimate.memory.items(), key=lambda part: part[1])
    low, high = estimate.step_seconds_interval
    runs = "the fastest that this engine runs and that fits" if subject.runs else "the fastest that fits"
    return (
        split_words(chosen.decision),
        f"{runs} (the plainest within {ALIKE:.0%}), of {found.searched:,} plans for {subject.task.world} ranks",
        f"a step takes about {format_seconds(estimate.step_seconds)} (80 %: {format_seconds(low)} to "
        f"{format_seconds(high)}): {parts}",
        f"{format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_limit_bytes)} a rank, most of it "
        f"{words(fullest[0])} ({format_bytes(fullest[1])})",
        rule_of_thumb.precision_of(recipe, subject.cluster)[1],
        *subject.workload.arch.left_out(),
    )


def split_words(decided: Decision) -> str:
    """Who holds and computes what, as a reason of a plan."""
    mesh = decided.mesh
    held = {
        0: "each rank keeps a whole copy, gradients are summed",
        1: f"optimizer states are sharded over {mesh.dp_shard} ranks",
        2: f"gradients and optimizer states are sharded over {mesh.dp_shard} ranks",
        3: f"weights, gradients and states are sharded over {mesh.dp_shard} ranks",
    }[decided.zero]
    parts = [f"zero {decided.zero}: {held}" if mesh.data_parallel > 1 else ""]
    parts += [f"tp = {mesh.tp}: each layer is split over {mesh.tp} ranks" if mesh.tp > 1 else ""]
    parts += [f"pp = {mesh.pp}: {mesh.pp * decided.stages_per_rank} stages of blocks" if mesh.pp > 1 else ""]
    if decided.stage_blocks != "even":
        parts.append(f"{in_runs(decided.stage_blocks)} blocks a stage, in the order of the machines")
    if decided.shares != "equal":
        parts.append(f"{in_runs(decided.shares)} micro-batches a rank, by group of machines")
    return "; ".join(part for part in parts if part) or "one rank: nothing to split"


def by_thumb(question: Question, subject: Subject, model: CostModel) -> tuple[Plan, Choice | None]:
    """The rule of thumb's plan for the same ranks, and what it is predicted to take; None where it is no valid plan."""
    made = rule_of_thumb.plan(question.recipe, question.arch, question.cluster, world=subject.task.world)
    mesh = made.decision.mesh
    if mesh.world != subject.task.world or mesh.pp * made.decision.stages_per_rank > question.arch.num_layers:
        return made, None
    splits = subject.task.fixed.get("sequence_parallel", 1) == 1
    table = choice.table([choice.row(made.decision, splits)])
    return made, evaluate.choices(subject, model, table)[0]


def words(part: str) -> str:
    """A part's name as it stands in a sentence."""
    return part.replace("_", " ")


def share(part: float, whole: float) -> str:
    """`41 %`."""
    return f"{100 * part / whole:.0f} %"
