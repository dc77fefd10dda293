"""What is trained: names of a shape's parameters, patterns that freeze them, adapters; and fp8, planned only."""

import msgspec
import pytest
import torch

from shardwise.errors import RecipeError
from shardwise.inputs.arch import PRESETS, Arch, preset
from shardwise.inputs.arch.names import named_sizes, trained_share
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import LoraSpec, Recipe, TrainableSpec, from_keys, with_overrides
from shardwise.inputs.recipe_changes import changed
from shardwise.models.decoder import Decoder
from shardwise.plan import subject

KEYS = {
    "model": {"preset": "llama-3-8b"},
    "data": {"text": ["a.txt"], "sequence_length": 4096},
    "batch": {"global_batch": 64},
    "train": {"steps": 10},
    "run": "runs/test",
}


def recipe(*overrides: str) -> Recipe:
    return from_keys(with_overrides(KEYS, overrides))


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_names_hold_every_parameter_once(name: str) -> None:
    assert sum(named_sizes(preset(name)).values()) == preset(name).parameters()


@pytest.mark.parametrize("change", [{}, {"tied_embeddings": True}, {"gated_ffn": False}])
def test_the_names_are_those_of_our_decoder(change: dict[str, bool]) -> None:
    arch = msgspec.structs.replace(preset("decoder-8m"), **change)
    with torch.device("meta"):
        module = Decoder(arch)
    assert named_sizes(arch) == {name: parameter.numel() for name, parameter in module.named_parameters()}


def test_patterns_freeze_what_they_name_and_twice_is_once() -> None:
    arch = preset("decoder-8m")
    whole = arch.parameters()
    assert trained_share(arch, ["blocks.0.*"]) * whole == pytest.approx(whole - arch.block_parameters(), abs=0.5)
    assert trained_share(arch, ["blocks.0.*", "blocks.*"]) == trained_share(arch, ["blocks.*"])
    assert trained_share(arch, ["blocks.*"]) < trained_share(arch, ["blocks.*.ffn.*"]) < 1


@pytest.mark.parametrize("name", ["decoder-8m", "mixtral-8x7b", "deepseek-v3", "gpt2-small"])
def test_a_pattern_of_nothing_shows_a_name_that_is_one(name: str) -> None:
    arch: Arch = preset(name)
    with pytest.raises(RecipeError, match="no parameter") as raised:
        trained_share(arch, ["blocks.0.attn"])
    assert trained_share(arch, [raised.value.fix.split('"')[1]]) < 1
    with pytest.raises(RecipeError, match="nothing to train"):
        trained_share(arch, ["*"])


def test_what_is_trained_is_read_from_a_recipe_and_comes_back_from_json() -> None:
    lora = recipe("model.trainable={lora={rank=16, targets=['q_proj','o_proj'], base_bits=4}}")
    assert lora.model.trainable == TrainableSpec(lora=LoraSpec(16, ("q_proj", "o_proj"), base_bits=4))
    frozen = recipe("model.trainable={frozen=['embed_tokens.*']}")
    for one in (lora, frozen, recipe()):
        assert msgspec.json.decode(msgspec.json.encode(one), type=Recipe) == one
    assert [(change.key, change.allowed) for change in changed(recipe(), frozen)] == [
        ("model.trainable", False),
        ("model.trainable.frozen", False),
        ("model.trainable.lora", False),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        "{}",
        "{frozen=['a'], lora={rank=8}}",
        "{lora={rank=0}}",
        "{lora={}}",
        "{frosen=['a']}",
        "half",
    ],
)
def test_what_cannot_be_trained_is_an_error_with_a_fix(wrong: str) -> None:
    with pytest.raises(RecipeError, match="trainable") as raised:
        recipe(f"model.trainable={wrong}")
    assert raised.value.fix


def test_the_plan_counts_what_is_trained_and_says_that_it_is_planned_only() -> None:
    arch, cluster = preset("llama-3-8b"), parse_cluster("8xH100")
    full = subject.of(recipe(), arch, cluster)
    assert (full.workload.trainable.kind, full.runs, full.planned_only) == ("full", True, ())
    lora = subject.of(recipe("model.trainable={lora={rank=8, base_bits=4}}"), arch, cluster)
    assert (lora.workload.trainable.targets, lora.workload.trainable.base_bytes) == (("query", "value"), 0.5)
    frozen = subject.of(recipe("model.trainable={frozen=['blocks.*']}"), arch, cluster)
    assert frozen.workload.trainable.share == trained_share(arch, ["blocks.*"])
    fp8 = subject.of(recipe("train.precision=fp8"), arch, cluster)
    assert fp8.workload.precision == "fp8"
    for one in (lora, frozen, fp8):
        assert not one.runs and one.planned_only
