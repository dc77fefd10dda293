"""Low-rank adapters beside a Hugging Face model's layers: put in by peft on meta, filled by every rank for itself.

What a weight was called stays a part of its name: `q_proj.weight` becomes `q_proj.base_layer.weight`, and beside it lie
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`, which alone are trained.
"""

import math
import warnings

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs.recipe import LoraSpec
from shardwise.models.counter_rng import fill_uniform_
from shardwise.names import canonical

# What holds queries and values, by family; the first that a model has.
USUAL = (("q_proj", "v_proj"), ("qkv_proj",), ("query_key_value",), ("c_attn",))
_A, _B = ".lora_A.", ".lora_B."


def adapt(module: nn.Module, spec: LoraSpec) -> nn.Module:
    """The module on meta with adapters in it, in place; all else is frozen. Raises: ModelError."""
    if spec.base_bits != 16:
        raise ModelError(
            f"model.trainable.lora.base_bits = {spec.base_bits} is planned only: weights are not quantised yet.",
            why="a quantised weight has no shards that a rank could read from the files",
            fix="base_bits = 16",
        )
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "LoRA needs peft, which is not installed.", why=str(error), fix="pip install 'shardwise[hf]'"
        ) from error
    targets = targets_of(module, spec)
    config = peft.LoraConfig(
        r=spec.rank, lora_alpha=alpha_of(spec),  # type: ignore[arg-type] # any number will do
        lora_dropout=spec.dropout, target_modules=list(targets), fan_in_fan_out=_holds_transposed(module, targets),
    )  # fmt: skip
    with torch.device("meta"), warnings.catch_warnings():
        # That a tied weight is among the targets is told by peft for merging, which is not done here.
        warnings.simplefilter("ignore", UserWarning)
        return peft.inject_adapter_in_model(config, module)


def alpha_of(spec: LoraSpec) -> float:
    """By which, over the rank, an adapter's product is multiplied."""
    return 2.0 * spec.rank if spec.alpha == "auto" else spec.alpha


def targets_of(module: nn.Module, spec: LoraSpec) -> tuple[str, ...]:
    """The last parts of the names of layers that get an adapter. Raises: ModelError where there are none."""
    linear = {name.rpartition(".")[2] for name, inner in module.named_modules() if _takes_adapter(inner)}
    usual = next((names for names in USUAL if set(names) <= linear), ())
    asked = usual if spec.targets == "auto" else spec.targets
    missing = [name for name in asked if name not in linear]
    if missing or not asked:
        raise ModelError(
            f"model.trainable.lora.targets: {type(module).__name__} has no layer {missing[0]!r}."
            if missing
            else f"{type(module).__name__} has none of the layers that usually get an adapter.",
            why=f"its linear layers are {', '.join(sorted(linear))}",
            fix=f'model.trainable.lora.targets = ["{min(linear, default="...")}"], some of these',
        )
    return asked


def _takes_adapter(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _holds_transposed(module: nn.Module, targets: tuple[str, ...]) -> bool:
    """Whether these layers hold their weight as [in, out], as GPT-2's do."""
    kinds = {type(inner).__name__ for name, inner in module.named_modules() if name.rpartition(".")[2] in targets}
    return "Conv1D" in kinds


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return _A in name or _B in name


def base_name(name: str) -> str:
    """A weight's name before adapters were put in."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def initialize(module: nn.Module, seed: int) -> None:
    """Fills adapters, whole or a rank's shards: A as peft does, uniform by its inputs, and B with zeros, so that
    training begins with the model as it is. The values depend on seed and name alone.

    Source: Hu et al., arXiv 2106.09685, section 4.1; Kaiming uniform with a = sqrt(5), as torch.nn.Linear.
    """
    for name, parameter in module.named_parameters():
        name = canonical(name)
        if _A in name:
            fill_uniform_(parameter, seed=seed, name=name, bound=1.0 / math.sqrt(parameter.shape[1]))
        elif _B in name:
            parameter.zero_()
