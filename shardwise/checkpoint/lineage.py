"""Whose checkpoints are whose: where a recipe's run keeps its own, and under which lineage. No torch."""

from pathlib import Path

import msgspec

from shardwise.checkpoint.manifest import digest_of
from shardwise.checkpoint.object_store import say_on_stderr, store_at
from shardwise.checkpoint.store import LocalStore, Store
from shardwise.inputs.recipe import Recipe
from shardwise.inputs.recipe_changes import fixed_keys
from shardwise.launch import run_folder


def lineage_of(recipe: Recipe) -> str:
    """In a store, the same for every attempt of a run, on any machine: its name, and what it may not change."""
    return digest_of(msgspec.json.encode([recipe.run, fixed_keys(recipe)], order="sorted"))


def kept_at(folder: str | Path, recipe: Recipe) -> tuple[Store, str]:
    """The store of the run in this folder, and its lineage there; in its own folder a run is alone and needs none.

    Raises: RecipeError for a URL that cannot be used.
    """
    if not recipe.checkpoint.store:
        return LocalStore(run_folder.checkpoints_folder(folder)), ""
    return store_at(recipe.checkpoint.store, say_on_stderr), lineage_of(recipe)
