"""The parts for a loop of your own that are not elsewhere: init, build_optimizer, batches, check_ranks."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from shardwise import ranks
from shardwise.data.batches import as_data
from shardwise.data.loader import seed_generators
from shardwise.data.micros import Micros
from shardwise.data.order import seed_of
from shardwise.errors import DataError, RecipeError
from shardwise.inputs import recipe as recipes
from shardwise.inputs.recipe import PlanRequest
from shardwise.launch import local
from shardwise.optimizer import build as optimizers
from shardwise.parallel.parallelize import parallel_of
from shardwise.plan import check, rule_of_thumb
from shardwise.plan.plan import Plan
from shardwise.resilience.guards import Guards
from shardwise.train import failure, setup


def init(
    plan: str | PlanRequest | Mapping[str, Any] | Plan = "auto",
    *,
    global_batch: int | None = None,
    micro_batch: int | str = "auto",
    precision: str = "auto",
    seed: int = 0,
    unused_parameters: tuple[str, ...] = (),
    mixes_samples: str = "refuse",
    roles: Mapping[str, str] | None = None,
    sequence_parallel: str | bool = "auto",
    cluster: str = "local",
) -> Plan:
    """Join the ranks and return the Plan for the world that came.

    `global_batch` in samples; a plan that leaves zero open takes 0; `cluster` is a recipe's `train.cluster`.
    Collective. Raises: RecipeError, PlanInfeasible.
    """
    failure.install()
    ranks.start()
    seed_generators(seed_of(plan.recipe.seed if isinstance(plan, Plan) else seed, "loop"))
    if isinstance(plan, Plan):
        check.require(plan, ranks.world())
        return plan
    if precision == "fp16":
        raise RecipeError(
            "precision = fp16 needs a loss scale, which an own loop has not.",
            fix='precision="bf16", or the Trainer, which scales, skips and resumes the scale',
        )
    keys = {
        "run": "",
        "seed": seed,
        "model": {
            "given": "own loop",
            "unused_parameters": unused_parameters,
            "mixes_samples": mixes_samples,
            "roles": dict(roles or {}),
            "sequence_parallel": sequence_parallel,
        },
        "data": {"given": "own loop"},
        "batch": {"global_batch": global_batch or ranks.world(), "micro_batch": micro_batch},
        "train": {"precision": precision, "plan": msgspec.to_builtins(plan), "cluster": cluster},
    }
    recipe = recipes.from_keys(keys, "sw.init")

    def decide() -> Any:
        made = rule_of_thumb.plan(recipe, None, local.cluster_here(recipe.train.cluster), world=ranks.world())
        check.require(made, ranks.world())
        return msgspec.to_builtins(made)

    return msgspec.convert(ranks.on_main(decide), Plan)


def build_optimizer(module: nn.Module, factory: Any) -> torch.optim.Optimizer:
    """`factory(module)` on the split parameters, checked. Raises: ModelError."""
    optimizer = factory(module) if not isinstance(factory, recipes.OptimizerSpec) else optimizers.build(factory, module)
    setup.require_optimizer(optimizer, module, parallel_of(module).plan.decision)
    return optimizer


def check_ranks(module: nn.Module, step: int = 0) -> None:
    """The Trainer's guards in a loop of your own: whether what must be the same on several ranks still is.

    Bits of weights that several ranks hold, ties, and of the last forward_backward and clip_grad_norm since the last
    check what was counted and divided by, the loss and the norm. After the optimizer's step, every so many steps; the
    first time before training finds ranks that start apart. `step` is for the message. Collective.
    Raises: RanksDiverged, the same on every rank.
    """
    parallel = parallel_of(module)
    if parallel.guards is None:
        mesh, ties = parallel.plan.decision.mesh, parallel.tied_names
        parallel.guards = Guards(module, mesh, every_steps=1, aliases=parallel.aliases, ties=ties)
    last, parallel.last_step = parallel.last_step, None
    if last is None:
        parallel.guards.check(step, counted={}, divided={}, alike={})
        return
    # What is not finite has no bits to agree on.
    alike = {name: value for name, value in last.alike.items() if math.isfinite(value)}
    parallel.guards.check(step, counted=last.counted(), divided=last.divided, alike=alike)


class batches:
    """This rank's micro-batches, step by step, in the one global order; resumes through a Checkpointer's `data=`.

    `plan` says how large the global batch is and how it is cut; `epochs` None never ends.
    """

    def __init__(self, data: Any, plan: Plan, *, epochs: int | None = None) -> None:
        decision = plan.decision
        self.loader = as_data(data).loader(
            seed=plan.recipe.seed,
            global_batch=decision.global_batch,
            micro_batches=decision.accumulation,
            rank=decision.mesh.data_coord(ranks.rank()),
            ranks=decision.mesh.data_parallel,
            epochs=epochs,
        )
        self._begun = False

    def __iter__(self) -> Iterator[Micros]:
        """Raises: DataError the second time, where nothing would come."""
        if self._begun:
            raise DataError(
                "These batches were read already.",
                why="they go through all their epochs in one loop",
                fix="one loop over sw.batches(data, plan, epochs=...), or a new sw.batches",
            )
        self._begun = True
        with self.loader:
            yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
