"""Arch: parameters and FLOPs from the shape alone."""

import json
from pathlib import Path

import msgspec
import pytest

from shardwise.errors import ModelError, RecipeError
from shardwise.inputs.arch import (
    PRESETS,
    Arch,
    Latent,
    arch_of,
    from_config_json,
    preset,
    require_buildable,
    shape_problem,
)
from shardwise.inputs.recipe import ModelSpec, PresetByDevice

LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
}
LLAMA_3_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def test_published_models_have_their_published_number_of_parameters() -> None:
    assert from_config_json(LLAMA_7B).parameters() == 6_738_415_616
    assert from_config_json(LLAMA_3_70B).parameters() == 70_553_706_496


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_can_be_built_and_comes_back_from_json(name: str) -> None:
    arch = preset(name)
    assert arch.name == name
    assert shape_problem(arch) == ""
    assert msgspec.json.decode(msgspec.json.encode(arch), type=Arch) == arch


def test_presets_have_the_size_that_the_quickstart_promises() -> None:
    assert 1e6 <= preset("decoder-2m").parameters() <= 2e6
    assert 5e6 <= preset("decoder-8m").parameters() <= 10e6


def test_presets_hold_byte_tokens_in_aligned_rows() -> None:
    for arch in (preset("decoder-2m"), preset("decoder-8m")):
        assert arch.vocab_size >= 257
        assert arch.vocab_size % 8 == 0


def test_an_unknown_preset_shows_the_nearest() -> None:
    with pytest.raises(RecipeError, match="decoder-2M") as raised:
        preset("decoder-2M")
    assert raised.value.fix == 'model.preset = "decoder-2m"'


def test_tying_saves_one_embedding_and_no_flops() -> None:
    arch = preset("decoder-8m")
    tied = msgspec.structs.replace(arch, tied_embeddings=True)
    assert arch.parameters() - tied.parameters() == arch.vocab_size * arch.hidden_size
    assert arch.flops_per_token(256) == tied.flops_per_token(256)


def test_flops_grow_linearly_with_the_sequence_from_six_a_matmul_parameter() -> None:
    arch = preset("decoder-2m")
    at_zero, at_one, at_two = (arch.flops_per_token(length) for length in (0, 1, 2))
    assert at_zero == 6 * arch.matmul_parameters()
    assert at_two - at_one == at_one - at_zero == 6 * arch.num_layers * arch.num_heads * arch.head_dim


def test_the_parameters_are_those_of_matmuls_lookup_and_norms() -> None:
    arch = preset("decoder-8m")
    norms = (2 * arch.num_layers + 1) * arch.hidden_size
    assert arch.parameters() == arch.matmul_parameters() + arch.vocab_size * arch.hidden_size + norms


def test_a_config_file_or_its_folder_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_7B))
    assert from_config_json(path) == from_config_json(tmp_path)
    assert from_config_json(path).head_dim == 128


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"num_attention_heads": 24, "hidden_size": 4096}, "not valid"),
        ({"hidden_size": None}, "not valid"),
        ({"num_attention_heads": 3, "head_dim": 128, "num_key_value_heads": 2}, "cannot be built"),
    ],
)
def test_a_config_of_another_shape_is_refused_with_a_fix(change: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError, match=said) as raised:
        from_config_json({**LLAMA_7B, **change})
    assert raised.value.fix


def test_a_missing_key_or_file_is_named(tmp_path: Path) -> None:
    without = {key: value for key, value in LLAMA_7B.items() if key != "vocab_size"}
    with pytest.raises(RecipeError, match="vocab_size"):
        from_config_json(without)
    with pytest.raises(RecipeError, match="does not exist"):
        from_config_json(tmp_path / "config.json")


def test_the_device_chooses_between_two_presets() -> None:
    spec = ModelSpec(preset=PresetByDevice(cpu="decoder-2m", gpu="decoder-8m"))
    assert arch_of(spec, "cpu") == preset("decoder-2m")
    assert arch_of(spec, "gpu") == preset("decoder-8m")
    assert arch_of(ModelSpec(factory="my.module:build"), "cpu") is None


def test_a_model_of_hugging_face_is_read_from_its_config_and_one_of_an_unknown_kind_has_no_shape(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    found = arch_of(ModelSpec(hf=f"hf:{tmp_path}"), "gpu")
    assert found is not None and found.name == str(tmp_path)
    assert msgspec.structs.replace(found, name="") == msgspec.structs.replace(from_config_json(LLAMA_7B), name="")
    (tmp_path / "config.json").write_text('{"model_type": "a new one"}')
    assert arch_of(ModelSpec(hf=str(tmp_path)), "gpu") is None
    with pytest.raises(ModelError, match="no folder"):
        arch_of(ModelSpec(hf="no-such-folder"), "gpu")


def test_a_shape_that_the_decoder_has_not_is_refused_when_it_is_built() -> None:
    latent = msgspec.structs.replace(preset("decoder-2m"), latent=Latent(8, 8, 4, 8))
    assert "latent attention" in latent.engine_problem()
    with pytest.raises(ModelError, match="cannot build"):
        require_buildable(latent)


MIXTRAL = {**LLAMA_7B, "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8,
           "num_experts_per_tok": 2}  # fmt: skip


def test_a_balancing_loss_that_a_config_names_is_left_out_and_said_so() -> None:
    plain = from_config_json(MIXTRAL)
    assert plain.engine_problem() == "" and "left out" not in plain.left_out()[0]
    named = from_config_json({**MIXTRAL, "router_aux_loss_coef": 0.02, "output_router_logits": False})
    assert named.engine_problem() == "" and "0.02 in the model's config is left out" in named.left_out()[0]
    assert preset("decoder-8m").left_out() == ()


def test_a_balancing_loss_that_a_config_asks_for_is_refused() -> None:
    asked = from_config_json({**MIXTRAL, "router_aux_loss_coef": 0.02, "output_router_logits": True})
    assert "balancing loss" in asked.engine_problem()
    assert from_config_json({**MIXTRAL, "router_aux_loss_coef": 0, "output_router_logits": True}).engine_problem() == ""
    jittered = from_config_json({**MIXTRAL, "router_jitter_noise": 0.1})
    assert "jittered" in jittered.engine_problem()
    with pytest.raises(RecipeError, match="router_aux_loss_coef"):
        from_config_json({**MIXTRAL, "router_aux_loss_coef": "much"})


def test_old_json_is_read_with_the_defaults_of_llama() -> None:
    known = msgspec.to_builtins(preset("decoder-8m"))
    old = {key: known[key] for key in list(known)[:14]}
    assert msgspec.convert(old, Arch) == preset("decoder-8m")
    assert preset("decoder-8m").engine_problem() == ""
