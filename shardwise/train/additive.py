"""Promise 1 before training starts: a batch is run whole and in two, to find a loss that is no sum over samples."""

from typing import Any

import numpy as np
from torch import nn

from shardwise import ranks
from shardwise.data.loader import Ordered, generators_kept
from shardwise.data.order import seed_of
from shardwise.errors import LossError
from shardwise.inputs.recipe import ModelSpec
from shardwise.models.inspect import parameter_count
from shardwise.models.split_probe import two_split_probe
from shardwise.train.loss import LossFunction, named
from shardwise.train.step import Inputs

SAMPLES = 5
# A copy in fp64 and four forward and backward passes on one CPU core: about a second at this size.
MOST_PARAMETERS = 20_000_000


def require_additive(
    module: nn.Module, loss: LossFunction, inputs: Inputs, data: Any, spec: ModelSpec, seed: int
) -> str:
    """Why the probe could not say (empty where it could). Rank 0 runs it on the first samples; all take its word.

    Collective. Raises: LossError where the loss of a batch is not the sum of its samples' losses.
    """
    if spec.mixes_samples == "accept" or spec.sync_batchnorm:
        return ""
    verdict: str = ranks.on_main(lambda: _probe(module, loss, inputs, data, seed))
    return verdict


def _probe(module: nn.Module, loss: LossFunction, inputs: Inputs, data: Any, seed: int) -> str:
    if parameter_count(module) > MOST_PARAMETERS:
        return f"the model has more than {MOST_PARAMETERS:,} parameters"
    if not isinstance(data, Ordered) or len(data) < SAMPLES:
        return f"the data is a stream, or has fewer than {SAMPLES} samples"
    positions = np.arange(SAMPLES)
    with generators_kept():
        seeds = () if data.deterministic else [seed_of("sample", seed, 0, int(k)) for k in positions]
        batch = data.fetch(data.order(positions, seed, data.shuffle), seeds, 0)
    found = two_split_probe(module, lambda outputs, part: named(loss(outputs, part)), inputs, batch)
    if found.verdict == "mixes":
        raise LossError(
            f"The loss mixes samples: {found.reason}",
            why=f"{SAMPLES} samples at once and in two parts differ by {found.difference:.1e}, where rounding explains "
            f"{found.bound:.0e}; the result would depend on the number of ranks and on the micro-batch",
            fix='a loss that sums over samples, or mixes_samples = "accept" (each micro-batch is then taken by itself)',
        )
    return found.reason if found.verdict == "unknown" else ""
