"""What the pool's ranks run to test whole runs of every split: a Trainer on the small decoder, stopped and resumed."""

from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.models.decoder import Decoder
from tests.distributed.work import UnevenTokens, arch, loss, optimizer_of, whole


def trainer_of(folder: str, plan: dict[str, Any], **settings: Any) -> sw.Trainer:
    shape = settings.pop("shape", {"num_layers": 4, "tied_embeddings": True, "dropout": 0.1, "num_kv_heads": 4})
    return sw.Trainer(
        **{
            "model": lambda: Decoder(arch(**shape)),
            "loss": loss,
            "optimizer": lambda m: optimizer_of("adamw", m),
            "schedule": sw.cosine(warmup_steps=2),
            "data": sw.Batches(UnevenTokens(30), workers=0),
            "valid": sw.Batches(UnevenTokens(11), workers=0),
            "global_batch": 12,
            "micro_batch": 3,
            "run": folder,
            "plan": plan,
            "precision": "fp32",
            "checkpoint": sw.CheckpointPolicy(every_steps=0),
            **settings,
        }
    )


def bits(module: nn.Module) -> dict[str, str]:
    """Of every parameter that this rank holds. Collective."""
    import hashlib

    return {name: hashlib.sha256(whole(p).tobytes()).hexdigest() for name, p in module.named_parameters()}


def run(folder: str, plan: dict[str, Any], breaks: list[int], **settings: Any) -> dict[str, Any]:
    """Five steps, left after each of `breaks` and gone on with by a new Trainer; what every rank saw."""
    losses: dict[str, float] = {}
    norms: dict[str, float] = {}
    trainer = None
    for end in [*breaks, None]:
        trainer = trainer_of(folder, plan, **settings)
        for step in trainer.run(steps=5):
            losses[str(step.number)], norms[str(step.number)] = step.loss, step.grad_norm
            if step.number == end:
                break
    assert trainer is not None
    evaluated = trainer.evaluate()
    return {"losses": losses, "norms": norms, "evaluated": evaluated.loss, "bits": bits(trainer.model)}


def named_losses(folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Two losses with counts of their own, and a metric: the same on every rank of every split."""

    def two(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, sw.Loss]:
        main = loss(outputs, batch)
        z = outputs.logsumexp(-1)[:, ::2].square()
        right = (outputs.argmax(-1) == batch["labels"]).sum()
        return {
            "main": sw.Loss(main.total, main.count, {"accuracy": (right, main.count)}),
            "z": sw.Loss(z.sum(), z.numel(), weight=0.1),
        }

    trainer = trainer_of(folder, plan, loss=two, shape={"num_layers": 4, "num_kv_heads": 4}, precision="fp64")
    steps = list(trainer.run(steps=2))
    return {
        "losses": [s.losses for s in steps],
        "metrics": [s.metrics for s in steps],
        "norms": [s.grad_norm for s in steps],
    }


def own_loop(plan: dict[str, Any]) -> list[list[float]]:
    """The parts without the Trainer."""
    made = sw.init(plan, global_batch=12, micro_batch=3, precision="fp64")
    torch.manual_seed(0)
    module = sw.parallelize(Decoder(arch(num_layers=4, num_kv_heads=4)).to(torch.float64), made)
    optimizer = sw.build_optimizer(module, lambda m: optimizer_of("adamw", m))
    told = []
    for number, micros in enumerate(sw.batches(sw.Batches(UnevenTokens(30), workers=0), made), start=1):
        outcome = sw.forward_backward(module, micros, loss)
        norm = sw.clip_grad_norm(module, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told.append([outcome.loss, norm])
        if number == 3:
            return told
    return told


def second_module(plan: dict[str, Any]) -> str:
    from shardwise.errors import ModelError

    made = sw.init(plan, global_batch=12)
    first = sw.parallelize(Decoder(arch(num_layers=4)), made)
    try:
        sw.parallelize(Decoder(arch(num_layers=4)), made)
    except ModelError as error:
        return f"{type(first).__name__}: {error}"
    return "accepted"


def generated(plan: dict[str, Any]) -> list[int]:
    """What the same weights write, whatever the split; odd lengths too."""
    from shardwise.models.decoder import generate

    made = sw.init(plan, global_batch=12, precision="fp64")
    torch.manual_seed(0)
    module = sw.parallelize(Decoder(arch(num_layers=2, num_kv_heads=4)).to(torch.float64), made)
    prompt = torch.arange(3).unsqueeze(0)
    found: list[int] = generate(module, prompt, 20, temperature=0, multiple=made.decision.mesh.tp)[0].tolist()
    return found
