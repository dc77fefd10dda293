"""Why nothing fits: by how much the nearest plan is short, what takes most, and the changes that help. No torch.

A change is told only after the search has found a plan with it.
"""

from collections.abc import Iterator

import msgspec

from shardwise.inputs.hardware import catalogue, parse_cluster
from shardwise.inputs.recipe import PlanRequest
from shardwise.plan import evaluate
from shardwise.plan.choice import Choice
from shardwise.plan.fixed import name_of
from shardwise.plan.machines import times
from shardwise.plan.questions import DOUBLINGS, Question, changed
from shardwise.plan.search import CostModel, search


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change with which a plan fits: in words, as arguments of `shardwise plan`, and what the best then takes."""

    what: str
    arguments: tuple[str, ...]
    gpus: int
    step_seconds: float
    memory_bytes: float


class Shortfall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why nothing fits: the plan that needs the fewest bytes, by how many it is short, what takes most, what helps.

    short_bytes is counted at the upper end of the interval: with so many more the plan fits for sure.
    """

    closest: Choice
    short_bytes: float
    binding: str
    binding_bytes: float
    changes: tuple[Change, ...]


def shortfall(question: Question, model: CostModel) -> Shortfall | None:
    """Why no plan fits; None where no plan is valid at all."""
    subject = question.subject()
    closest = evaluate.choices(subject, model, evaluate.nearest(subject, model))
    if not closest:
        return None
    estimate = closest[0].estimate
    binding, most = max(estimate.memory.items(), key=lambda part: part[1])
    found = tuple(change for change in (_tested(*one, model) for one in _changes(question)) if change is not None)
    return Shortfall(closest[0], estimate.memory_bytes_interval[1] - subject.limit, binding, most, found)


def _tested(what: str, arguments: tuple[str, ...], tries: Iterator[Question], model: CostModel) -> Change | None:
    """The first of these with which a plan fits."""
    for question in tries:
        subject = question.subject()
        found = search(subject, model, top=1)
        if len(found.best.seconds):
            best = evaluate.choices(subject, model, found.best.table)[0]
            values = {"cluster": question.cluster.name, "length": question.recipe.data.sequence_length}
            estimate = best.estimate
            return Change(
                what.format(**values), tuple(one.format(**values) for one in arguments),
                subject.task.world, estimate.step_seconds, estimate.memory_bytes,
            )  # fmt: skip
    return None


Proposal = tuple[str, tuple[str, ...], Iterator[Question]]


def _changes(question: Question) -> Iterator[Proposal]:
    """What could be changed, cheapest first: what costs nothing, what costs machines, what changes the training."""
    recipe = question.recipe
    for column in question.fixed:
        fixed = {key: value for key, value in question.fixed.items() if key != column}
        name = name_of(column)
        yield f"leave {name} free", (f"without --fix {name}=...",), iter([question._replace(fixed=fixed)])
    if isinstance(recipe.train.plan, PlanRequest):
        free = changed(recipe, "train", plan="auto")
        yield "let the search decide", ('--set train.plan="auto"',), iter([question._replace(recipe=free)])
    if recipe.batch.micro_batch != "auto":
        free = changed(recipe, "batch", micro_batch="auto")
        yield (
            "let the search choose the micro-batch",
            ('--set batch.micro_batch="auto"',),
            iter([question._replace(recipe=free)]),
        )
    if question.cluster.kind == "gpu":
        yield "more machines: {cluster}", ("--cluster", "{cluster}"), more_machines(question)
        yield "GPUs with more memory: {cluster}", ("--cluster", "{cluster}"), _larger_gpus(question)
    yield "sequences of {length} tokens", ("--set", "data.sequence_length={length}"), _shorter(question)


def more_machines(question: Question) -> Iterator[Question]:
    """Twice as many, four times, ..."""
    for doubling in range(1, DOUBLINGS + 1):
        yield question._replace(cluster=times(question.cluster, 1 << doubling))


def _larger_gpus(question: Question) -> Iterator[Question]:
    """As many of each GPU of the catalogue that has more memory, the smallest first."""
    cluster = question.cluster
    larger = [gpu for gpu in catalogue().gpu if gpu.hbm_bytes > cluster.smallest_device.hbm_bytes]
    for gpu in [] if cluster.others else sorted(larger, key=lambda one: one.hbm_bytes):
        yield question._replace(cluster=parse_cluster(f"{cluster.nodes}x{cluster.node.devices}x{gpu.name}"))


def _shorter(question: Question) -> Iterator[Question]:
    """Half as long, a quarter, ... with as many tokens a step."""
    recipe = question.recipe
    length = recipe.data.sequence_length // 2
    while length >= 256:
        tokens, longer = recipe.batch.tokens_per_step, recipe.data.sequence_length / length
        batch = {} if tokens else {"global_batch": int((recipe.batch.global_batch or 1) * longer)}
        if not tokens or tokens % length == 0:
            yield question._replace(recipe=changed(changed(recipe, "data", sequence_length=length), "batch", **batch))
        length //= 2
