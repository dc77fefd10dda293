"""`shardwise plan`."""

from pathlib import Path
from typing import NamedTuple

from shardwise.cli import plan_target
from shardwise.cli.plan_answers import Wanted, answers
from shardwise.errors import EXIT_BAD_INPUT, EXIT_DONE, RecipeError
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Cluster, parse_cluster
from shardwise.inputs.recipe import Recipe
from shardwise.launch import local
from shardwise.plan import automatic, fixed, rule_of_thumb, uneven
from shardwise.plan.check import check
from shardwise.plan.questions import Question, what_ifs
from shardwise.plan.refusal import refuse
from shardwise.plan.shortfall import shortfall
from shardwise.report import plan as plain
from shardwise.report import planned as report
from shardwise.report.planned import Planned


class Asked(NamedTuple):
    target: str
    cluster: str
    overrides: tuple[str, ...]
    output: str | None
    as_json: bool
    top: int = 5
    fixes: tuple[str, ...] = ()
    page: str | None = None
    wanted: Wanted = Wanted()


def plan(asked: Asked) -> int:
    """Search the plans for a recipe, a config.json, a preset or a callable; print the best, write them where asked.

    2 where nothing fits.
    """
    fixes = fixed.parse(asked.fixes)
    named = asked.cluster or _named_by_recipe(asked)
    cluster = parse_cluster(named, local.probe_cluster() if named == "local" else None)
    target = plan_target.of(asked.target, asked.overrides, cluster.kind)
    if not isinstance(target.shape, Arch) or not automatic.can_predict(target.recipe, cluster):
        return _by_thumb(asked, target.recipe, target.shape, cluster)
    told = _planned(Question(target.recipe, target.shape, cluster, fixes), asked, target.assumed)
    if told.plan is not None:
        _write(asked, told)
    print(report.as_json(told) if asked.as_json else report.text(told))
    return EXIT_BAD_INPUT if told.plan is None else EXIT_DONE


def _named_by_recipe(asked: Asked) -> str:
    """The machines that a recipe trains on; "local" of what is no recipe."""
    if Path(asked.target).suffix != ".toml":
        return "local"
    return recipes.load(asked.target, asked.overrides).train.cluster


def _planned(question: Question, asked: Asked, assumed: tuple[str, ...]) -> Planned:
    """Raises: PlanInfeasible where no plan is valid."""
    model = automatic.costs()
    done = automatic.searched(question, model, asked.top)
    thumb = automatic.by_thumb(question, done.subject, model)
    if not done.found.searched:
        raise refuse(question)
    chosen = done.chosen
    if chosen is None:
        return Planned(done, None, (), thumb, assumed=assumed, shortfall=shortfall(question, model))
    why = automatic.reasons(done.subject, done.found, chosen, question.recipe)
    made = automatic.plan_of(question.recipe, question.arch, question.cluster, chosen, why)
    changes = what_ifs(done.subject, model, done.running or done.best, chosen)
    values, lines = answers(asked.wanted, question, done.subject, chosen)
    found = check(made, made.decision.mesh.world)
    return Planned(done, made, found, thumb, changes, lines, values, assumed)


def _write(asked: Asked, told: Planned) -> None:
    """The plan as JSON and the page, where they were asked for. Raises: RecipeError where they cannot be written."""
    written = {asked.output: told.plan.to_json() if told.plan is not None else b""}
    if asked.page is not None:
        from shardwise.report import planned_page

        done = told.searched
        chosen = done.chosen or done.candidates[0]
        held = uneven.memory_by_rank(done.subject, chosen.decision)
        page = planned_page.page(told, [one.parts for one in held], [one.limit for one in held])
        written[asked.page] = page.encode()
    for path, content in written.items():
        if path is not None:
            _write_file(path, content)


def _write_file(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written.", why=str(error), fix="give a path that can") from None


def _by_thumb(asked: Asked, recipe: Recipe, shape: Arch | int | None, cluster: Cluster) -> int:
    """What can be said of a module of unknown shape, or of machines of unknown speed: the rule of thumb's plan.

    Raises: RecipeError where something was asked that it cannot answer.
    """
    questions = "--tokens, --days, --price and --largest"
    unanswered = {"--fix": asked.fixes, "--html": asked.page, questions: asked.wanted != Wanted()}
    for option, given in unanswered.items():
        if given:
            raise RecipeError(
                f"{option} needs a prediction, and there is none.",
                why="the model's shape or the machine's speed is not known",
                fix="plan a preset, a config.json or a recipe with one of them, on machines of the catalogue",
            )
    made = rule_of_thumb.plan(recipe, shape, cluster)
    found = check(made, made.decision.mesh.world)
    if asked.output:
        _write_file(asked.output, made.to_json())
    if asked.as_json:
        print(plain.as_json(made, found))
        return EXIT_DONE
    print(plain.text(made))
    if found:
        print("this plan cannot run as it is\n" + plain.violations(found))
    return EXIT_DONE
