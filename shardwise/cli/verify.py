"""`shardwise verify`: a plan or a recipe, proved in two halves."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from shardwise.errors import EXIT_DONE, EXIT_FAILED, RecipeError
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import arch_of
from shardwise.launch import before_ranks, local
from shardwise.plan import automatic
from shardwise.plan.check import require
from shardwise.plan.plan import Plan

if TYPE_CHECKING:
    from shardwise.verify.values import DryRun
    from shardwise.verify.verdict import Verdict

HALVES = ("dry", "parity", "both")


class Asked(NamedTuple):
    target: str
    overrides: tuple[str, ...]
    half: str
    compiled: bool
    as_json: bool


def verify(asked: Asked) -> int:
    """Print what was proved; 0 where all of it passed. Raises: RecipeError, PlanInfeasible, ModelError."""
    from shardwise.report import verify as report

    if asked.half not in HALVES:
        raise RecipeError(f"--half {asked.half} is none of dry, parity and both.", fix="--half both")
    plan = load(asked)
    require(plan, plan.decision.mesh.world)
    if plan.recipe.model.hf is not None and plan.arch is not None and plan.arch.experts is not None:
        raise RecipeError(
            "verify does not take a Hugging Face model with experts yet.",
            why="transformers' products of experts run neither on meta nor in fp64, where faults of logic show",
            fix="shardwise train: Shardwise's own tests hold two such families against one process",
        )
    if plan.recipe.model.hf is None:  # of one of Hugging Face the dry run builds what its config says, without weights
        before_ranks.require_module(plan)
    if not asked.as_json:
        print(report.head(plan), flush=True)
    dry = _dry(plan) if asked.half != "parity" else None
    if dry is not None and not asked.as_json:
        print(report.dry_run(dry), flush=True)
    parity = _parity(plan, asked.compiled) if asked.half != "dry" else None
    if parity is not None and not asked.as_json:
        print(report.parity(parity), flush=True)
    passed = report.passed(dry, parity)
    if asked.as_json:
        halves = {"dry": msgspec.to_builtins(dry), "parity": msgspec.to_builtins(parity)}
        print(json.dumps({"passed": passed, **halves}))
    else:
        print(report.verdict(dry, parity))
    return EXIT_DONE if passed else EXIT_FAILED


def load(asked: Asked) -> Plan:
    """The plan in a file, or the one that a recipe leads to on this machine. Raises: RecipeError."""
    if Path(asked.target).suffix == ".toml":
        recipe = recipes.load(asked.target, asked.overrides)
        cluster = local.cluster_here(recipe.train.cluster)
        return automatic.plan(recipe, arch_of(recipe.model, cluster.kind), cluster)
    if asked.overrides:
        raise RecipeError(
            "--set belongs to a recipe; a plan is a decision that was made.",
            fix="shardwise plan RECIPE --set ... -o plan.json, then shardwise verify plan.json",
        )
    try:
        return Plan.from_json(Path(asked.target).read_bytes())
    except FileNotFoundError:
        raise RecipeError(
            f"There is no plan or recipe {asked.target}.", fix="shardwise plan RECIPE -o plan.json makes one"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise RecipeError(
            f"{asked.target} is not a plan.", why=str(error), fix="shardwise plan RECIPE -o plan.json makes one"
        ) from None


def _dry(plan: Plan) -> "DryRun":
    from shardwise.verify.dry_run import dry_run

    return dry_run(plan)


def _parity(plan: Plan, compiled: bool) -> "Verdict":
    from shardwise.verify.parity import parity

    return parity(plan, compiled=compiled)
