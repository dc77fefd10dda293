"""Documents packed into one row never see each other: proved of a family on a small model of its make.

What says where a document begins is position_ids, which count from 0 again there. transformers' own masks go by them;
a family that makes its masks otherwise would let documents see each other without a word.
"""

from pathlib import Path

import torch

from shardwise.errors import ModelError
from shardwise.inputs import hub
from shardwise.models.hf import small
from shardwise.models.hf.build import inputs

# Of one row; the second document is longer than the small model's window, and behind the last one is padding.
LENGTHS = (5, 9, 1, 3)
# Relative: norms are computed in fp32 whatever the weights are. What another document adds is of the size of one.
BOUND = 1e-4


def require_apart(model: str) -> None:
    """Raises: ModelError where a document of a packed row has other outputs than by itself, or it cannot be tried."""
    folder = hub.find(model, weights=False)
    difference = _difference(folder)
    if not difference <= BOUND:
        raise ModelError(
            f"Documents that are packed into one row see each other in {model}.",
            why=f"on a small model of its make their outputs differ from those of each by itself by {difference:.1e}",
            fix="data.packing = false: rows are then padded to the longest of a batch",
        )


@torch.no_grad()
def _difference(folder: Path) -> float:
    """The largest, relative to the largest output."""
    module = small.build(folder, small.ALIKE).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(2, small.ALIKE.vocab_size, (length,), generator=generator) for length in LENGTHS]
    together = _logits(module, torch.cat(documents), torch.cat([torch.arange(length) for length in LENGTHS]))
    alone = torch.cat([_logits(module, one, torch.arange(len(one))) for one in documents])
    return float((together - alone).abs().max() / alone.abs().max())


def _logits(module: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Shapes: [S], [S] -> [S, V]."""
    args, kwargs = inputs({"tokens": tokens[None], "position_ids": positions[None]})
    found: torch.Tensor = module(*args, **kwargs).logits[0]
    return found
