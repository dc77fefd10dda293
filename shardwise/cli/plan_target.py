"""What `shardwise plan` is asked about: a recipe, a config.json, a preset or a callable, as a Recipe and a shape."""

import difflib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.errors import RecipeError
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import PRESETS, Arch, arch_of, from_config_json
from shardwise.inputs.recipe import Recipe

# For a shape without a recipe: what such models are trained with, said in the plan and changed with --set.
ASSUMED_LENGTH = 4096
ASSUMED = {"batch.global_batch": 1024, "train.steps": 1000}
ALTERNATIVES = {"batch.global_batch": "batch.tokens_per_step", "train.steps": "train.tokens"}


class Target(NamedTuple):
    """shape: an Arch, or the number of parameters of a module whose shape is not known, or nothing.

    assumed: what the user did not say, as KEY=VALUE.
    """

    recipe: Recipe
    shape: Arch | int | None
    assumed: tuple[str, ...] = ()


def of(target: str, overrides: tuple[str, ...], kind: Literal["cpu", "gpu"]) -> Target:
    """Raises: RecipeError where there is no such thing."""
    if Path(target).suffix == ".toml":
        recipe = recipes.load(target, overrides)
        return Target(recipe, arch_of(recipe.model, kind))
    if ":" in target and not Path(target).exists():
        return _alone({"factory": target}, _module_shape(target), overrides)
    if target in PRESETS:
        return _alone({"preset": target}, PRESETS[target], overrides)
    if "." not in target and "/" not in target and not Path(target).exists():
        raise _no_preset(target)
    return _alone({"config": target}, from_config_json(target), overrides)


def _no_preset(name: str) -> RecipeError:
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
    return RecipeError(
        f"There is no preset {name!r}.",
        why=f"the presets are {', '.join(PRESETS)}",
        fix=f"write {nearest}, or give a recipe, a config.json, or package.module:callable",
    )


def _alone(model: dict[str, str], shape: Arch | int, overrides: tuple[str, ...]) -> Target:
    """A shape without a recipe: the rest is assumed where the user does not say it."""
    named = {override.partition("=")[0].strip() for override in overrides}
    length = min(ASSUMED_LENGTH, shape.max_sequence_length) if isinstance(shape, Arch) else ASSUMED_LENGTH
    wanted = {"data.sequence_length": length, **ASSUMED}
    assumed = tuple(
        f"{key}={value}" for key, value in wanted.items() if key not in named and ALTERNATIVES.get(key) not in named
    )
    keys = {"model": model, "data": {"given": recipes.SHAPE_ALONE}, "run": "runs/planned"}
    recipe = recipes.from_keys(recipes.with_overrides(keys, [*assumed, *overrides]), "plan")
    return Target(recipe, shape, tuple(one for one in assumed if not one.startswith("train.")))


def _module_shape(name: str) -> Arch | int:
    """The Arch that a module carries, as our decoder and Hugging Face models do, or its number of parameters.

    Built on the meta device: torch is imported, and no memory is taken. Raises: ModelError, RecipeError.
    """
    import torch

    from shardwise.models.inspect import parameter_count
    from shardwise.models.materialize import load_factory

    factory = load_factory(name)
    try:
        with torch.device("meta"):
            module = factory()
    except Exception as error:
        raise RecipeError(
            f"{name} cannot be built on the meta device.", why=f"{type(error).__name__}: {error}",
            fix="a callable without arguments that returns a module and reads no weights",
        ) from error  # fmt: skip
    if isinstance(arch := getattr(module, "arch", None), Arch):
        return arch
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        try:
            return from_config_json(config.to_dict())
        except RecipeError:
            return parameter_count(module)
    return parameter_count(module)
