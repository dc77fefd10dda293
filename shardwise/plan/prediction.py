"""What any plan is predicted to take, whoever decided it: to stand beside what was measured. No torch."""

from dataclasses import replace

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.arch import Arch
from shardwise.plan import automatic, rule_of_thumb, uneven
from shardwise.plan.estimate import Estimate
from shardwise.plan.plan import Plan
from shardwise.plan.questions import Question
from shardwise.plan.subject import Subject


def why_none(plan: Plan) -> str:
    """Why nothing can be predicted of a plan's step; "" where it can."""
    if plan.arch is None:
        return "the module's shape is not known: it is the user's own, and only its parameters were counted"
    if not plan.recipe.data.length_is_known:
        return "the length of the samples is not known"
    if not automatic.can_predict(plan.recipe, plan.cluster):
        precision = rule_of_thumb.precision_of(plan.recipe, plan.cluster)[0]
        device = plan.cluster.device.name
        return f"the speed of {device} in {precision} is not known: shardwise doctor --measure finds it"
    if plan.decision.compression != "none":
        return "compressed gradients are not predicted"
    try:
        _subject(plan, plan.arch)
    except RecipeError as error:
        return error.what
    return ""


def predict(plan: Plan) -> Estimate | None:
    """The plan's own estimate, else what the cost model says of its decision; None where `why_none` has a reason."""
    if plan.estimate is not None:
        return plan.estimate
    if plan.arch is None or why_none(plan):
        return None
    subject = _subject(plan, plan.arch)
    if plan.sequence_parallel is False:
        task = replace(subject.task, fixed={**subject.task.fixed, "sequence_parallel": 0})
        subject = subject._replace(task=task)
    return uneven.of_any(subject, automatic.costs(), plan.decision)


def _subject(plan: Plan, arch: Arch) -> Subject:
    """What a search would have been asked, in the precision that was decided. Raises: RecipeError."""
    subject = Question(plan.recipe, arch, plan.cluster, {}, plan.decision.mesh.world).subject()
    return subject._replace(workload=msgspec.structs.replace(subject.workload, precision=plan.decision.precision))
