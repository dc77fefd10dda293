"""A user's module held against its plan before any rank waits for another.

A Trainer does so on each rank before it joins the others. Where a command knows the module's factory it does so before
there is any rank: `python -m shardwise.train.before_ranks PLAN ANSWER` is that process (launch/before_ranks.py).
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from shardwise import ranks
from shardwise.data.loader import Ordered, generators_kept
from shardwise.data.order import seed_of
from shardwise.environment import process_identity
from shardwise.errors import ShardwiseError
from shardwise.inputs.arch import Arch
from shardwise.inputs.recipe import Recipe
from shardwise.launch import local
from shardwise.launch.before_ranks import Answer
from shardwise.models import materialize
from shardwise.models.hf import build as hf
from shardwise.models.hf import documents
from shardwise.parallel.rehearsal import Call, rehearse
from shardwise.plan import check, rule_of_thumb
from shardwise.plan.plan import Decision, Plan
from shardwise.train.step import Inputs, call_inputs


class Built(NamedTuple):
    """A module that was built and rehearsed before this rank joined the others, and what was not tried of it."""

    module: nn.Module
    not_tried: str


def before_joining(model: Any, recipe: Recipe, plan: Plan | None, data: Any, inputs: Inputs | str) -> Built | None:
    """Build and rehearse a module that is to be cut; None where nothing is, or where it must wait for the ranks.

    A plan that is left open is made after joining. No collective. Raises: ModelError, PlanInfeasible.
    """
    asked = plan.decision.mesh if plan is not None else recipe.train.plan
    world = ranks.world() if ranks.world() > 1 else process_identity().world
    if isinstance(model, Arch | str) or isinstance(asked, str) or asked.pp * asked.tp == 1 or world == 1:
        return None
    ranks.take_device()
    try:
        module = materialize.build(model, recipe.seed)
    except ShardwiseError:
        raise
    except Exception:  # a factory that asks torch for its rank, say: it is built again where it can
        return None
    if plan is None:
        size = sum(p.numel() for p in module.parameters())
        plan = rule_of_thumb.plan(recipe, size, local.cluster_here(recipe.train.cluster), world=world)
        check.require(plan, world)
    return Built(module, rehearsed(module, plan.decision, recipe, data, inputs))


def rehearsed(module: nn.Module, decision: Decision, recipe: Recipe, data: Any, inputs: Inputs | str) -> str:
    """Why forward was not tried, as `rehearse` says it. Raises: ModelError."""
    call = _sample(data, recipe.seed) if decision.mesh.pp * decision.mesh.tp > 1 else None
    return rehearse(module, decision, recipe.model, None if call is None else _call(module, inputs, call))


def _call(module: nn.Module, inputs: Inputs | str, batch: Any) -> Call:
    return Call(*call_inputs(module, inputs)(batch))


def _sample(data: Any, seed: int) -> Any:
    """A batch of the first samples, one or two; None of a Stream, whose samples come once."""
    if not isinstance(data, Ordered) or not len(data):
        return None
    positions = np.arange(min(2, len(data)))
    with generators_kept():
        seeds = () if data.deterministic else [seed_of("sample", seed, 0, int(k)) for k in positions]
        return data.fetch(data.order(positions, seed, data.shuffle), seeds, 0)


def main(plan_file: Path, answer_file: Path) -> None:
    """Write what `rehearse` says of the recipe's module, or the error that it raises."""
    plan = Plan.from_json(plan_file.read_bytes())
    try:
        answer = Answer(not_tried=_of_recipe(plan))
    except ShardwiseError as error:
        answer = Answer(kind=type(error).__name__, what=error.what, why=error.why, fix=error.fix)
    answer_file.write_bytes(msgspec.json.encode(answer))


def _of_recipe(plan: Plan) -> str:
    spec = plan.recipe.model
    inputs: Inputs | str = "auto"
    if spec.hf is not None:
        module, _ = hf.causal_lm(spec.hf, spec.trainable)
        inputs = hf.inputs
        if plan.recipe.data.chat and plan.recipe.data.packing:
            documents.require_apart(spec.hf)
    else:
        module = materialize.build(materialize.load_factory(str(spec.factory)), plan.recipe.seed)
    # What a recipe's data is made of; shapes are looked at, and number 0 is a token of every vocabulary.
    tokens = torch.zeros((2, plan.recipe.data.sequence_length), dtype=torch.int64)
    call = _call(module, inputs, {"tokens": tokens, "labels": tokens.clone()})
    with hf.NumbersAreOne() if spec.hf is not None else nullcontext():
        return rehearse(module, plan.decision, spec, call)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
