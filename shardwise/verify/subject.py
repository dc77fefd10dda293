"""What a dry run trains: a module, its batches, its loss and its optimizer, all without data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.errors import BadInput
from shardwise.inputs import hub
from shardwise.models import materialize
from shardwise.models.decoder import Decoder
from shardwise.models.hf import build as hf
from shardwise.optimizer import build as optimizers
from shardwise.plan.plan import Plan
from shardwise.torch_private import tree_map
from shardwise.train import setup
from shardwise.train.loss import LossFunction
from shardwise.train.step import Inputs

Batch = Callable[[int], Any]  # samples -> a batch, every tensor's first dim that long


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is trained: how to build it on meta, its batches, its loss, its optimizer."""

    build: Callable[[], nn.Module]
    batch: Batch
    loss: LossFunction
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    inputs: Inputs | str = "auto"

    @property
    def splits_vocabulary(self) -> bool:
        """Whether its loss takes logits split over the vocabulary; the Trainer asks the same."""
        return bool(getattr(self.loss, "takes_vocabulary_shards", False))


def like(sample: Any) -> Batch:
    """Batches of any number of samples, in the shapes and dtypes of one real batch: its first dim counts samples."""

    def resized(leaf: Any, samples: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        return torch.zeros((samples, *leaf.shape[1:]), dtype=leaf.dtype)

    return lambda samples: tree_map(lambda leaf: resized(leaf, samples), sample)


def subject_of(plan: Plan) -> Subject:
    """What a recipe's run trains: our decoder, a model of Hugging Face, or the module of its factory, on tokens.

    Raises: BadInput where the model is a module that was handed to a Trainer; ModelError for a factory that is not
    there.
    """
    arch, model, length = plan.arch, plan.recipe.model, plan.recipe.data.sequence_length
    if arch is None and model.factory is None and model.hf is None:
        raise BadInput(
            "This plan's model is a module of your own, which the plan does not hold.",
            fix="call shardwise.verify.dry_run.dry_run(plan, subject) with it, a sample batch and its loss",
        )
    length = length if arch is None else min(length, arch.max_sequence_length)

    def batch(samples: int) -> Any:
        tokens = torch.zeros((samples, length), dtype=torch.int64)
        return {"tokens": tokens, "labels": torch.zeros_like(tokens)}

    return Subject(
        build=_builder(plan),
        batch=batch,
        loss=setup.next_token_loss,
        optimizer=lambda module: optimizers.build(plan.recipe.optimizer, module),
        inputs="auto" if model.hf is None else hf.inputs,
    )


def _builder(plan: Plan) -> Callable[[], nn.Module]:
    arch, model = plan.arch, plan.recipe.model
    if model.hf is not None:
        folder = hub.find(model.hf, weights=False)
        return lambda: hf.trained_in_part(hf.on_meta(folder), model.trainable)
    return materialize.load_factory(model.factory) if arch is None and model.factory else lambda: Decoder(arch)
