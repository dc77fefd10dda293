"""`shardwise plan`."""

from pathlib import Path
from typing import NamedTuple

from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import PRESETS, arch_of
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import Recipe
from shardwise.launch import local
from shardwise.plan import rule_of_thumb
from shardwise.plan.check import check
from shardwise.report import plan as report

# For a shape without a recipe: what such models are trained with, said in the plan and changed with --set.
ASSUMED = {"data.sequence_length": 4096, "batch.global_batch": 1024, "train.steps": 1000}


class Asked(NamedTuple):
    target: str
    cluster: str
    overrides: tuple[str, ...]
    output: str | None
    as_json: bool


def plan(asked: Asked) -> int:
    """Print the plan for a recipe, a config.json or a preset; write it where asked."""
    cluster = parse_cluster(asked.cluster, local.probe_cluster() if asked.cluster == "local" else None)
    recipe = _recipe(asked)
    made = rule_of_thumb.plan(recipe, arch_of(recipe.model, cluster.kind), cluster)
    found = check(made, made.decision.mesh.world)
    if asked.output:
        Path(asked.output).write_bytes(made.to_json())
    if asked.as_json:
        print(report.as_json(made, found))
        return 0
    print(report.text(made))
    if found:
        print("this plan cannot run as it is\n" + report.violations(found))
    return 0


def _recipe(asked: Asked) -> Recipe:
    if Path(asked.target).suffix == ".toml":
        return recipes.load(asked.target, asked.overrides)
    kind = "preset" if asked.target in PRESETS else "config"
    keys = {"model": {kind: asked.target}, "data": {"given": recipes.SHAPE_ALONE}, "run": "runs/planned"}
    return recipes.from_keys(recipes.with_overrides(keys, _assumed(asked.overrides)), "plan")


def _assumed(overrides: tuple[str, ...]) -> list[str]:
    """The assumptions that the user did not replace, then what the user said."""
    named = {override.partition("=")[0].strip() for override in overrides}
    alternatives = {"batch.global_batch": "batch.tokens_per_step", "train.steps": "train.tokens"}
    assumed = [
        f"{key}={value}" for key, value in ASSUMED.items() if key not in named and alternatives.get(key) not in named
    ]
    return [*assumed, *overrides]
