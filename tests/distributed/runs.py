"""What the pool's ranks run to test whole runs: a Trainer on a small task, stopped and resumed in every way."""

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import shardwise as sw
from shardwise import ranks
from tests.distributed.work import UnevenTokens, arch, loss, optimizer_of, whole


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A random transform: resuming must draw what an unbroken run would have drawn."""

    def __init__(self, samples: int = 22) -> None:
        self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index] + 0.1 * torch.randn(6)
        return x, x.sum(0, keepdim=True)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


def squared(outputs: torch.Tensor, batch: Any) -> sw.Loss:
    return sw.Loss((outputs - batch[1]).square().sum(), len(batch[1]))


def digest(module: nn.Module) -> str:
    """Of every parameter's bits. Collective."""
    found = hashlib.sha256()
    for name, parameter in module.named_parameters():
        found.update(name.encode() + whole(parameter).tobytes())
    return found.hexdigest()


def trainer_of(folder: str, **settings: Any) -> sw.Trainer:
    return sw.Trainer(
        **{
            "model": small_net,
            "loss": squared,
            "optimizer": lambda m: optimizer_of("adamw", m),
            "schedule": sw.cosine(warmup_steps=2),
            "data": sw.Batches(Noisy(), workers=0),
            "global_batch": 8,
            "run": folder,
            "checkpoint": sw.CheckpointPolicy(every_steps=0),
            **settings,
        }
    )


