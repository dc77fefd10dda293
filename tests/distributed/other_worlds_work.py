"""What the pool's ranks run: a Trainer that is left under one plan and goes on under another."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise import ranks
from shardwise.checkpoint import Checkpointer
from shardwise.events.reader import read
from shardwise.events.values import Resumed
from shardwise.models.decoder import Decoder
from tests.distributed.work import UnevenTokens, arch, loss, optimizer_of

SAMPLES, GLOBAL_BATCH = 30, 12  # An epoch is two steps and a half: the switch lies inside one.


def build() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(arch(num_layers=4, num_kv_heads=4, tied_embeddings=True, ffn_size=49))


class Drawn:
    """State of the user's: what was drawn in the loop's body, as tensors and numbers."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(3), 0

    def update(self) -> None:
        self.mean.add_(torch.rand(3))
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = state["mean"], state["count"]


def run(
    folder: str, plan: dict[str, Any], *, steps: int, until: int = 0, micro_batch: int = 3, precision: str = "fp64"
) -> dict[str, Any]:
    """Goes on with the run in this folder, to its end or until it is left after a step; its newest root then."""
    drawn = Drawn()
    trainer = sw.Trainer(
        model=build, loss=loss, optimizer=lambda m: optimizer_of("adamw", m), data=sw.Batches(UnevenTokens(SAMPLES),
        workers=0), global_batch=GLOBAL_BATCH, micro_batch=micro_batch, precision=precision, clip_norm=0.5, plan=plan,
        run=folder, checkpoint=sw.CheckpointPolicy(every_steps=0), state={"drawn": drawn}, mixes_samples="accept",
    )  # fmt: skip
    losses: dict[str, list[float]] = {}
    for step in trainer.run(steps=steps):
        drawn.update()
        losses[str(step.number)] = [step.loss, step.grad_norm]
        if step.number == until:
            break
    events = [event for path in sorted(Path(folder, "events").glob("attempt-*.jsonl")) for event in read(path)]
    newest = Checkpointer(folder, nn.Linear(1, 1)).committed()[0].manifest
    return {
        "losses": losses,
        "told": [list(event.told) for event in events if isinstance(event, Resumed)],
        "root": newest.root,
        "samples": newest.samples,
        "world": newest.world,
        "plan": newest.plan["decision"],
        "drawn": [*drawn.mean.tolist(), drawn.count],
    }


class Endless(torch.utils.data.IterableDataset[Any]):
    """A shard of a stream that knows its place."""

    def __init__(self, shard: int) -> None:
        self.shard, self.at = shard, 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.full((2,), float(self.shard + self.at))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def of_a_stream(folder: str, steps: int) -> str:
    """What a run over a Stream says when it goes on, once it has been left after two steps."""
    trainer = sw.Trainer(
        model=lambda: nn.Linear(2, 1), loss=lambda outputs, batch: sw.Loss(outputs.square().sum(), len(outputs)),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), inputs=lambda batch: ((batch,), {}),
        data=sw.Stream(lambda shard, shards: Endless(shard)), global_batch=12, run=folder, plan={"zero": 0},
        mixes_samples="accept",
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    try:
        for step in trainer.run(steps=steps):
            if step.number == 2:
                break
    except sw.ShardwiseError as error:
        same = all(torch.equal(a, b.detach()) for a, b in zip(before, trainer.model.parameters(), strict=True))
        return f"{'unchanged' if same else 'changed'} {error}"
    return f"trained on {ranks.world()}"


class Average:
    """What people keep beside a model, and forget to register."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def incomplete(folder: str, plan: dict[str, Any], state: str) -> str:
    """What a Trainer says of an average and a teacher in its loss, with `state=` for none, some or all."""
    average, teacher = Average(nn.Linear(2, 2)), nn.Linear(2, 2)

    def judged(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
        assert average.weights and not teacher.weight.grad
        return loss(outputs, batch)

    given = {
        "none": {},
        "all": {"average": average, "teacher": sw.not_kept(teacher)},
        "some": {"average": average},
    }[state]
    trainer = sw.Trainer(
        model=build, loss=judged, optimizer=lambda m: optimizer_of("adamw", m), data=sw.Batches(UnevenTokens(SAMPLES),
        workers=0), global_batch=GLOBAL_BATCH, plan=plan, run=folder, state=given, mixes_samples="accept",
    )  # fmt: skip
    try:
        steps = [step.number for step in trainer.run(steps=2)]
    except sw.ShardwiseError as error:
        return str(error)
    (newest,) = Checkpointer(folder, nn.Linear(1, 1)).committed()
    return f"{len(steps)} steps, {sorted(part for part in newest.manifest.state if 'trainer.' not in part)}"
