"""A causal language model of transformers, on meta, and how each rank fills its own part of it from the folder."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs import hub
from shardwise.inputs.recipe import TrainableSpec
from shardwise.models import inspect
from shardwise.models.hf import folder as folders
from shardwise.models.hf import lora, weights
from shardwise.models.hf.folder import Stored, Together
from shardwise.names import canonical
from shardwise.torch_private import READS_A_NUMBER, OperatorMode

# What forward gets of a batch; labels stay with the loss. A batch of token data has its ids as `tokens`.
_TAKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds")
_NAMES_SHOWN = 5
Held = Stored | Together
# As files spell what weights may be; they are read into the precision that the plan trains in.
FLOATS = ("F32", "BF16", "F16", "F64")


def causal_lm(
    model: str, trainable: Literal["full"] | TrainableSpec = "full", seed: int = 0
) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """The module that `model` names, on meta, and what fills its shards; with what is frozen, or with adapters.

    A file's names are compared with the module's in both directions. Code of the folder's own is never run.
    Raises: ModelError for what is missing, left over, of another shape, or no causal language model.
    """
    folder = hub.find(model)
    module = on_meta(folder)
    held = _matched(module, folders.stored(folder), folder)
    first = {name: group[0] for group in inspect.ties(module) for name in group}
    found = {name: held[name] for name in held} | {
        name: held[other] for name in first for other in first if first[name] == first[other] and other in held
    }
    module = trained_in_part(module, trainable)

    def fill(placed: nn.Module) -> None:
        weights.fill(placed, found)
        lora.initialize(placed, seed)

    return module, fill


def trained_in_part(module: nn.Module, trainable: Literal["full"] | TrainableSpec) -> nn.Module:
    """The module on meta with what is frozen, or with adapters in it. Raises: ModelError."""
    if trainable != "full" and trainable.lora is not None:
        return lora.adapt(module, trainable.lora)
    if trainable != "full":
        freeze(module, trainable.frozen)
    return module


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """What these patterns name is not trained. Raises: ModelError for one that names nothing, or where nothing is left.

    A pattern matches a parameter's whole name: "model.layers.0.*".
    """
    named = {canonical(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, named, n=1, cutoff=0.0)[0]
            raise ModelError(
                f"model.trainable.frozen: {pattern!r} is the name of no parameter of {type(module).__name__}.",
                fix=f"a name or a pattern of names, such as {near!r}",
            )
        for name in found:
            named[name].requires_grad_(False)
    if not any(p.requires_grad for p in named.values()):
        raise ModelError("model.trainable.frozen leaves nothing to train.", fix="name fewer parameters")


def inputs(batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch's part that forward takes. Raises: ModelError for a batch without token ids."""
    taken = {key: batch[key] for key in _TAKEN if key in batch}
    if "tokens" in batch:
        taken.setdefault("input_ids", batch["tokens"])
    if "input_ids" not in taken and "inputs_embeds" not in taken:
        raise ModelError(
            f"The batch has {', '.join(map(str, batch))}, and no input_ids.",
            fix="name the token ids input_ids (or tokens), or give inputs=lambda batch: (args, kwargs)",
        )
    return (), {**taken, "use_cache": False}


class NumbersAreOne(OperatorMode):
    """A number that is read of a tensor on meta is one, which is true. Masks are looked at for padding, and positions
    for several documents in a row: forward then goes the way of batches that have neither."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is READS_A_NUMBER and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 1
        return operator(*args, **(kwargs or {}))


def on_meta(folder: Path) -> nn.Module:
    """The module of this folder's config, without memory. Raises: ModelError where transformers builds none."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise hub.needs_extra(error) from error
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelError(
            f"{folder} is no causal language model that transformers builds.",
            why=str(error).strip().splitlines()[0],
            fix="a model whose config transformers knows; code that comes with a model is never run",
        ) from error
    _require_known(module, folder)
    return module.train()


def _require_known(module: nn.Module, folder: Path) -> None:
    """Raises: ModelError for a family whose files hold its weights in a way that is not known here, or that is asked
    for a loss which mixes samples."""
    unknown = [one for one in _converters(module) if _operations(one) not in _KNOWN]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} ({folder}) cannot be loaded yet.",
            why=f"its files hold {unknown[0].target_patterns[0]} otherwise than its modules do: "
            f"{' and '.join(name for name, _ in _operations(unknown[0]))}",
            fix="another model, or model=lambda: AutoModelForCausalLM.from_pretrained(...) where a host can hold it",
        )
    if getattr(module.config, "output_router_logits", False):
        raise ModelError(
            f"{folder} asks for a balancing loss of its router (output_router_logits).",
            why="it mixes the samples of a micro-batch: another split of the batch would be another loss",
            fix="output_router_logits = false in its config.json: trained without it, no token is dropped",
        )