def train(
    folder: str, *, epochs: int, breaks: list[int] | None = None, zero: int = 0, precision: str = "fp32",
    signal_at: int = 0, draw: bool = True, accumulation: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Run to the end through every break (leave the loop after that step, make everything anew, go on)."""
    losses: dict[str, float] = {}
    drawn: dict[str, float] = {}
    trainer = None
    ends = [*(breaks or []), None]
    for end in ends:
        micro = -(-8 // (ranks.world() * accumulation))
        trainer = trainer_of(folder, plan={"zero": zero}, precision=precision, micro_batch=micro)
        for step in trainer.run(epochs=epochs):
            losses[str(step.number)] = step.loss
            if draw:
                drawn[str(step.number)] = float(torch.rand(()))
            if signal_at == step.number and ranks.rank() == ranks.world() - 1:
                signal.raise_signal(signal.SIGTERM)
            if step.number == end:
                break
    assert trainer is not None
    return {"losses": losses, "drawn": drawn, "digest": digest(trainer.model), "number": trainer.number}


def stopped_by_signal(folder: str, number: int, at: int, epochs: int) -> dict[str, Any]:
    """One rank alone gets the signal; all must leave after the same step, with the right code."""
    trainer = trainer_of(folder, plan={"zero": 0}, precision="fp32")
    seen = []
    try:
        for step in trainer.run(epochs=epochs):
            seen.append(step.number)
            if step.number == at and ranks.rank() == 0:
                signal.raise_signal(number)
    except SystemExit as left:
        return {"code": left.code, "steps": seen}
    return {"code": None, "steps": seen}


def stopped_by_one_rank(folder: str, at: int) -> dict[str, Any]:
    trainer = trainer_of(folder)
    seen = []
    for step in trainer.run(steps=12):
        seen.append(step.number)
        if step.number == at and ranks.rank() == ranks.world() - 1:
            trainer.stop("enough")
    first = digest(trainer.model)
    again = trainer_of(folder)
    later = [step.number for step in again.run(steps=12)]
    return {"steps": seen, "digest": first, "later": later, "end": digest(again.model)}


def in_folders_of_their_own(folder: str) -> str:
    """A relative run folder that every rank sees elsewhere, as on nodes without a shared file system."""
    here = Path.cwd()
    own = Path(folder) / f"node-{ranks.rank()}"
    own.mkdir(parents=True)
    os.chdir(own)
    try:
        return refused("run", "fine")
    finally:
        os.chdir(here)


class Uneven:
    """Shards of different lengths: rank r of n has 5 + 4 r samples."""

    def __init__(self, shard: int, shards: int) -> None:
        self.count, self.at, self.shard = 5 + 4 * shard, 0, shard

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < self.count:
            x = torch.full((6,), (self.shard + self.at) / 10)
            self.at += 1
            yield x, x.sum(0, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def streamed(folder: str, *, steps: int, breaks: list[int]) -> dict[str, Any]:
    """A stream whose shards end at different steps, left and resumed."""
    losses, trainer = [], None
    for end in [*breaks, None]:
        trainer = trainer_of(folder, data=sw.Stream(Uneven), global_batch=2 * ranks.world(), precision="fp32")
        for step in trainer.run(steps=steps):
            losses.append(step.loss)
            if step.number == end:
                break
    assert trainer is not None
    return {"losses": losses, "digest": digest(trainer.model)}


def keywords_beside_a_plan(folder: str) -> dict[str, Any]:
    """plan=Plan says how the work is split; every other keyword still counts, and a contradiction is refused."""
    from tests.distributed.work import plan

    made = plan(ranks.world(), zero=0, global_batch=8, precision="fp32")
    trainer = trainer_of(folder, plan=made, seed=5, clip_norm=0.25)
    recipe = trainer.plan.recipe
    return {
        "kept": [recipe.run == folder, recipe.seed, trainer.clip_norm],
        "batch": refused(folder, "fine", plan=made, global_batch=6),
        "precision": refused(folder, "fine", plan=made, precision="bf16"),
    }


def metric_names(folder: str, case: str) -> str:
    """Metrics that only one rank, or only a later micro-batch, gives."""
    calls = [0]

    def named(outputs: torch.Tensor, batch: Any) -> sw.Loss:
        calls[0] += 1
        plain = squared(outputs, batch)
        extra = ranks.is_main() if case == "rank" else calls[0] % 2 == 0
        return sw.Loss(plain.total, plain.count, {"extra": (1, 1)} if extra else {})

    return refused(folder, "fine", loss=named, micro_batch=2, mixes_samples="accept")


def metric_order() -> dict[str, float]:
    """The same metrics in another order on every second rank."""
    from tests.distributed.work import plan

    made = plan(ranks.world(), zero=0, global_batch=ranks.world(), precision="fp32")
    module = sw.parallelize(nn.Linear(6, 1), made)

    def named(outputs: torch.Tensor, batch: Any) -> sw.Loss:
        metrics = [("one", (1.0, 1)), ("two", (2.0, 1))]
        return sw.Loss(outputs.sum(), 1, dict(metrics if ranks.rank() % 2 else reversed(metrics)))

    return dict(sw.forward_backward(module, torch.ones(1, 6), named).metrics)


def plain_batches() -> list[float]:
    """Dropout in an own loop that hands over plain batches."""
    from tests.distributed.work import plan

    made = plan(ranks.world(), zero=0, global_batch=ranks.world(), precision="fp32")
    module = sw.parallelize(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1)), made)
    return [sw.forward_backward(module, torch.ones(1, 64), lambda o, b: sw.Loss(o.sum(), 1)).loss for _ in range(3)]


def stopped_without_a_reason(folder: str) -> list[int]:
    trainer, seen = trainer_of(folder), []
    for step in trainer.run(steps=6):
        seen.append(step.number)
        if step.number == 2:
            trainer.stop("")
    return seen


def unbroken(folder: str) -> str:
    trainer = trainer_of(folder)
    for _ in trainer.run(steps=12):
        pass
    return digest(trainer.model)


def non_finite(folder: str, bad: list[int], steps: int) -> dict[str, Any]:
    """The loss of one rank is NaN at these steps."""

    def poisoned(outputs: torch.Tensor, batch: Any) -> sw.Loss:
        plain = squared(outputs, batch)
        poison = trainer.number + 1 in bad and ranks.rank() == ranks.world() - 1
        return sw.Loss(plain.total * float("nan"), plain.count) if poison else plain

    trainer = trainer_of(folder, loss=poisoned, checkpoint=sw.CheckpointPolicy(every_steps=1))
    applied, digests = [], []
    error = ""
    try:
        for step in trainer.run(steps=steps):
            applied.append(step.applied)
            digests.append(digest(trainer.model))
    except sw.ShardwiseError as raised:
        error = f"{type(raised).__name__}: {raised.what}"
    events = sorted(Path(folder, "events").glob("attempt-*.jsonl"))
    text = events[-1].read_text() if events else ""
    return {
        "applied": applied,
        "digests": digests,
        "error": error,
        "told": text.count('"event":"non_finite_loss"'),
    }


def refused(folder: str, case: str, **settings: Any) -> str:
    """The error of a Trainer that must not start, or of its first step."""
    try:
        trainer = trainer_of(folder, **{**_case(case), **settings})
        for _ in trainer.run(steps=2):
            pass
    except sw.ShardwiseError as error:
        return f"{type(error).__name__}|{error}"
    return "nothing was raised"


def contrastive(outputs: torch.Tensor, batch: Any) -> sw.Loss:
    """Each sample is told from the others of its micro-batch."""
    scores = outputs @ batch[1].T
    return sw.Loss(nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.aux_loss = nn.Linear(6, 1), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


class Garbage(nn.Module):
    """A parameter on meta that no reset_parameters fills."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.scale)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.spare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


def _case(name: str) -> dict[str, Any]:
    return {
        "fine": {},
        "scalar loss": {"loss": lambda outputs, batch: (outputs - batch[1]).square().mean()},
        "no count": {"loss": lambda outputs, batch: sw.Loss((outputs - batch[1]).square().sum(), 0)},
        "batch norm": {"model": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))},
        "contrastive": {"loss": contrastive},
        "router": {"model": Router},
        "uninitialised": {"model": Garbage},
        "unused": {"model": Unused},
        "empty data": {"data": sw.Batches(Noisy(), workers=0) if False else []},
        "foreign optimizer": {"optimizer": lambda m: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
        "degrees": {"plan": {"dp_replicate": 7, "dp_shard": 1}},
        "context parallel": {"plan": {"cp": 2}},
        "unknown plan key": {"plan": {"zerro": 3}},
        "two batch sizes": {"tokens_per_step": 64},
        "nothing to evaluate on": {"evaluate_every_steps": 2},
    }[name]


