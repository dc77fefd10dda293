"""Weights that another module than their own computes with: under tensor parallel only their own forward has a part of
them, and everywhere else they lie as DTensors, with which no plain tensor can be computed.
"""

from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.names import canonical
from shardwise.torch_private import OperatorMode, tree_leaves

# torch's own modules that compute with the weights of modules in them, without calling these.
READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class ForeignReads(OperatorMode):
    """Around a forward of `module`: which of its modules compute with a weight of another one, and with which.

    `found`: paths of such a module and names of such a weight. Leaves hooks on the module: for a copy of it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.under_way: list[nn.Module] = []
        self.paths = {inner: canonical(path) for path, inner in module.named_modules()}
        self.owners: dict[int, set[nn.Module]] = {}
        self.names = {id(p): canonical(name) for name, p in module.named_parameters()}
        # What was made from foreign weights alone; held, so that no id comes twice.
        self.made: dict[int, tuple[torch.Tensor, str]] = {}
        for inner in module.modules():
            for owned in inner.modules() if isinstance(inner, READ_INSIDE) else [inner]:
                for parameter in owned.parameters(recurse=False):
                    self.owners.setdefault(id(parameter), set()).add(inner)
            inner.register_forward_pre_hook(self._enter)
            inner.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self.under_way.append(module)

    def _leave(self, _module: nn.Module, _args: Any, _outputs: Any) -> None:
        self.under_way.pop()

    def _foreign(self, tensor: torch.Tensor) -> str:
        """The name of the foreign weight that a tensor is, or was made from alone; empty where it is none."""
        if id(tensor) in self.made:
            return self.made[id(tensor)][1]
        owners = self.owners.get(id(tensor), set())
        return self.names[id(tensor)] if owners and not owners & set(self.under_way) else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        names = [self._foreign(leaf) for leaf in leaves]
        outputs = func(*args, **(kwargs or {}))
        weight = next((name for name in names if name), "")
        # A DTensor takes a plain tensor of one number as the same on every rank.
        if weight and any(not name and leaf.numel() > 1 for leaf, name in zip(leaves, names, strict=True)):
            self.found.append((self.paths[self.under_way[-1]] if self.under_way else "", weight))
        elif weight:
            self.made.update({id(out): (out, weight) for out in tree_leaves(outputs) if isinstance(out, torch.Tensor)})
        return outputs


def foreign(layer: str, weight: str = "") -> ModelError:
    """The error for a module that computes with another one's weight."""
    named = f"{weight}, a weight of another module" if weight else "a weight of another module"
    return ModelError(
        f"The forward of {layer or 'the model'} computes with {named}.",
        why="under tensor parallel a weight is this rank's part of it in its own module's forward alone",
        fix="give the place a module of its own and tie the two (self.head.weight = self.embedding.weight), or call "
        "the module that has the weight; or train.plan.tp = 1",
    )


def is_mixed(error: Exception) -> bool:
    """Whether torch refused to compute with a DTensor and a plain tensor, in its words of 2.11 to 2.14."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error)