# Of experts one by one: all of a name as one tensor, and two of them one below the other.
_KNOWN = ((("MergeModulelist", 0),), (("MergeModulelist", 0), ("Concatenate", 1)))


def _operations(converter: Any) -> tuple[tuple[str, int | None], ...]:
    return tuple((type(one).__name__, getattr(one, "dim", None)) for one in converter.operations)


def _converters(module: nn.Module) -> list[Any]:
    from transformers.core_model_loading import WeightConverter

    return [one for one in _conversions(module) if isinstance(one, WeightConverter)]


def _conversions(module: nn.Module) -> Sequence[Any]:
    """What transformers does to the names and the values in files of this family."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return tuple(get_model_conversion_mapping(module) or ())


def _by_module_names(module: nn.Module, files: Mapping[str, Stored], wanted: Container[str]) -> dict[str, Held]:
    """The files' tensors by the module's names: families were renamed, some files leave the model's prefix out, and
    hold experts one by one. Raises: ModelError for experts of which some are missing."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    converters, prefix = _converters(module), f"{getattr(module, 'base_model_prefix', '')}."
    renamings = [one for one in _conversions(module) if not isinstance(one, WeightConverter)]
    part_of = {pattern: at for one in converters for at, pattern in enumerate(one.source_patterns)}
    found: dict[str, Held] = {}
    apart: dict[str, dict[tuple[int, int], Stored]] = {}
    for name in sorted(files):
        renamed, pattern = rename_source_key(name, renamings, converters)
        renamed = prefix + renamed if renamed not in wanted and prefix + renamed in wanted else renamed
        if pattern is None:
            found[renamed] = files[name]
        else:
            number = int(re.findall(r"\.(\d+)\.", name)[-1])
            apart.setdefault(renamed, {})[part_of[pattern], number] = files[name]
    return found | {name: _together(name, several) for name, several in apart.items()}


def _together(name: str, several: Mapping[tuple[int, int], Stored]) -> Together:
    parts, experts = (1 + max(index) for index in zip(*several, strict=True))
    missing = [(part, expert) for part in range(parts) for expert in range(experts) if (part, expert) not in several]
    if missing:
        there = next(iter(several.values()))
        raise ModelError(
            f"Expert {missing[0][1]} of {name} is in no file of {there.file.parent}.",
            why=f"{len(several)} of {parts * experts} tensors of its experts are there",
            fix="give the files that belong to this config.json",
        )
    return Together(tuple(tuple(several[part, expert] for expert in range(experts)) for part in range(parts)))


def _spelled(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _matched(module: nn.Module, files: Mapping[str, Stored], folder: Path) -> dict[str, Held]:
    """The file's tensor of each name of the module's that it holds. Raises: ModelError for a two-way difference."""
    wanted = {canonical(n): p for n, p in module.named_parameters(remove_duplicate=False)}
    wanted |= {n: b for n, b in module.named_buffers() if n in module.state_dict()}
    named = _by_module_names(module, files, wanted)
    ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    more = [n for n in named if n not in wanted and not any(re.search(pattern, n) for pattern in ignored)]
    tied = {name: group for group in inspect.ties(module) for name in group}
    less = [name for name in wanted if not any(other in named for other in tied.get(name, (name,)))]
    if more or less:
        raise ModelError(
            f"The files of {folder} and its config are not of one model.",
            why="; ".join(
                f"{len(names)} {said}: {', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''}"
                for names, said in ((less, "in the model and no file"), (more, "in a file and not in the model"))
                if names
            ),
            fix="give the files that belong to this config.json",
        )
    for name, one in named.items():
        if name in wanted and tuple(wanted[name].shape) != one.shape:
            raise ModelError(
                f"{name} is {list(one.shape)} in {one.file.name}, and {list(wanted[name].shape)} in the model.",
                why="its config.json describes another size",
                fix="give the files that belong to this config.json",
            )
        if name in wanted and wanted[name].is_floating_point() != (one.dtype in FLOATS):
            raise ModelError(
                f"{name} is {one.dtype} in {one.file.name}, and {_spelled(wanted[name])} in the model.",
                why="numbers of another kind (quantised ones, say) mean something else than their values",
                fix=f"a folder whose weights are {', '.join(FLOATS)}: the model before it was quantised",
            )
    return {name: one for name, one in named.items() if name in wanted}