def named_losses(out: str, *, zero: int, accumulation: int) -> dict[str, Any]:
    """Two losses with counts of their own, weighted: held against one process by the caller."""
    from shardwise.train.own_loop import batches
    from tests.distributed.work import plan

    def two(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, sw.Loss]:
        main = loss(outputs, batch)
        z = outputs.logsumexp(-1)[:, ::2].square()
        return {"main": main, "z": sw.Loss(z.sum(), z.numel(), weight=0.1)}

    from shardwise.models.decoder import Decoder, initialize_decoder

    world = ranks.world()
    made = plan(world, zero=zero, global_batch=12, accumulation=accumulation)
    with torch.device("meta"):
        module: nn.Module = Decoder(arch()).to(torch.float64)
    module = sw.parallelize(module, made, initialize=lambda m: initialize_decoder(m, 0))
    micros = next(iter(batches(sw.Batches(UnevenTokens(30), workers=0), made)))
    outcome = sw.forward_backward(module, micros, two)
    gradients = {name: whole(p.grad).tolist() for name, p in module.named_parameters() if "norm" in name}
    return {"loss": outcome.loss, "losses": dict(outcome.losses), "gradients": gradients}


def evaluated(folder: str, *, zero: int) -> dict[str, Any]:
    """Evaluation after a step, and that it leaves the training as it was."""
    trainer = trainer_of(
        folder, model=lambda: nn.Linear(6, 1), plan={"zero": zero}, valid=sw.Batches(Fixed(), workers=0)
    )
    results = []
    for step in trainer.run(steps=3):
        results.append([step.loss, trainer.evaluate().loss, trainer.model.training])
    return {"results": results, "digest": digest(trainer.model)}


