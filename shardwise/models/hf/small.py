"""A small model of the same make: a family's own code on few numbers, for what is proved before a run."""

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs import hub
from shardwise.inputs.arch import Arch
from shardwise.models import materialize

# Rotary parts of a head, a quarter of it or two fifths, come out even.
HEAD_DIM = 16
# As a family starts, most of what is computed is next to nothing: a fault would be lost in rounding.
NOISE = 0.1
ALIKE = Arch(
    name="small", vocab_size=64, hidden_size=4 * HEAD_DIM, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=HEAD_DIM, ffn_size=96, max_sequence_length=64, sliding_window=4,
)  # fmt: skip


def build(folder: Path, shape: Arch, seed: int = 0) -> nn.Module:
    """The module of a folder's config in the sizes of `shape`, on CPU in fp32, without dropout; every kind of layer
    that it has is there where `shape` has as many layers.

    Raises: ModelError where its own code does not take such sizes.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise hub.needs_extra(error) from error
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _shrink(config, shape)
        with materialize.seeded(seed):
            module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(NOISE * torch.randn(parameter.shape))
    except Exception as error:  # a family's own code: any of it may fail on sizes that it was not made for
        raise ModelError(
            f"No small model of the kind of {folder} can be built.",
            why=f"{type(error).__name__}: {error}",
            fix="packing = false; for verify --half dry, which takes the model as it is",
        ) from error
    return module


class Alike(NamedTuple):
    """A small model of the same make, and what each of its modules was called with in one forward, by path.

    said: answers that were found by trying it, kept.
    """

    module: nn.Module
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
    said: dict[str, bool | None]


_alike: WeakKeyDictionary[nn.Module, Alike | None] = WeakKeyDictionary()


def alike(module: nn.Module) -> Alike | None:
    """Of a module of transformers; None of any other, or where none can be built and called."""
    if module not in _alike:
        _alike[module] = _made_alike(module)
    return _alike[module]


def _made_alike(module: nn.Module) -> Alike | None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    try:
        config = copy.deepcopy(module.config)
        _shrink(config, ALIKE)
        with materialize.seeded(0), torch.device("cpu"):
            made: nn.Module = type(module)(config).float().eval()
            tokens = torch.randint(2, ALIKE.vocab_size, (2, 6))
            return Alike(made, _called(made, tokens), {})
    except Exception:  # a family's own code: any of it may fail on sizes that it was not made for
        return None


@torch.no_grad()
def _called(module: nn.Module, tokens: torch.Tensor) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = [
        inner.register_forward_pre_hook(
            lambda _inner, args, kwargs, path=path: calls.setdefault(path, (args, kwargs)) and None, with_kwargs=True
        )
        for path, inner in module.named_modules()
    ]
    module(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _shrink(config: Any, shape: Arch) -> None:
    multi_head = getattr(config, "num_key_value_heads", None) in (None, config.num_attention_heads)
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads if multi_head else shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "n_inner": shape.ffn_size,
        "max_position_embeddings": shape.max_sequence_length,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and (name.endswith(("dropout", "pdrop"))):
            setattr(config, name, 0.0)
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = max(2, min(5, shape.sliding_window))
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = _some_of_each(kinds, shape.num_layers)
    if isinstance(turned := getattr(config, "rope_parameters", None), Mapping):
        config.rope_parameters = _plain(turned)


def _some_of_each(kinds: list[str], layers: int) -> list[str]:
    """Every kind of layer as long as there is room, then the first ones again."""
    each = list(dict.fromkeys(kinds))
    return [each[index % len(each)] for index in range(layers)]


def _plain(turned: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions without a scaling, whose factors are as many as a head of the full size has."""
    if "rope_type" not in turned:
        return {name: _plain(one) if isinstance(one, Mapping) else one for name, one in turned.items()}
    kept = {key: turned[key] for key in ("rope_theta", "partial_rotary_factor") if key in turned}
    return {**kept, "rope_type": "default"}
