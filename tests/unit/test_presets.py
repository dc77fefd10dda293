"""The public shapes: their published sizes, and config.json files of every kind that is read."""

from typing import Any

import pytest

from shardwise.errors import RecipeError
from shardwise.inputs.arch import PRESETS, Arch, Experts, Latent, from_config_json, preset, shape_problem
from shardwise.inputs.arch.config_json import READERS

# Totals without prediction layers. Source: the number of parameters on each model's page, counted by its checkpoint;
# GPT-3 and DeepSeek by their papers (175 B, 236 B, 15.7 B, 671 B), which round.
PUBLISHED: dict[str, int] = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-3-mini": 3_821_079_552,
    "pythia-6.9b": 6_857_302_016,
    "gpt-neox-20b": 20_554_567_680,
}
ROUNDED: dict[str, float] = {
    "gpt-3-1.3b": 1.32e9,
    "gpt-3-6.7b": 6.7e9,
    "gpt-3-13b": 13.0e9,
    "gpt-3-175b": 175e9,
    "deepseek-v2": 236e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
}
OURS = {"decoder-2m", "decoder-8m"}


def size(arch: Arch) -> int:
    return arch.parameters() - arch.prediction_parameters()


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_shape_has_its_published_number_of_parameters(name: str) -> None:
    assert size(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", list(ROUNDED))
def test_a_shape_whose_paper_rounds_is_within_2_percent(name: str) -> None:
    """1 %, but for what a paper prints with two digits (13 B is 12.85)."""
    assert size(preset(name)) == pytest.approx(ROUNDED[name], rel=0.012 if name == "gpt-3-13b" else 0.01)


def test_every_preset_is_held_against_something() -> None:
    assert set(PRESETS) == OURS | set(PUBLISHED) | set(ROUNDED)


@pytest.mark.parametrize(
    ("name", "billions", "within"),
    [
        ("mixtral-8x7b", 12.9, 0.01),
        ("mixtral-8x22b", 39, 0.01),
        ("qwen3-30b-a3b", 3.3, 0.02),
        ("qwen3-235b-a22b", 22, 0.01),
        ("deepseek-v2", 21, 0.02),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float, within: float) -> None:
    """Source: the models' own papers and pages; `within` is their rounding."""
    assert preset(name).active_parameters() == pytest.approx(billions * 1e9, rel=within)


def test_deepseek_v3_is_counted_to_its_parts() -> None:
    """Source: README_WEIGHTS of DeepSeek-V3: 671 B in all, 36.7 B active with 0.9 B each of embedding and head; the
    prediction module has 11.5 B of its own; 671,026,419,200 counts the 58 x 256 biases that balance the load.
    """
    arch = preset("deepseek-v3")
    assert size(arch) + 58 * 256 == 671_026_419_200
    alone = Arch(**{**{name: getattr(arch, name) for name in Arch.__struct_fields__}, "prediction_layers": 0})
    assert alone.active_parameters() == pytest.approx(37.5e9, rel=0.01)
    assert arch.prediction_parameters() == pytest.approx(11.5e9, rel=0.01)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_shape_is_the_sum_of_its_layers(name: str) -> None:
    arch = preset(name)
    assert shape_problem(arch) == ""
    assert arch.dense_layers + arch.moe_layers == arch.num_layers
    blocks = sum(arch.layer_parameters(layer) for layer in range(arch.num_layers))
    head = 0 if arch.tied_embeddings else arch.vocab_size * arch.hidden_size
    final = arch.hidden_size * (2 if arch.norm == "layer" else 1)
    assert size(arch) == arch.embedding_parameters() + blocks + head + final
    assert arch.active_parameters() <= arch.parameters()
    assert arch.flops_per_token(0) == 6 * arch.matmul_parameters() if not arch.sliding_window else True


def test_a_window_never_adds_work_and_a_long_one_changes_nothing() -> None:
    whole = preset("mistral-7b-v0.3")
    for length in (128, 4096, 65536):
        before = whole.flops_per_token(length)
        for window in (1, 512, 4096, length):
            changed = {name: getattr(whole, name) for name in Arch.__struct_fields__}
            windowed = Arch(**{**changed, "sliding_window": window, "full_attention_every": 0})
            assert windowed.flops_per_token(length) <= before
            if window >= length:
                assert windowed.flops_per_token(length) == before


BASE = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_LIKE = {**BASE, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 32768}
QWEN3 = {
    "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 48, "intermediate_size": 6144, "max_position_embeddings": 40960, "rope_theta": 1e6,
}  # fmt: skip
DEEPSEEK = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
    "rope_scaling": {"type": "yarn", "factor": 40}, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
}  # fmt: skip
GEMMA = {"head_dim": 256, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"}
# The keys of published files that matter, by what they should be counted as (None: by the number after it).
FILES: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {**LLAMA_LIKE, "vocab_size": 128256, "rope_theta": 5e5}, PUBLISHED["llama-3-8b"]),
    ("mistral", {**LLAMA_LIKE, "sliding_window": 4096}, PUBLISHED["mistral-7b"]),
    ("mistral", {**LLAMA_LIKE, "vocab_size": 32768, "sliding_window": None}, PUBLISHED["mistral-7b-v0.3"]),
    ("mixtral", {**LLAMA_LIKE, "num_local_experts": 8, "num_experts_per_tok": 2}, PUBLISHED["mixtral-8x7b"]),
    (
        "qwen2",
        {**LLAMA_LIKE, "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "use_sliding_window": False, "max_window_layers": 28,
         "sliding_window": 131072},
        PUBLISHED["qwen2.5-7b"],
    ),
    (
        "qwen2_moe",  # Qwen1.5-MoE-A2.7B: 14,315,784,192 on its page
        {**LLAMA_LIKE, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
        14_315_784_192,
    ),
    (
        "qwen3",
        {**QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288},
        PUBLISHED["qwen3-8b"],
    ),
    (
        "qwen3_moe",
        {**QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []},
        PUBLISHED["qwen3-30b-a3b"],
    ),
    ("gpt2", {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None},
     PUBLISHED["gpt2-small"]),
    (
        "gpt_neox",
        {"vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
         "intermediate_size": 24576, "max_position_embeddings": 2048, "rotary_pct": 0.25},
        PUBLISHED["gpt-neox-20b"],
    ),
    (
        "gemma",  # google/gemma-2b: 2,506,172,416 on its page
        {**GEMMA, "vocab_size": 256000, "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
         "num_key_value_heads": 1, "intermediate_size": 16384, "max_position_embeddings": 8192},
        2_506_172_416,
    ),
    (
        "gemma2",
        {**GEMMA, "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
         "intermediate_size": 9216, "sliding_window": 4096, "max_position_embeddings": 8192},
        PUBLISHED["gemma-2-2b"],
    ),
    (
        "gemma3_text",
        {**GEMMA, "vocab_size": 262144, "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
         "num_key_value_heads": 1, "intermediate_size": 6912, "sliding_window": 512, "sliding_window_pattern": 6,
         "max_position_embeddings": 32768},
        PUBLISHED["gemma-3-1b"],
    ),
    (
        "deepseek_v2",  # V2-Lite
        {**DEEPSEEK, "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 10944, "q_lora_rank": None, "n_routed_experts": 64,
         "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1},
        15_706_484_224,
    ),
    (
        "deepseek_v3",
        {**DEEPSEEK, "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
         "num_key_value_heads": 128, "intermediate_size": 18432, "q_lora_rank": 1536, "n_routed_experts": 256,
         "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
         "num_nextn_predict_layers": 1},
        671_026_419_200 - 58 * 256,
    ),
    (
        "phi3",
        {**BASE, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
         "sliding_window": 2047},
        PUBLISHED["phi-3-mini"],
    ),
    (
        "olmo2",  # allenai/OLMo-2-1124-7B: 7,298,617,344 on its page
        {**BASE, "vocab_size": 100352, "intermediate_size": 11008, "max_position_embeddings": 4096},
        7_298_617_344,
    ),
    (
        "granite",  # ibm-granite/granite-3.0-8b-base: 8,170,848,256 on its page
        {**LLAMA_LIKE, "vocab_size": 49155, "num_hidden_layers": 40, "intermediate_size": 12800,
         "tie_word_embeddings": True, "embedding_multiplier": 12.0},
        8_170_848_256,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "parameters"), FILES, ids=[kind for kind, *_ in FILES])
def test_a_published_file_is_counted_exactly(kind: str, config: dict[str, Any], parameters: int) -> None:
    assert size(from_config_json({"model_type": kind, **config})) == parameters


def test_every_kind_that_is_read_has_a_file_here() -> None:
    assert {kind for kind, *_ in FILES} | {"shardwise-decoder"} == set(READERS)


@pytest.mark.parametrize(("kind", "config", "parameters"), FILES, ids=[kind for kind, *_ in FILES])
def test_a_missing_or_wrong_key_is_an_error_that_names_it(kind: str, config: dict[str, Any], parameters: int) -> None:
    """Each key in turn is left out, and is nonsense: another count or an error with a fix, never anything else."""
    for key in config:
        nonsense: list[dict[str, Any]] = [{}, {key: "x"}, {key: -1}, {key: []}]
        for wrong in nonsense:
            broken = {"model_type": kind, **{name: value for name, value in config.items() if name != key}, **wrong}
            try:
                from_config_json(broken)
            except RecipeError as error:
                assert error.fix
    sizes = ("vocab_size", "intermediate_size", "num_local_experts", "num_experts", "kv_lora_rank", "n_embd")
    for key in [key for key in sizes if key in config]:
        with pytest.raises(RecipeError, match=key):
            from_config_json({"model_type": kind, **{name: value for name, value in config.items() if name != key}})


def test_what_an_arch_cannot_say_is_refused_with_a_fix() -> None:
    windows = {"use_sliding_window": True, "max_window_layers": 10, "sliding_window": 4096}
    with pytest.raises(RecipeError, match="layers 10 to 31") as raised:
        from_config_json({"model_type": "qwen2", **LLAMA_LIKE, **windows})
    assert "max_window_layers = 0" in raised.value.fix
    assert from_config_json({"model_type": "qwen2", **LLAMA_LIKE, **windows, "max_window_layers": 0}).sliding_window
    with pytest.raises(RecipeError, match="gemma3") as raised:
        from_config_json({"model_type": "gemma3", "text_config": {}})
    assert "text_config" in raised.value.fix


def test_the_arithmetic_that_changes_no_count_is_told() -> None:
    scaled = from_config_json({"model_type": "llama", **LLAMA_LIKE, "rope_scaling": {"rope_type": "llama3"}})
    assert scaled.specials == ("scaled rotary positions",)
    assert "scaled rotary positions" in scaled.engine_problem()
    plain = from_config_json({"model_type": "llama", **LLAMA_LIKE, "rope_scaling": None})
    assert plain.engine_problem() == ""


def test_the_layers_that_gemma_3_lists_are_its_pattern() -> None:
    config = next(config for kind, config, _ in FILES if kind == "gemma3_text")
    listed = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(26)]
    assert from_config_json({"model_type": "gemma3_text", **config, "layer_types": listed}).full_attention_layers == 4
    with pytest.raises(RecipeError, match="equal distances"):
        from_config_json({"model_type": "gemma3_text", **config, "layer_types": listed[1:] + listed[:1]})


def test_a_shape_without_sense_is_found() -> None:
    values = {name: getattr(preset("decoder-2m"), name) for name in Arch.__struct_fields__}
    assert "experts" in shape_problem(Arch(**{**values, "experts": Experts(count=2, per_token=3, ffn_size=8)}))
    assert "dense" in shape_problem(Arch(**{**values, "experts": Experts(2, 1, 8, dense_layers=9)}))
    assert Latent(8, 8, 8, 8).query_rank == 0
