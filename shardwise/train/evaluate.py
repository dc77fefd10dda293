"""Evaluation: the loss over all of a data set, once, with one agreement at the end."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.launch.heartbeat import HEART
from shardwise.parallel.parallelize import Parallel
from shardwise.train.loss import LossFunction, named
from shardwise.train.step import Inputs, LocalSums, Work, agree, counted, loss_key, to_device


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Averages over the whole data set: the same on every rank."""

    loss: float
    count: float
    losses: Mapping[str, float]
    metrics: Mapping[str, float]


def evaluate(
    module: nn.Module,
    parallel: Parallel,
    data: Any,
    loss: LossFunction,
    inputs: Inputs,
    told_to_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Forward only, in eval mode, in the order of the data; the training mode comes back afterwards.

    None where it was cut short: `told_to_stop`, asked before each global batch, says the same on every rank.
    Collective.
    """
    decision = parallel.plan.decision
    loader = data.loader(
        seed=0,
        global_batch=decision.global_batch,
        micro_batches=decision.accumulation,
        rank=parallel.data_coord,
        ranks=decision.mesh.data_parallel,
        epochs=1,
        shuffle=False,
        last="short",
    )
    modes = [(inner, inner.training) for inner in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            sums = _sums(module, parallel, loader, loss, inputs, told_to_stop)
    finally:
        loader.close()
        for inner, training in modes:
            inner.training = training
        parallel.gradients.reshard()
    if sums is None:
        return None
    outcome, _ = agree(parallel, sums, [])
    return Evaluation(outcome.loss, outcome.count, outcome.losses, outcome.metrics)


def _sums(
    module: nn.Module,
    parallel: Parallel,
    loader: Any,
    loss: LossFunction,
    inputs: Inputs,
    told_to_stop: Callable[[], bool],
) -> LocalSums | None:
    sums = LocalSums(loss_key(loss, training=False))
    for micros in loader:
        if told_to_stop():
            return None
        if parallel.pipeline is not None:
            work = Work(module, list(micros), loss, inputs, 0)
            sums.join(counted(parallel, parallel.pipeline, work, sums.key, len(work.micros)))
            continue
        for micro in micros:
            HEART.beat()
            batch = to_device(micro.batch, parallel.device)
            args, kwargs = inputs(batch)
            sums.add(named(loss(module(*args, **kwargs), batch)), micro.weight)
    return sums
