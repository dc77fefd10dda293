"""What can be learned from looking at a module: its repeated blocks, its ties, what mixes samples."""

import difflib
import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from shardwise.errors import ModelError
from shardwise.models.batch_norm import over_ranks
from shardwise.names import canonical
from shardwise.torch_private import BatchNorm


class Blocks(NamedTuple):
    """The repeated blocks and their path; where there are none, `reason` says why that is so."""

    path: str
    blocks: list[nn.Module]
    reason: str = ""


class Mixer(NamedTuple):
    """A submodule whose output for one sample may depend on the others."""

    name: str
    kind: str
    why: str
    fix: str


def find_blocks(module: nn.Module, path: str = "auto") -> Blocks:
    """The ModuleList or Sequential at `path`; "auto": of those with two or more of one class, the largest.

    No blocks is harmless: the module is then one unit. Raises: ModelError for a path that is not there.
    """
    containers = {
        name: child for name, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.Sequential)
    }
    if path != "auto":
        return _blocks_at(path, containers)
    best, most = Blocks("", [], "no ModuleList or Sequential of two or more modules of one class"), 0
    for name, container in containers.items():
        children = list(container)
        size = parameter_count(container)
        if len(children) >= 2 and len({type(child) for child in children}) == 1 and size > most:
            best, most = Blocks(canonical(name), children), size
    return best


def _blocks_at(path: str, containers: Mapping[str, nn.ModuleList | nn.Sequential]) -> Blocks:
    by_name = {canonical(name): container for name, container in containers.items()}
    if path not in by_name:
        nearest = difflib.get_close_matches(path, by_name, n=1, cutoff=0.0)
        raise ModelError(
            f"model.blocks = {path!r} is no ModuleList or Sequential of the model.",
            why=f"there are {', '.join(name or 'the model itself' for name in by_name) or 'none'}",
            fix=f'blocks = "{nearest[0]}"' if nearest else 'blocks = "auto"',
        )
    return Blocks(path, list(by_name[path]))


def ties(module: nn.Module) -> list[tuple[str, ...]]:
    """Groups of canonical names, each group one Parameter; in the order of the module."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(canonical(name))
    return [tuple(group) for group in names.values() if len(group) > 1]


def trainable_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(canonical name, parameter) of what is trained; a tied one once, under its first name."""
    return [(canonical(name), p) for name, p in module.named_parameters() if p.requires_grad]


def parameter_count(module: nn.Module, *, trainable_only: bool = False) -> int:
    """How many numbers the parameters hold; tied ones count once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable_only)


# A router sends a token to experts by the token alone, but its balancing loss and its capacity look at the
# whole micro-batch. Ends of class names as Switch, DeepSpeed, Mixtral, Qwen, OLMoE and DeepSeek write them,
# and attributes that only such modules have; a config that mentions them is not looked at.
ROUTER_CLASS = re.compile(
    r"(Router|TopKGate|Top[12]Gate|MoEGate|MoE|MoELayer|SparseMoeBlock|SparseMLP|MixtureOfExperts)$"
)
ROUTER_ATTRIBUTES = (
    "aux_loss", "aux_loss_coef", "router_aux_loss_coef", "l_aux", "load_balancing_loss", "load_balance_loss",
    "router_z_loss", "capacity_factor", "expert_capacity",
)  # fmt: skip

ACCEPT = 'model.mixes_samples = "accept" (the loss then depends on the micro-batch)'


def mixes_samples(module: nn.Module) -> list[Mixer]:
    """Submodules that are known to mix the samples of a micro-batch; empty where none is seen.

    Batch normalisation by type (synchronised ones are fine), routers by the names in ROUTER_CLASS and
    ROUTER_ATTRIBUTES, the outermost each. What no type shows (a contrastive loss) `two_split_probe` finds. A model of
    transformers that is told to give no router's logits has no balancing loss, and those without capacity drop no
    token: tests/distributed/test_hf.py holds two of them against one process.
    """
    found: list[Mixer] = []
    config = getattr(module, "config", None)
    apart = getattr(config, "output_router_logits", None) is False and not hasattr(config, "expert_capacity")
    for path, child in module.named_modules():
        name = canonical(path) if path else "the model"
        if isinstance(child, BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
            found.append(_batch_norm(name, child))
        elif (
            not apart
            and _is_router(child)
            and not any(_within(path, router.name) for router in found if router.kind == "router")
        ):
            found.append(_router(name, child))
    return found


def _is_router(module: nn.Module) -> bool:
    named = ROUTER_CLASS.search(type(module).__name__) is not None
    return named or any(hasattr(module, attribute) for attribute in ROUTER_ATTRIBUTES)


def _within(path: str, name: str) -> bool:
    return name == "the model" or canonical(path).startswith(f"{name}.")


def _batch_norm(name: str, module: nn.Module) -> Mixer:
    return Mixer(
        name,
        type(module).__name__,
        "it normalises each sample by the mean and variance of its micro-batch, which the plan decides",
        f"model.sync_batchnorm = true (over all ranks), GroupNorm in its place, or {ACCEPT}",
    )


def _router(name: str, module: nn.Module) -> Mixer:
    return Mixer(
        name,
        "router",
        f"{type(module).__name__} looks like a router: balance losses and capacity depend on the micro-batch",
        ACCEPT,
    )


def sync_batchnorm(module: nn.Module) -> nn.Module:
    """`module` with every BatchNorm normalising over the micro-batch of all ranks; names stay as they are."""
    return over_ranks(module)
