"""Why no plan is valid at all: the rule that what was fixed breaks, and a fix that was tried. No torch."""

import math

from shardwise.errors import PlanInfeasible
from shardwise.plan import space, validity
from shardwise.plan.fixed import name_of
from shardwise.plan.questions import Question
from shardwise.plan.space import Task


def refuse(question: Question) -> PlanInfeasible:
    """The error for a question whose space is empty."""
    task = question.subject().task
    names = [f"{name_of(column)} = {value}" for column, value in question.fixed.items()]
    said = " and ".join(names) or f"a global batch of {task.global_batch} on {task.world} ranks"
    why = _broken(task) or "they contradict each other: no plan has all of them"
    for column in question.fixed:
        free = question._replace(fixed={key: value for key, value in question.fixed.items() if key != column})
        left = space.cores(free.subject().task)
        if column in left and len(left[column]) and space.count(free.subject().task, left):
            values = sorted({int(value) for value in left[column]})
            return PlanInfeasible(f"No plan has {said}.", why=why, fix=f"--fix {_one_of(column, values)}")
        if len(left["pp"]) and space.count(free.subject().task, left):
            return PlanInfeasible(f"No plan has {said}.", why=why, fix=f"leave out --fix {name_of(column)}=...")
    return PlanInfeasible(f"No plan has {said}.", why=why, fix="a larger batch.global_batch, or fewer GPUs")


def _one_of(column: str, values: list[int]) -> str:
    return f"{name_of(column)}={' or '.join(map(str, values[:6]))}"


def _broken(task: Task) -> str:
    """The first rule of degrees that a fixed value breaks by itself; empty where none does."""
    fixed, arch = task.fixed, task.arch
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        degree = fixed.get(axis, 1)
        if axis != "ep" and task.world % degree:
            return f"{axis} = {degree} does not divide {task.world} ranks"
    tp, pp, cp, ep = (fixed.get(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    data = math.ceil(task.world / (pp * cp * task.devices_per_node))
    rules = (
        (validity.heads_divide(arch, tp), f"tp = {tp} does not divide {arch.num_heads} heads and {arch.num_kv_heads} "
         "key-value heads"),
        (validity.stays_in_a_node(tp, task.devices_per_node), f"tp = {tp} is more than the {task.devices_per_node} "
         "devices of a node"),
        (validity.stages_have_blocks(arch, pp * fixed.get("stages_per_rank", 1)), f"the model has {arch.num_layers} "
         "blocks, fewer than stages"),
        (validity.chunks_are_equal(task.sequence_length, cp), f"{task.sequence_length} positions do not make {2 * cp} "
         f"equal chunks of at least {validity.LEAST_CHUNK} (cp = {cp})"),
        (validity.experts_divide(arch, ep), f"ep = {ep} does not divide the experts"
         if arch.experts else "a dense model has no experts to spread"),
        (validity.ranks_have_samples(task.global_batch, fixed.get("data_parallel", data)),
         f"a global batch of {task.global_batch} is smaller than the data-parallel ranks"),
    )  # fmt: skip
    return next((why for holds, why in rules if not holds), "")
