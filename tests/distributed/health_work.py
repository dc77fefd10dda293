"""What the pool's ranks run to test what a run does about losses that are not finite, and about spikes."""

from typing import Any

import torch

import shardwise as sw
from shardwise.errors import TrainingFailed
from tests.distributed.runs import Noisy, digest, squared, trainer_of


class Poisoned(Noisy):
    """Samples of the second epoch's order: some are marked, and a loss function makes what it likes of them."""

    def __init__(self, samples: int, marked: range) -> None:
        super().__init__(samples)
        self.marked = marked

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(index)
        return x, y, torch.tensor([float(index in self.marked)])


def flawed(once: bool, value: float) -> Any:
    """A loss that is `value` times itself at marked samples; `once`: the first three times alone, as of a machine."""
    seen = {"times": 0}

    def loss(outputs: torch.Tensor, batch: Any) -> sw.Loss:
        plain = squared(outputs, batch)
        marked = bool(batch[2].any())
        seen["times"] += marked
        flaw = value if marked and not (once and seen["times"] > 3) else 1.0
        return sw.Loss(plain.total * flaw, plain.count)

    return loss


def run(
    folder: str, *, on_spike: str, once: bool, value: float, steps: int, marked: list[int], breaks: int = 0
) -> dict[str, Any]:
    """Unshuffled samples, 8 a step: steps that read marked ones are known. Leaves the loop after step `breaks`."""
    data = Poisoned(8 * 60, range(*marked))
    made: list[int] = []
    told: list[str] = []
    for end in (breaks, 0) if breaks else (0,):
        trainer = trainer_of(
            folder, data=sw.Batches(data, workers=0, shuffle=False), loss=flawed(once, value), on_spike=on_spike,
            inputs=lambda batch: ((batch[0],), {}), checkpoint=sw.CheckpointPolicy(every_steps=4, keep=8),
        )  # fmt: skip
        try:
            for step in trainer.run(steps=steps):
                made.append(step.number)
                if step.number == end:
                    break
        except TrainingFailed as error:
            told.append(f"{error.what} {error.why} {error.fix}")
    segments = [[one.first, one.end, bool(one.why)] for one in trainer.reading.ledger.segments]
    return {"made": made, "digest": digest(trainer.model), "told": told, "segments": segments, "number": trainer.number}
