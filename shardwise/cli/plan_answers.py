"""The questions that `shardwise plan` is asked beside the plan, answered in words and as values."""

from typing import Any

import msgspec

from shardwise.errors import RecipeError
from shardwise.plan import automatic, choice, questions
from shardwise.plan.choice import Choice
from shardwise.plan.questions import Machines, Question
from shardwise.plan.search import CostModel
from shardwise.plan.subject import Subject
from shardwise.units import format_count, parse_count


class Wanted(msgspec.Struct, frozen=True):
    """tokens: to be trained on; days: in this time; price: of a GPU and hour; largest: what is the most that fits."""

    tokens: str | None = None
    days: float | None = None
    price: float | None = None
    largest: bool = False


Answers = tuple[dict[str, Any], tuple[str, ...]]


def answers(wanted: Wanted, question: Question, subject: Subject, chosen: Choice) -> Answers:
    """Values and sentences. Raises: RecipeError for --days or --price without a number of tokens."""
    tokens = _tokens(wanted, question)
    model = automatic.costs()
    values: dict[str, Any] = {}
    lines: list[str] = []
    if tokens is not None:
        taken = questions.trained(subject, chosen.estimate.step_seconds, tokens)
        values["training"] = _priced(taken, wanted.price)
        lines.append(f"{format_count(tokens)} tokens: {_said(taken, wanted.price)}")
    if tokens is not None and wanted.days is not None:
        enough, fastest = questions.machines_for(question, model, tokens, wanted.days)
        values["machines"] = None if enough is None else _priced(enough, wanted.price)
        lines.append(_machines(enough, fastest, wanted))
    if wanted.largest:
        values["largest"], more = _largest(question, subject, model, chosen)
        lines += more
    return values, tuple(lines)


def _tokens(wanted: Wanted, question: Question) -> float | None:
    if wanted.tokens is not None:
        return parse_count(wanted.tokens)
    if question.recipe.train.tokens is not None:
        return float(question.recipe.train.tokens)
    if wanted.days is not None or wanted.price is not None:
        raise RecipeError(
            "--days and --price need to know how much is trained.", fix="--tokens 15T, or train.tokens in the recipe"
        )
    return None


def _priced(taken: Machines, price: float | None) -> dict[str, Any]:
    cost = {} if price is None else {"dollars": taken.gpu_hours * price}
    return {**msgspec.to_builtins(taken), **cost}


def _said(taken: Machines, price: float | None) -> str:
    cost = "" if price is None else f", ${taken.gpu_hours * price:,.0f} at ${price:g} a GPU-hour"
    return f"{taken.days:.3g} days on {taken.gpus:,} GPUs, {format_count(taken.gpu_hours)} GPU-hours{cost}"


def _machines(enough: Machines | None, fastest: Machines | None, wanted: Wanted) -> str:
    if enough is not None:
        return f"in {wanted.days:g} days: {enough.cluster}, {_said(enough, wanted.price)}"
    if fastest is None:
        return f"in {wanted.days:g} days: no number of these machines fits the model"
    return f"in {wanted.days:g} days: no number of them with this batch; the fastest is {_said(fastest, wanted.price)}"


def _largest(question: Question, subject: Subject, model: CostModel, chosen: Choice) -> Answers:
    plan = choice.table([choice.row(chosen.decision, subject.task.fixed.get("sequence_parallel", 1) == 1)])
    micro = questions.largest_micro_batch(subject, model, plan)
    length = questions.longest_sequence(question, model)
    deepest = questions.deepest_model(question, model)
    layers, parameters = (deepest.num_layers, deepest.parameters()) if deepest else (0, 0)
    values = {"micro_batch": micro, "sequence_length": length, "layers": layers, "parameters": parameters}
    return values, (
        f"largest micro-batch of the best plan: {micro} samples",
        f"longest sequence (by doubling) that some plan fits: {length:,} tokens",
        f"deepest model of this width that some plan fits: {layers} layers, {format_count(parameters)} parameters",
    )
