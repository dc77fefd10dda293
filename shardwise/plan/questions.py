"""What people ask of a planner beside the plan: how many GPUs, at what price, how large, and what if. No torch.

Each answer is what a search found, or what the cost model says of plans that one found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Cluster
from shardwise.inputs.recipe import Recipe
from shardwise.plan import evaluate, uneven
from shardwise.plan.choice import ALIKE, Choice
from shardwise.plan.machines import with_nodes
from shardwise.plan.search import CostModel, search
from shardwise.plan.space import Table
from shardwise.plan.subject import Subject, of

SECONDS_A_DAY = 86400.0
# Machines are doubled this often at most when more are looked for: 16,384 of them.
DOUBLINGS = 14


class Question(NamedTuple):
    """What a search is asked: its inputs, what is fixed beside what the recipe fixes, and the ranks that came."""

    recipe: Recipe
    arch: Arch
    cluster: Cluster
    fixed: Mapping[str, int]
    world: int | None = None

    def subject(self) -> Subject:
        return of(self.recipe, self.arch, self.cluster, world=self.world, fixed=self.fixed)


class Machines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machines that train so many tokens in time, and what it takes."""

    cluster: str
    gpus: int
    days: float
    tokens_per_second: float
    gpu_hours: float


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What changes with a choice that is the user's: the best of the plans told, under it. Above 1 is faster."""

    what: str
    step_seconds: float
    speedup: float
    memory_bytes: float
    fits: bool
    same_plan: bool


def changed(recipe: Recipe, table: str, **keys: Any) -> Recipe:
    """The recipe with these keys of a table."""
    return msgspec.structs.replace(recipe, **{table: msgspec.structs.replace(getattr(recipe, table), **keys)})


def machines_for(
    question: Question, model: CostModel, tokens: float, days: float
) -> tuple[Machines | None, Machines | None]:
    """The fewest machines of this kind that train `tokens` in `days`; and the fastest looked at where none does.

    Doubled until they are enough, then looked at between in eighths. The batch stays as it is.
    """
    single = question._replace(cluster=with_nodes(question.cluster, 1))
    fastest: Machines | None = None
    for nodes in (1 << doubling for doubling in range(DOUBLINGS + 3)):
        took = _takes(single, nodes, model, tokens)
        if took is None:
            continue
        if took.days <= days:
            steps = range(nodes // 2 + max(1, nodes // 8), nodes, max(1, nodes // 8))
            between = (_takes(single, fewer, model, tokens) for fewer in steps)
            return next((one for one in between if one is not None and one.days <= days), took), None
        if fastest is None or took.days < fastest.days:
            fastest = took
        elif took.days > 2 * fastest.days:
            break
    return None, fastest


def _takes(question: Question, nodes: int, model: CostModel, tokens: float) -> Machines | None:
    grown = question._replace(cluster=with_nodes(question.cluster, nodes))
    subject = grown.subject()
    found = search(subject, model, top=1).best
    return trained(subject, float(found.seconds[0]), tokens) if len(found.seconds) else None


def trained(subject: Subject, step_seconds: float, tokens: float) -> Machines:
    """What so many tokens take at this speed."""
    speed, gpus = subject.workload.tokens / step_seconds, subject.task.world
    seconds = tokens / speed
    return Machines(subject.cluster.name, gpus, seconds / SECONDS_A_DAY, speed, seconds * gpus / 3600)


def largest_micro_batch(subject: Subject, model: CostModel, plan: Table) -> int:
    """Samples of one forward that still fit for sure with the degrees and options of a plan, a table of one row."""
    sizes = np.arange(1, 4097)
    table = {**{name: np.repeat(plan[name], len(sizes)) for name in plan}, "micro_batch": sizes}
    fits = evaluate.needed(subject, model, table) <= subject.limit
    return int(sizes[fits].max()) if fits.any() else 0


def longest_sequence(question: Question, model: CostModel) -> int:
    """Tokens of a sequence, a power of two times today's, with which some plan still fits; 0 where today's does not."""
    return _largest(question, model, _longer, question.recipe.data.sequence_length)


def deepest_model(question: Question, model: CostModel) -> Arch | None:
    """The same shape with the most blocks with which some plan still fits, to a sixteenth; None where one does not."""

    def fits(layers: int) -> bool:
        arch = msgspec.structs.replace(question.arch, num_layers=layers)
        return len(search(question._replace(arch=arch).subject(), model, top=1).best.seconds) > 0

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high) and high < 1 << 16:
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return msgspec.structs.replace(question.arch, num_layers=low)


