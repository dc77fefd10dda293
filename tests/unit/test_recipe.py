"""Recipes: strict, complete, and compared key by key."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from shardwise.errors import RecipeError
from shardwise.inputs.recipe import (
    PlanRequest,
    PresetByDevice,
    Recipe,
    from_keys,
    known_keys,
    load,
    with_overrides,
)
from shardwise.inputs.recipe_changes import ALLOWED_CHANGES, changed

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
MINIMAL = """
[model]
preset = "decoder-2m"
[data]
text = ["a.txt"]
[batch]
global_batch = 8
[train]
steps = 10
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL)
    return path


def test_every_recipe_of_the_project_loads() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert QUICKSTART in recipes
    for path in recipes:
        assert load(path).run


def test_every_key_of_the_quickstart_is_kept() -> None:
    recipe = load(QUICKSTART)
    assert recipe.model.preset == PresetByDevice(cpu="decoder-2m", gpu="decoder-8m")
    assert recipe.optimizer.schedule.name == "cosine"
    assert recipe.optimizer.clip_norm == 1.0
    assert recipe.checkpoint.keep == 3


def test_a_recipe_comes_back_from_json(minimal: Path) -> None:
    for recipe in (load(QUICKSTART), load(minimal)):
        assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe


def test_how_a_model_is_split_comes_back_from_json(minimal: Path) -> None:
    recipe = load(
        minimal,
        [
            'model.roles={"blocks.*.mixer.up"="column", "blocks.*.mixer.down"="row"}',
            "model.sequence_parallel=false",
            "train.plan.pp=2",
            "train.plan.schedule=interleaved-zb",
            "train.plan.stages_per_rank=3",
            "train.guard_every_steps=0",
        ],
    )
    assert recipe.model.roles == {"blocks.*.mixer.up": "column", "blocks.*.mixer.down": "row"}
    assert recipe.model.sequence_parallel is False
    assert isinstance(recipe.train.plan, PlanRequest)
    assert (recipe.train.plan.schedule, recipe.train.plan.stages_per_rank) == ("interleaved-zb", 3)
    assert recipe.train.guard_every_steps == 0
    assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe


def test_how_a_model_is_split_is_planned_unless_said(minimal: Path) -> None:
    recipe = load(minimal)
    assert (recipe.model.roles, recipe.model.sequence_parallel, recipe.train.guard_every_steps) == ({}, "auto", 100)
    assert (PlanRequest().schedule, PlanRequest().stages_per_rank) == ("auto", "auto")


