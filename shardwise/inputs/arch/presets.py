"""Shapes by name: the public models in presets.toml, and what a recipe's [model] names."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs import hub
from shardwise.inputs.arch.config_json import from_config_json, is_known
from shardwise.inputs.arch.shape import Arch
from shardwise.inputs.recipe import ModelSpec, PresetByDevice


class PresetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """presets.toml: families of shapes that share a source and some fields."""

    family: tuple["Family", ...]
    schema_version: Literal[1] = 1


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`shared` fields of an Arch hold for every one of `shapes`; columns are named by `columns`, the name first."""

    source: str
    columns: tuple[str, ...]
    shapes: tuple[tuple[str | int | bool, ...], ...]
    shared: dict[str, object] = {}


def _load() -> Mapping[str, Arch]:
    raw = Path(__file__).with_name("presets.toml").read_bytes()
    found = {}
    for family in msgspec.toml.decode(raw, type=PresetFile).family:
        for shape in family.shapes:
            keys = {**family.shared, **dict(zip(family.columns, shape, strict=True))}
            found[str(keys["name"])] = msgspec.convert(_nested(keys), Arch)
    return found


def _nested(keys: Mapping[str, object]) -> dict[str, object]:
    """A column "experts.count" goes into the table of experts."""
    plain = {key: value for key, value in keys.items() if "." not in key}
    for key, value in keys.items():
        table, dot, name = key.partition(".")
        if dot:
            below = plain.get(table)
            plain[table] = {**(below if isinstance(below, dict) else {}), name: value}
    return plain


PRESETS: Mapping[str, Arch] = _load()


def preset(name: str) -> Arch:
    """The preset of exactly this name.

    Raises: RecipeError that shows the nearest one.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)
    raise RecipeError(
        f"model.preset: there is no preset {name!r}.",
        why=f"the presets are {', '.join(PRESETS)}",
        fix=f'model.preset = "{nearest[0]}"',
    )


def arch_of(model: ModelSpec, kind: Literal["cpu", "gpu"]) -> Arch | None:
    """The shape that a recipe names, for this kind of device; None of the user's own module, and of an unknown kind.

    Raises: RecipeError; ModelError where model.hf is no model.
    """
    if isinstance(model.preset, PresetByDevice):
        return preset(model.preset.cpu if kind == "cpu" else model.preset.gpu)
    if model.preset is not None:
        return preset(model.preset)
    if model.config is not None:
        return from_config_json(model.config)
    if model.hf is not None:
        return _from_hf(model.hf)
    return None


def _from_hf(name: str) -> Arch | None:
    """Of a kind whose parts are known; None of any other, which transformers may build all the same."""
    folder = hub.find(name, weights=False)
    if not is_known(hub.config_of(folder)):
        return None
    # The hub's cache names a folder by a digest.
    return msgspec.structs.replace(from_config_json(folder), name=name.removeprefix(hub.PREFIX).rstrip("/"))
