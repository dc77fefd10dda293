"""Shardwise: distributed training for PyTorch that plans itself.

    Recipe + Arch + Cluster -> Plan -> launch -> parallelize -> Trainer -> Checkpoint, Events

This page is the public API. Names load when they are used, so that planning and launching never import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.version import VERSION as __version__

if TYPE_CHECKING:
    from shardwise.checkpoint.checkpointer import Checkpointer as Checkpointer
    from shardwise.checkpoint.completeness import not_kept as not_kept
    from shardwise.data.batches import Batches as Batches
    from shardwise.data.chat_data import ChatData as ChatData
    from shardwise.data.mixture import Mixture as Mixture
    from shardwise.data.stream import Stream as Stream
    from shardwise.data.tokens import TokenData as TokenData
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.inputs.recipe import CheckpointPolicy as CheckpointPolicy
    from shardwise.inputs.recipe import PlanRequest as PlanRequest
    from shardwise.inputs.recipe import Recipe as Recipe
    from shardwise.interop.sealed import newest_whole as newest_whole
    from shardwise.interop.transformers_trainer import TransformersCallback as TransformersCallback
    from shardwise.models.decoder import Decoder as Decoder
    from shardwise.optimizer.schedules import constant as constant
    from shardwise.optimizer.schedules import cosine as cosine
    from shardwise.optimizer.schedules import linear as linear
    from shardwise.optimizer.schedules import wsd as wsd
    from shardwise.parallel.parallelize import parallelize as parallelize
    from shardwise.parallel.staging import Split as Split
    from shardwise.plan.plan import Plan as Plan
    from shardwise.ranks import is_main as is_main
    from shardwise.resilience.signals import StopSignals as StopSignals
    from shardwise.resilience.watchdog import Watchdog as Watchdog
    from shardwise.train.loss import Loss as Loss
    from shardwise.train.loss import mean_per_sample as mean_per_sample
    from shardwise.train.own_loop import batches as batches
    from shardwise.train.own_loop import build_optimizer as build_optimizer
    from shardwise.train.own_loop import check_ranks as check_ranks
    from shardwise.train.own_loop import init as init
    from shardwise.train.setup import next_token_loss as next_token_loss
    from shardwise.train.step import clip_grad_norm as clip_grad_norm
    from shardwise.train.step import forward_backward as forward_backward
    from shardwise.train.trainer import Step as Step
    from shardwise.train.trainer import Trainer as Trainer

_HOME = {
    # what the user hands over
    "Recipe": "inputs.recipe", "PlanRequest": "inputs.recipe", "CheckpointPolicy": "inputs.recipe", "Plan": "plan.plan",
    # data
    "Batches": "data.batches", "TokenData": "data.tokens", "ChatData": "data.chat_data",
    "Mixture": "data.mixture", "Stream": "data.stream",
    # the Trainer
    "Trainer": "train.trainer", "Step": "train.trainer", "Loss": "train.loss", "mean_per_sample": "train.loss",
    "next_token_loss": "train.setup",
    "constant": "optimizer.schedules", "linear": "optimizer.schedules", "cosine": "optimizer.schedules",
    "wsd": "optimizer.schedules", "Decoder": "models.decoder", "Split": "parallel.staging",
    "not_kept": "checkpoint.completeness",
    # an own loop
    "init": "train.own_loop", "batches": "train.own_loop", "build_optimizer": "train.own_loop",
    "parallelize": "parallel.parallelize", "forward_backward": "train.step", "clip_grad_norm": "train.step",
    "check_ranks": "train.own_loop", "Checkpointer": "checkpoint.checkpointer", "is_main": "ranks",
    "StopSignals": "resilience.signals", "Watchdog": "resilience.watchdog",
    # in transformers.Trainer
    "TransformersCallback": "interop.transformers_trainer", "newest_whole": "interop.sealed",
    # errors
    "ShardwiseError": "errors",
}  # fmt: skip

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardwise.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