def test_the_run_defaults_to_a_name_of_its_own_and_never_to_the_working_directory(minimal: Path) -> None:
    assert load(minimal).run == "runs/mine"
    assert load(minimal, ["run="]).run == "runs/mine"
    assert from_keys(tomllib.loads(minimal.read_text("utf-8"))).run == "runs/recipe"


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("optimizer.lrr=1", "optimizer.lrr", "optimizer.lr"),
        ("optimzer.lr=1", "optimzer", "optimizer"),
        ("train.clip_norm=1.0", "train.clip_norm", "optimizer.clip_norm"),
        ("optimizer.schedule.warmup=3", "optimizer.schedule.warmup", "optimizer.schedule.warmup_steps"),
        ("train.plan.zer=3", "train.plan.zer", "train.plan.zero"),
        ("train.plan.stage_per_rank=2", "train.plan.stage_per_rank", "train.plan.stages_per_rank"),
        ("train.plan.shedule=gpipe", "train.plan.shedule", "train.plan.schedule"),
        ("model.role={}", "model.role", "model.roles"),
        ("train.guard_every=5", "train.guard_every", "train.guard_every_steps"),
        ("data.mixture=[{text=['a'], wight=2}]", "data.mixture[0].wight", "data.mixture.weight"),
    ],
)
def test_an_unknown_key_shows_its_full_path_the_file_and_the_nearest_key(
    minimal: Path, override: str, key: str, nearest: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        load(minimal, [override])
    assert f"unknown key {key}." in raised.value.what
    assert str(minimal) in raised.value.what
    assert nearest in raised.value.fix.split(",")[0].split()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=-1", "optimizer.lr"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("batch.micro_batch=0", "batch.micro_batch"),
        ("data.valid_fraction=1.0", "data.valid_fraction"),
        ("seed=none", "seed"),
        ("train.plan.zero=4", "train.plan.zero"),
        ("train.plan.schedule=none", "train.plan.schedule"),
        ("train.plan.stages_per_rank=0", "train.plan.stages_per_rank"),
        ("train.guard_every_steps=-1", "train.guard_every_steps"),
        ("model.sequence_parallel=1", "model.sequence_parallel"),
        ('model.roles={"blocks.*.up"="colum"}', "model.roles"),
        ("schema_version=2", "schema_version"),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_key(minimal: Path, override: str, key: str) -> None:
    with pytest.raises(RecipeError, match="is not valid") as raised:
        load(minimal, [override])
    assert key in raised.value.what


@pytest.mark.parametrize(
    "override",
    ["batch.tokens_per_step=64", "model.config=c.json", "train.epochs=1", "data.mixture=[{text=['b.txt']}]"],
)
def test_a_choice_of_exactly_one_is_not_made_twice(minimal: Path, override: str) -> None:
    with pytest.raises(RecipeError, match="exactly one") as raised:
        load(minimal, [override])
    assert "keep" in raised.value.fix


@pytest.mark.parametrize("table", ["model", "data", "batch", "train"])
def test_a_choice_that_is_not_made_shows_what_to_write(tmp_path: Path, table: str) -> None:
    path = tmp_path / "without.toml"
    lines = MINIMAL.splitlines()
    del lines[lines.index(f"[{table}]") + 1]
    path.write_text("\n".join(lines))
    with pytest.raises(RecipeError, match=rf"\[{table}\] has none of"):
        load(path)


def test_a_trainer_may_say_later_when_it_ends() -> None:
    keys = {"model": {"given": "m"}, "data": {"given": "d"}, "batch": {"global_batch": 4}}
    assert from_keys(keys).train.steps is None


@pytest.mark.parametrize("text", ["optimizer.lr", "=3", "optimizer.=3", ""])
def test_an_override_without_key_or_value_is_refused(minimal: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="is not KEY=VALUE"):
        load(minimal, [text])


def test_the_last_override_counts_and_the_keys_given_stay_as_they_are() -> None:
    keys = {"optimizer": {"lr": 1.0}}
    assert with_overrides(keys, ["optimizer.lr=2", "optimizer.lr=3", "seed=1"]) == {
        "optimizer": {"lr": 3},
        "seed": 1,
    }
    assert keys == {"optimizer": {"lr": 1.0}}


def test_a_whole_number_of_tokens_may_be_written_as_a_power_of_ten(minimal: Path) -> None:
    text = minimal.read_text().replace("steps = 10", "tokens = 2e9")
    minimal.write_text(text)
    assert load(minimal).train.tokens == 2_000_000_000


def test_a_missing_or_broken_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="There is no recipe"):
        load(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(broken)


def test_nothing_differs_between_a_recipe_and_itself(minimal: Path) -> None:
    assert changed(load(minimal), load(minimal)) == []


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("optimizer.lr=1e-5", True),
        ("optimizer.schedule.warmup_steps=5", True),
        ("train.steps=20", True),
        ("train.evaluate_every_steps=5", True),
        ("checkpoint.keep=1", True),
        ("data.workers=2", True),
        ("log=['wandb']", True),
        ("train.guard_every_steps=0", True),
        ("model.sequence_parallel=true", True),
        ("seed=1", False),
        ("model.preset=decoder-8m", False),
        ("data.text=['b.txt']", False),
        ("batch.global_batch=16", False),
        ("optimizer.weight_decay=0.2", False),
        ("train.precision=bf16", False),
    ],
)
def test_a_run_may_change_how_fast_and_how_long_but_not_what_is_trained(
    minimal: Path, override: str, allowed: bool
) -> None:
    changes = changed(load(minimal), load(minimal, [override]))
    key = override.partition("=")[0]
    assert [(change.key, change.allowed) for change in changes] == [(key, allowed)]


def test_what_may_change_is_made_of_known_keys() -> None:
    assert set(ALLOWED_CHANGES) <= set(known_keys())
