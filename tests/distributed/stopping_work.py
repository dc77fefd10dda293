"""What the pool's ranks run to test stops that come in every phase of a run."""

import signal
from typing import Any

import torch

import shardwise as sw
from shardwise import ranks
from tests.distributed.runs import Noisy, digest, trainer_of


class Signalling(Noisy):
    """Once armed, raises a signal on the last rank with the second sample that is read; counts what is read."""

    def __init__(self, samples: int, number: int) -> None:
        super().__init__(samples)
        self.number, self.armed, self.read = number, False, 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.armed:
            self.read += 1
            if self.read == 2 and ranks.rank() == ranks.world() - 1:
                signal.raise_signal(self.number)
        return super().__getitem__(index)


class LateBatches(sw.Batches):
    """Where told to, gets the signal while the run is opened, before a step."""

    signals = False

    def loader(self, **settings: Any) -> Any:
        if self.signals and ranks.rank() == ranks.world() - 1:
            signal.raise_signal(signal.SIGUSR1)
        return super().loader(**settings)


def left(trainer: sw.Trainer, steps: int, valid: Signalling | None = None, in_body: bool = False) -> dict[str, Any]:
    """Train; the held-out samples are armed after step 3, and evaluated by the body or by the run itself."""
    seen, code = [], None
    try:
        for step in trainer.run(steps=steps):
            seen.append(step.number)
            if valid is not None and step.number == 3:
                valid.armed = True
                if in_body:
                    trainer.evaluate()
    except SystemExit as end:
        code = end.code
    return {"code": code, "seen": seen, "number": trainer.number, "saved": len(trainer.checkpointer.committed())}


def cut_in_evaluation(folder: str, number: int, in_body: bool) -> dict[str, Any]:
    """The held-out samples are 96: twelve global batches of 8."""
    valid = Signalling(96, number)
    trainer = trainer_of(folder, valid=sw.Batches(valid, workers=0), evaluate_every_steps=0 if in_body else 3)
    return {**left(trainer, 6, valid, in_body), "read": valid.read}


def told_before_the_first_step(folder: str, trained: int) -> dict[str, Any]:
    data = LateBatches(Noisy(), workers=0)
    for _ in trainer_of(folder, data=data).run(steps=trained) if trained else ():
        pass
    data.signals = True
    return left(trainer_of(folder, data=data), trained + 4)


def to_the_end(folder: str) -> dict[str, Any]:
    trainer = trainer_of(folder)
    return {"seen": [step.number for step in trainer.run(steps=6)], "digest": digest(trainer.model)}
