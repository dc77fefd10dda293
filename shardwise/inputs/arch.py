"""The Arch: a decoder's shape, and what follows from it alone: parameters and FLOPs. No torch."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs.recipe import ModelSpec, PresetByDevice

Positive = Annotated[int, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]

# model_type values whose config.json has exactly this shape: no biases, no experts, SwiGLU, RMSNorm, RoPE.
LLAMA_STYLE = ("llama", "mistral", "shardwise-decoder")


class Arch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, (gated) feed-forward, no biases."""

    name: str
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    ffn_size: Positive
    max_sequence_length: Positive
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    gated_ffn: bool = True
    dropout: Rate = 0.0

    def attention_parameters(self) -> int:
        """Query, key, value and output projections of one block."""
        query = self.num_heads * self.head_dim
        key_value = 2 * self.num_kv_heads * self.head_dim
        return self.hidden_size * (query + key_value) + query * self.hidden_size

    def ffn_parameters(self) -> int:
        """Feed-forward projections of one block."""
        return (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_size

    def block_parameters(self) -> int:
        """One block with its two norms."""
        return self.attention_parameters() + self.ffn_parameters() + 2 * self.hidden_size

    def parameters(self) -> int:
        """All trainable numbers; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * self.block_parameters() + self.hidden_size

    def matmul_parameters(self) -> int:
        """Those that each token is multiplied with: the head, tied or not, but no lookup and no norm."""
        blocks = self.num_layers * (self.attention_parameters() + self.ffn_parameters())
        return blocks + self.vocab_size * self.hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of forward and backward for one token of a sequence: the one definition behind utilisation.

        Two a multiply-add; backward twice the forward; causal attention counted as the half it needs;
        recompute left out, so that it shows as lost utilisation.
        """
        heads = self.num_heads * self.head_dim
        attention = 2 * 2 * self.num_layers * sequence_length * heads / 2
        return 3 * (2 * self.matmul_parameters() + attention)


def shape_problem(arch: Arch) -> str:
    """Why this shape cannot be built; empty where it can."""
    if arch.num_heads % arch.num_kv_heads:
        return f"num_heads = {arch.num_heads} is not a multiple of num_kv_heads = {arch.num_kv_heads}"
    if arch.head_dim % 2:
        return f"head_dim = {arch.head_dim} is odd, and rotary embeddings turn pairs"
    return ""


def from_config_json(source: str | Path | Mapping[str, object]) -> Arch:
    """The Arch that a Llama-style `config.json` (a path, or its parsed keys) describes.

    Raises: RecipeError where the file is missing, a key is absent, or the model_type has another shape.
    """
    name = "config"
    if isinstance(source, Mapping):
        config = source
    else:
        path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        # A config.json is named by its folder, any other file by itself.
        config, name = _read_json(path), (path.parent.name if path.stem == "config" else "") or path.stem
    kind = config.get("model_type", "missing")
    if kind not in LLAMA_STYLE or config.get("attention_bias") or config.get("mlp_bias"):
        raise RecipeError(
            f"model_type {kind!r} is not a shape that Shardwise can count and build yet.",
            why=f"known without biases or experts: {', '.join(LLAMA_STYLE)}",
            fix='use one of these, or hand over your own module with model.factory = "my.module:build"',
        )
    arch = _from_llama_keys(str(config.get("name", name)), config)
    problem = shape_problem(arch)
    if problem:
        raise RecipeError(f"The config of {arch.name!r} cannot be built.", why=problem, fix="correct config.json")
    return arch


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"model.config: {path} does not exist.", fix="give the path of a config.json") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.config: {path} cannot be read.", why=str(error), fix="give a JSON file") from None
    if not isinstance(config, dict):
        raise RecipeError(f"model.config: {path} does not hold an object.", fix="give a Hugging Face config.json")
    return config


def _from_llama_keys(name: str, config: Mapping[str, object]) -> Arch:
    def required(key: str) -> object:
        if key not in config:
            raise RecipeError(f"config.json has no {key!r}.", fix=f"add {key} to config.json")
        return config[key]

    rope = config.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    heads, hidden = required("num_attention_heads"), required("hidden_size")
    keys = {
        "name": name,
        "vocab_size": required("vocab_size"),
        "hidden_size": hidden,
        "num_layers": required("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_size": required("intermediate_size"),
        "max_sequence_length": config.get("max_position_embeddings") or 2048,
        "tied_embeddings": config.get("tie_word_embeddings") or False,
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": theta or config.get("rope_theta") or 10000.0,
        "dropout": config.get("attention_dropout") or 0.0,
    }
    if config.get("head_dim"):
        keys["head_dim"] = config["head_dim"]
    elif isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        keys["head_dim"] = hidden // heads
    try:
        return msgspec.convert(keys, Arch)
    except msgspec.ValidationError as error:
        raise RecipeError(f"config.json of {name!r} is not valid.", why=str(error), fix="correct this key") from None


# Byte tokens: 256 bytes and a separator make 257 ids. The head is padded to 264, a multiple of 8, so that its
# rows are 16-byte aligned in bf16, which tensor cores need; seven unused classes cost under 3 % of the head.
BYTE_VOCABULARY = 264


def _llama_3(name: str, layers: int, hidden: int, ffn: int, heads: int, length: int) -> Arch:
    """Source: The Llama 3 Herd of Models, arXiv 2407.21783, table 3; the vocabulary with its 256 special tokens."""
    return Arch(
        name=name, vocab_size=128256, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=8,
        head_dim=128, ffn_size=ffn, max_sequence_length=length, rope_theta=500000.0,
    )  # fmt: skip


PRESETS: Mapping[str, Arch] = {
    "decoder-2m": Arch(
        name="decoder-2m",
        vocab_size=BYTE_VOCABULARY,
        hidden_size=160,
        num_layers=4,
        num_heads=5,
        num_kv_heads=5,
        head_dim=32,
        ffn_size=448,
        max_sequence_length=1024,
    ),
    "decoder-8m": Arch(
        name="decoder-8m",
        vocab_size=BYTE_VOCABULARY,
        hidden_size=384,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        ffn_size=1024,
        max_sequence_length=1024,
    ),
    "llama-3-8b": _llama_3("llama-3-8b", 32, 4096, 14336, 32, 8192),
    "llama-3-70b": _llama_3("llama-3-70b", 80, 8192, 28672, 64, 8192),
    "llama-3-405b": _llama_3("llama-3-405b", 126, 16384, 53248, 128, 131072),
}


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
    """The shape that a recipe names, for this kind of device; None where it is the user's own module.

    Raises: RecipeError.
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


def _from_hf(name: str) -> Arch:
    if Path(name, "config.json").is_file():
        return from_config_json(Path(name))
    raise RecipeError(
        f"model.hf: {name!r} is not a folder with a config.json.",
        why="nothing is downloaded yet: planning needs the config, and training such a model comes later",
        fix="download it first and give its folder",
    )