def _longer(question: Question, length: int) -> Question:
    arch = msgspec.structs.replace(question.arch, max_sequence_length=max(length, question.arch.max_sequence_length))
    recipe = changed(question.recipe, "data", sequence_length=length)
    if recipe.batch.tokens_per_step:
        recipe = changed(recipe, "batch", tokens_per_step=max(length, recipe.batch.tokens_per_step // length * length))
    return question._replace(recipe=recipe, arch=arch)


def _largest(question: Question, model: CostModel, grown: Callable[[Question, int], Question], start: int) -> int:
    largest, size = 0, start
    while size <= 1 << 24 and len(search(grown(question, size).subject(), model, top=1).best.seconds):
        largest, size = size, 2 * size
    return largest


def what_ifs(subject: Subject, model: CostModel, told: Sequence[Choice], chosen: Choice) -> tuple[WhatIf, ...]:
    """What changes with the user's own choices: the chosen plan, or another of those told where that is faster then.

    Another one is held against the fastest of today's: that it was faster already is no gain of the choice.
    """
    fastest = min(one.estimate.step_seconds for one in (chosen, *told))
    found = []
    for what, change in _choices_of_the_user(subject):
        estimates = [uneven.of_any(subject, model, one.decision, change) for one in (chosen, *told)]
        fitting = [one for one in estimates if one.memory_bytes_interval[1] <= one.memory_limit_bytes]
        best = min(fitting or estimates, key=lambda one: one.step_seconds)
        stays = estimates[0] in (fitting or estimates) and estimates[0].step_seconds <= (1 + ALIKE) * best.step_seconds
        best = estimates[0] if stays else best
        found.append(
            WhatIf(
                what=what,
                step_seconds=best.step_seconds,
                speedup=(chosen.estimate.step_seconds if stays else fastest) / best.step_seconds,
                memory_bytes=best.memory_bytes,
                fits=bool(fitting),
                same_plan=stays,
            )
        )
    return tuple(found)


Change = Callable[[Subject], Subject]


def _choices_of_the_user(subject: Subject) -> Iterator[tuple[str, Change]]:
    node, workload = subject.cluster.node, subject.workload
    if node.network is not None and subject.cluster.nodes > 1:
        yield "the network half as fast", lambda one: _with_node(one, network=_slower(one.cluster.node.network))
    yield "the links in a node half as fast", lambda one: _with_node(one, link=_slower(one.cluster.node.link))
    if node.device.dense_fp8_flops_per_second and workload.precision == "bf16":
        yield "fp8 products", lambda one: _with_work(one, precision="fp8")
    if workload.precision != "fp32":
        fp32 = msgspec.structs.replace(workload.stack, gathered=4)
        yield "fp32", lambda one: _with_work(one, precision="fp32", stack=fp32)
    int8 = msgspec.structs.replace(workload.stack, reduced=1)
    yield "gradients as int8 on the wire", lambda one: _with_work(one, stack=int8)


def _with_work(subject: Subject, **parts: Any) -> Subject:
    return subject._replace(workload=msgspec.structs.replace(subject.workload, **parts))


def _with_node(subject: Subject, **parts: Any) -> Subject:
    cluster = subject.cluster
    return subject._replace(
        cluster=msgspec.structs.replace(cluster, node=msgspec.structs.replace(cluster.node, **parts))
    )


def _slower(link: Any) -> Any:
    speed = None if link is None else link.bytes_per_second
    return link if speed is None else msgspec.structs.replace(link, bytes_per_second=speed / 2)
