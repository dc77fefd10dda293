"""Low-rank adapters in a checkpoint: by themselves, as peft names them, or added to the weights beside which they lie.
No torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.manifest import Manifest, TensorEntry
from shardwise.errors import CheckpointError

_A, _B, _BASE, _NAMED = ".lora_A.default.", ".lora_B.default.", ".base_layer.", ".default."
# Of these families linear layers hold their weight as [in, out] (transformers' Conv1D).
_TRANSPOSED = ("gpt2", "openai-gpt")
_NUMPY: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_BITS: dict[str, Any] = {"F64": np.uint64, "F32": np.uint32}
Numbers = npt.NDArray[Any]


class Adapter(NamedTuple):
    """What is added to a weight: scale x B @ A, the other way round where the weight is [in, out].

    Shapes: a [rank, in], b [out, rank].
    """

    a: TensorEntry
    b: TensorEntry
    scale: float
    transposed: bool


def is_adapter(name: str) -> bool:
    """Whether a tensor is one of an adapter."""
    return _A in name or _B in name


def without(name: str) -> str:
    """What a weight was called before an adapter lay beside it."""
    return name.replace(_BASE, ".")


def alone(name: str) -> str:
    """What peft calls an adapter's tensor in its file."""
    return f"base_model.model.{name.replace(_NAMED, '.')}"


def adapters_of(
    manifest: Manifest, weights: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> dict[str, Adapter]:
    """By the name of the weight that each is added to. Raises: CheckpointError where the plan does not know of them."""
    names = [name for name in weights if _A in name]
    if not names:
        return {}
    scale, transposed = _lora(manifest)["scale"], config.get("model_type") in _TRANSPOSED
    return {
        name.replace(_A, _BASE): Adapter(weights[name], weights[name.replace(_A, _B)], scale, transposed)
        for name in names
    }


def config_of(
    manifest: Manifest, weights: Mapping[str, TensorEntry], base: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """adapter_config.json, as peft reads it."""
    lora = _lora(manifest)
    targets = {name.partition(_A)[0].rpartition(".")[2] for name in weights if _A in name}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora["rank"],
        "lora_alpha": lora["scale"] * lora["rank"],
        "lora_dropout": lora["dropout"],
        "target_modules": sorted(targets),
        "fan_in_fan_out": config.get("model_type") in _TRANSPOSED,
        "bias": "none",
        "inference_mode": True,
    }


def _lora(manifest: Manifest) -> dict[str, Any]:
    """rank, scale and dropout, by the recipe in the plan. Raises: CheckpointError where it has none."""
    trainable = (manifest.plan or {}).get("recipe", {}).get("model", {}).get("trainable")
    lora = trainable.get("lora") if isinstance(trainable, dict) else None
    if lora is None:
        raise CheckpointError(
            "The checkpoint has adapters, and its plan does not say of which rank and scale.",
            why="they were put in by the script itself",
            fix="save them by peft's save_pretrained, or train with model.trainable = { lora = { rank = 8 } }",
        )
    rank, alpha = lora["rank"], lora.get("alpha", "auto")
    return {
        "rank": rank,
        "scale": 2.0 if alpha == "auto" else alpha / rank,
        "dropout": lora.get("dropout", 0.0),
    }


def merged_bits(adapter: Adapter, weight: Numbers, dtype: str, a: Numbers, b: Numbers) -> tuple[Numbers, str]:
    """The bits of the weight with its adapter added, and their dtype: fp64 where the weight is that, else fp32."""
    wide = "F64" if dtype == "F64" else "F32"
    product = adapter.scale * (_wide(b, adapter.b.dtype, wide) @ _wide(a, adapter.a.dtype, wide))
    added = _wide(weight, dtype, wide) + (product.T if adapter.transposed else product)
    return np.ascontiguousarray(added, dtype=_NUMPY[wide]).view(_BITS[wide]), wide


def _wide(bits: Numbers, dtype: str, wide: str) -> Numbers:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(_NUMPY[dtype]).astype(_NUMPY[wide])