def run_again(folder: str) -> dict[str, Any]:
    """One Trainer, several runs: left at the last step, run to fewer steps, stopped, and begun afresh."""
    trainer = trainer_of(folder, fresh=True)
    seen: list[list[int]] = []
    for steps, stop_at, break_at in ((3, 0, 3), (3, 0, 0), (2, 0, 0), (6, 4, 0), (6, 0, 0)):
        seen.append([])
        for step in trainer.run(steps=steps):
            seen[-1].append(step.number)
            if step.number == stop_at:
                trainer.stop("enough")
            if step.number == break_at:
                break
    return {"steps": seen, "digest": digest(trainer.model)}


def again_without_a_checkpoint(folder: str) -> list[str]:
    """What a Trainer says before its run is open, and after an error left it with steps that nothing holds."""
    trainer = trainer_of(folder, valid=sw.Batches(Fixed(), workers=0))
    said = []

    def train_on() -> None:
        for _ in trainer.run(steps=3):
            raise LookupError

    for attempt in (trainer.evaluate, trainer.save, train_on, train_on):
        try:
            attempt()
        except (sw.ShardwiseError, LookupError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(str(self.linear.weight.dtype))
        return x + self.linear(x)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Sequential(Residual(), Residual()), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


def kept_in_fp32(folder: str, *, names: list[str], zero: int) -> list[str]:
    """The dtype that each block's weight had in its last forward."""
    trainer = trainer_of(folder, model=Stacked, precision="bf16", fp32_modules=names, plan={"zero": zero})
    for _ in trainer.run(steps=1):
        pass
    return [block.seen[-1] for block in trainer.model.inner]


def batches_read_twice(folder: str) -> str:
    from shardwise.train.own_loop import batches
    from tests.distributed.work import plan

    micros = batches(sw.Batches(Fixed(), workers=0), plan(ranks.world(), zero=0, global_batch=4), epochs=1)
    first = sum(1 for _ in micros)
    try:
        return f"{first} steps, then {sum(1 for _ in micros)}"
    except sw.ShardwiseError as error:
        return f"{first} steps, then {type(error).__name__}"


class Fixed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((6,), float(index))
        return x, x.sum(0, keepdim=True)


def statistics_of_named_losses(folder: str) -> list[list[float]]:
    """The running mean after one accumulated step, with one loss and with two, which needs the counts beforehand."""
    from tests.distributed.work import plan

    def two(outputs: torch.Tensor, batch: Any) -> dict[str, sw.Loss]:
        return {"a": squared(outputs, batch), "b": sw.Loss(outputs.abs().sum(), len(outputs))}

    means = []
    for chosen in (squared, two):
        torch.manual_seed(0)
        made = plan(ranks.world(), zero=0, global_batch=4 * ranks.world(), accumulation=2, precision="fp32",
                    model={"sync_batchnorm": True})  # fmt: skip
        module = sw.parallelize(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), made)
        micros = next(iter(sw.batches(sw.Batches(Noisy(), workers=0), made)))
        sw.forward_backward(module, micros, chosen)
        means.append(module[1].running_mean.tolist())
    return means


def tied_to_a_module_in_fp32(names: list[str]) -> str:
    from shardwise.errors import ModelError
    from shardwise.models.decoder import Decoder
    from tests.distributed.work import plan

    made = plan(ranks.world(), zero=3, global_batch=4, precision="bf16", model={"fp32_modules": tuple(names)})
    try:
        sw.parallelize(Decoder(arch(tied_embeddings=True)), made)
    except ModelError as error:
        return str(error)
    return "accepted"


def generated(zero: int) -> dict[str, Any]:
    """What `generate` leaves behind: the modes that the user set, and shards where there were shards."""
    from shardwise.models.decoder import Decoder, generate
    from tests.distributed.work import plan

    module = sw.parallelize(Decoder(arch()), plan(ranks.world(), zero=zero, global_batch=4, precision="fp32"))
    module.blocks[1].eval()
    before = [inner.training for inner in module.modules()]
    generate(module, torch.zeros(1, 1, dtype=torch.int64), 2, temperature=0)
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in module.parameters())
    return {"same modes": before == [inner.training for inner in module.modules()], "held": held,
            "all": sum(p.numel() for p in module.parameters())}  # fmt: skip
