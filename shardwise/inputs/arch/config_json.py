"""An Arch from a Hugging Face config.json. What cannot be counted is an error that names the key, never a guess."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.arch.shape import Arch, shape_problem

Config = Mapping[str, object]
Keys = dict[str, object]


def from_config_json(source: str | Path | Config) -> Arch:
    """The Arch that a `config.json` (a path, its folder, or its parsed keys) describes.

    Raises: RecipeError where the file is missing, a key is absent or wrong, or the model_type is not known.
    """
    name = "config"
    if isinstance(source, Mapping):
        config = source
    else:
        path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        # A config.json is named by its folder, any other file by itself.
        config, name = _read_json(path), (path.parent.name if path.stem == "config" else "") or path.stem
    name = str(config.get("name", name))
    keys = {"name": name, **_reader(config)(config)}
    try:
        arch = msgspec.convert(keys, Arch)
    except msgspec.ValidationError as error:
        raise RecipeError(f"config.json of {name!r} is not valid.", why=str(error), fix="correct this key") from None
    problem = shape_problem(arch)
    if problem:
        raise RecipeError(f"The config of {arch.name!r} cannot be built.", why=problem, fix="correct config.json")
    return arch


def is_known(config: Config) -> bool:
    """Whether this model_type can be counted."""
    return config.get("model_type") in READERS


def _read_json(path: Path) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"model.config: {path} does not exist.", fix="give the path of a config.json") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.config: {path} cannot be read.", why=str(error), fix="give a JSON file") from None
    if not isinstance(config, dict):
        raise RecipeError(f"model.config: {path} does not hold an object.", fix="give a Hugging Face config.json")
    return config


def _reader(config: Config) -> Callable[[Config], Keys]:
    kind = config.get("model_type", "missing")
    if isinstance(kind, str) and kind in READERS:
        return READERS[kind]
    inner = config.get("text_config")
    raise RecipeError(
        f"model_type {kind!r} is not a shape that Shardwise can count and build yet.",
        why=f"known: {', '.join(READERS)}",
        fix="give its text_config as a file of its own: the language model is counted alone"
        if isinstance(inner, Mapping)
        else 'use one of these, or hand over your own module with model.factory = "my.module:build"',
    )


def whole(config: Config, key: str, *otherwise: int) -> int:
    """The whole number under this key; `otherwise` where it is absent or null. Raises: RecipeError."""
    value = config.get(key)
    if value is None and otherwise:
        return otherwise[0]
    if value is None and key not in config:
        raise RecipeError(f"config.json has no {key!r}.", fix=f"add {key} to config.json")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RecipeError(
            f"config.json is not valid: {key} = {value!r}.", why="it is not a count", fix=f"correct {key}"
        )
    return value


def _specials(config: Config, activation: str = "silu") -> list[str]:
    """What the arithmetic has besides that changes no count."""
    found = []
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        found.append("scaled rotary positions")
    if config.get("partial_rotary_factor", 1.0) not in (1, None):
        found.append("partly rotary heads")
    used = config.get("hidden_act") or config.get("hidden_activation") or activation
    if used != "silu":
        found.append(f"{used} gates")
    return found


def _common(config: Config, *, kv_heads: bool = True, positions: bool = True, tied: bool = False) -> Keys:
    """Keys that the Llama-like types share. `kv_heads`, `positions`: these have no default of the type's own."""
    heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    rope = config.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    return {
        "vocab_size": whole(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": whole(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": whole(config, "num_key_value_heads", *(() if kv_heads else (heads,))),
        "head_dim": whole(config, "head_dim", _divided(hidden, heads)),
        "ffn_size": whole(config, "intermediate_size"),
        "max_sequence_length": whole(config, "max_position_embeddings", *(() if positions else (2048,))),
        "tied_embeddings": config.get("tie_word_embeddings", tied),
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": theta or config.get("rope_theta") or 10000.0,
        "dropout": config.get("attention_dropout") or 0.0,
        "specials": _specials(config),
    }


def _divided(hidden: int, heads: int) -> int:
    """The width of a head where no key says it; 0, which no Arch accepts, where it does not come out even."""
    return hidden // heads if heads and hidden % heads == 0 else 0


def _llama(config: Config) -> Keys:
    biased = {"attention_bias": bool(config.get("attention_bias")), "output_bias": bool(config.get("attention_bias"))}
    keys = _common(config, kv_heads=False, positions=False)
    return {**keys, **biased, "mlp_bias": bool(config.get("mlp_bias"))}


def _windowed(config: Config) -> Keys:
    """Every layer has the window, where there is one."""
    window = whole(config, "sliding_window", 0)
    return {"sliding_window": window, "full_attention_every": 0} if window else {}


def _mistral(config: Config) -> Keys:
    return {**_common(config), **_windowed(config)}


def _mixtral(config: Config) -> Keys:
    width = whole(config, "intermediate_size")
    count, each = whole(config, "num_local_experts"), whole(config, "num_experts_per_tok")
    experts = {"count": count, "per_token": each, "ffn_size": width, **_balance(config)}
    jitter = ["jittered inputs of routers"] if config.get("router_jitter_noise") else []
    return {**_mistral(config), "experts": experts, "specials": [*_specials(config), *_balanced(config), *jitter]}


def _balance(config: Config) -> Keys:
    """The coefficient of a balancing loss that the file gives; 0 where it gives none, whatever transformers' own is."""
    return {"balance_coefficient": float(_number(config, "router_aux_loss_coef", 0.0))}


def _balanced(config: Config) -> list[str]:
    """transformers adds the balancing loss where the file says output_router_logits, and by its default nowhere."""
    asked = bool(config.get("output_router_logits")) and config.get("router_aux_loss_coef", 1) != 0
    return ["a balancing loss of its routers (output_router_logits)"] if asked else []


def _number(config: Config, key: str, otherwise: float) -> float:
    value = config.get(key)
    if value is None:
        return otherwise
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        why = "it is not a number of zero or more"
        raise RecipeError(f"config.json is not valid: {key} = {value!r}.", why=why, fix=f"correct {key}")
    return value


def _qwen2(config: Config) -> Keys:
    return {**_common(config), **_upper_window(config), "attention_bias": True}


def _upper_window(config: Config) -> Keys:
    """Qwen's window holds from layer max_window_layers on: in all, or in none, is what an Arch can say."""
    layers = whole(config, "num_hidden_layers")
    first = whole(config, "max_window_layers", layers)
    if not config.get("use_sliding_window") or first >= layers:
        return {}
    if first:
        raise RecipeError(
            f"config.json has a window in layers {first} to {layers - 1} alone.",
            why="an Arch has one in all layers, in none, or whole layers at equal distances",
            fix=f"max_window_layers = 0, or use_sliding_window = false (counts {first} of {layers} layers as they are)",
        )
    return _windowed(config)


def _qwen3(config: Config) -> Keys:
    biased = bool(config.get("attention_bias"))
    keys = {**_common(config), **_upper_window(config), "qk_norm": True}
    return {**keys, "attention_bias": biased, "output_bias": biased}


def _qwen_experts(config: Config) -> Keys:
    only = config.get("mlp_only_layers") or []
    step = whole(config, "decoder_sparse_step", 1)
    if step != 1 or not isinstance(only, list) or only != list(range(len(only))):
        raise RecipeError(
            f"config.json has dense layers among the others: mlp_only_layers {only}, decoder_sparse_step {step}.",
            why="an Arch counts dense layers at the start alone",
            fix="decoder_sparse_step = 1 and mlp_only_layers = [] or [0, 1, ...]",
        )
    # transformers 5 writes the number of experts under the name that all families share there.
    count = "num_local_experts" if "num_experts" not in config and "num_local_experts" in config else "num_experts"
    names = {"count": count, "per_token": "num_experts_per_tok", "ffn_size": "moe_intermediate_size"}
    sizes = {key: whole(config, name) for key, name in names.items()}
    # transformers' default for both families: the weights are what softmax gave.
    told = {"renormalised": config.get("norm_topk_prob", False), **_balance(config)}
    return {**sizes, **told, "dense_layers": len(only)}


def _qwen3_moe(config: Config) -> Keys:
    specials = [*_specials(config), *_balanced(config)]
    return {**_qwen3(config), "experts": _qwen_experts(config), "specials": specials}


def _qwen2_moe(config: Config) -> Keys:
    shared = {"shared_ffn_size": whole(config, "shared_expert_intermediate_size"), "shared_gate": True}
    specials = [*_specials(config), *_balanced(config)]
    return {**_qwen2(config), "experts": {**_qwen_experts(config), **shared}, "specials": specials}


_BIASED: Keys = {
    "attention_bias": True, "output_bias": True, "mlp_bias": True, "norm": "layer", "gated_ffn": False,
}  # fmt: skip


def _gpt2(config: Config) -> Keys:
    hidden, heads = whole(config, "n_embd"), whole(config, "n_head")
    return {
        **_BIASED,
        "position": "learned",
        "vocab_size": whole(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": whole(config, "n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _divided(hidden, heads),
        "ffn_size": whole(config, "n_inner", 4 * hidden),
        "max_sequence_length": whole(config, "n_positions"),
        "tied_embeddings": config.get("tie_word_embeddings", True),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "dropout": config.get("resid_pdrop") or 0.0,
    }


def _gpt_neox(config: Config) -> Keys:
    biased = config.get("attention_bias", True)
    specials = ["partly rotary heads"] if config.get("rotary_pct", 0.25) != 1 else []
    if config.get("use_parallel_residual", True):
        specials.append("parallel attention and feed-forward")
    theta = config.get("rotary_emb_base") or 10000.0
    keys = {**_common(config, kv_heads=False), **_BIASED, "attention_bias": biased, "output_bias": biased}
    return {**keys, "specials": specials, "rope_theta": theta, "norm_eps": config.get("layer_norm_eps", 1e-5)}


def _gemma(config: Config) -> Keys:
    whole(config, "head_dim")  # the type's own is not hidden_size / num_attention_heads
    biased = bool(config.get("attention_bias"))
    specials = [*_specials(config, "gelu"), "scaled embeddings"]
    keys = {**_common(config, tied=True), "attention_bias": biased, "output_bias": biased, "specials": specials}
    return {**keys, "norm_eps": config.get("rms_norm_eps", 1e-6)}


def _gemma2(config: Config) -> Keys:
    keys = _gemma(config)
    specials = [*_specials(config, "gelu"), "scaled embeddings", "capped logits"]
    window = {"sliding_window": whole(config, "sliding_window"), "full_attention_every": 2}
    return {**keys, **window, "norms_per_block": 4, "specials": specials}


def _gemma3(config: Config) -> Keys:
    keys = _gemma(config)
    specials = [*_specials(config, "gelu"), "scaled embeddings", "a second rotary base for windows"]
    window = {"sliding_window": whole(config, "sliding_window"), "full_attention_every": _gemma3_pattern(config)}
    return {**keys, **window, "norms_per_block": 4, "qk_norm": True, "specials": specials}


def _gemma3_pattern(config: Config) -> int:
    """One layer in so many is whole; newer files list the layers one by one."""
    listed = config.get("layer_types")
    if not isinstance(listed, list):
        return whole(config, "sliding_window_pattern", whole(config, "_sliding_window_pattern", 6))
    full = [index + 1 for index, kind in enumerate(listed) if kind == "full_attention"]
    every = full[0] if full else 0
    if full and full != list(range(every, len(listed) + 1, every)):
        raise RecipeError(
            f"config.json has whole layers at {full}.",
            why="an Arch has them at equal distances",
            fix="correct layer_types",
        )
    return every


def _deepseek(config: Config) -> Keys:
    if config.get("attention_bias"):
        raise RecipeError(
            "config.json has attention_bias with latent attention.",
            why="no published model has it, and it is not counted",
            fix="attention_bias = false",
        )
    ranks = {"nope_head_dim": "qk_nope_head_dim", "rope_head_dim": "qk_rope_head_dim", "value_head_dim": "v_head_dim"}
    latent: Keys = {key: whole(config, name) for key, name in ranks.items()}
    latent |= {"query_rank": whole(config, "q_lora_rank", 0), "key_value_rank": whole(config, "kv_lora_rank")}
    head = whole(config, "qk_nope_head_dim") + whole(config, "qk_rope_head_dim")
    keys = {**_common(config, kv_heads=False), "head_dim": head, "latent": latent}
    keys["prediction_layers"] = whole(config, "num_nextn_predict_layers", 0)
    if config.get("n_routed_experts") is None:
        return keys
    grouped = ["experts chosen by groups"] if whole(config, "n_group", 1) > 1 else []
    return {**keys, "experts": _deepseek_experts(config), "specials": [*_specials(config), *grouped]}


def _deepseek_experts(config: Config) -> Keys:
    if whole(config, "moe_layer_freq", 1) != 1:
        raise RecipeError(
            f"config.json has moe_layer_freq = {config['moe_layer_freq']}.",
            why="an Arch counts dense layers at the start alone",
            fix="moe_layer_freq = 1",
        )
    width = whole(config, "moe_intermediate_size")
    third = config["model_type"] == "deepseek_v3"  # its scores have no key of their own in transformers
    return {
        "scoring": config.get("scoring_func", "sigmoid" if third else "softmax"),
        "renormalised": config.get("norm_topk_prob", third),
        "scale": _number(config, "routed_scaling_factor", 2.5 if third else 1.0),
        "balance_coefficient": float(_number(config, "aux_loss_alpha", 0.0)),
        "count": whole(config, "n_routed_experts"),
        "per_token": whole(config, "num_experts_per_tok"),
        "ffn_size": width,
        "shared_ffn_size": width * whole(config, "n_shared_experts", 0),
        "dense_layers": whole(config, "first_k_dense_replace"),
    }


def _phi3(config: Config) -> Keys:
    return {**_common(config, kv_heads=False), **_windowed(config)}


def _olmo2(config: Config) -> Keys:
    biased = bool(config.get("attention_bias"))
    keys = {**_common(config, kv_heads=False), "attention_bias": biased, "output_bias": biased}
    specials = [*_specials(config), "norms behind attention and feed-forward"]
    return {**keys, "qk_norm": True, "qk_norm_over": "width", "specials": specials}


def _granite(config: Config) -> Keys:
    scales = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    scaled = ["scaled residuals and logits"] if any(config.get(key) is not None for key in scales) else []
    return {**_llama(config), "specials": [*_specials(config), *scaled]}


READERS: Mapping[str, Callable[[Config], Keys]] = {
    "shardwise-decoder": _llama,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
}
