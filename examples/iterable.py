"""Iterable data: a Stream of samples from a factory; each rank reads its own shard and resumes where it was.

Run: shardwise run examples/iterable.py
"""

from collections.abc import Iterator

import torch
from torch import nn

import shardwise as sw


class Numbers:
    """An endless-looking source with a position that can be saved."""

    def __init__(self, shard: int, shards: int, count: int = 2000) -> None:
        self.shard, self.shards, self.count, self.at = shard, shards, count, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < self.count // self.shards:
            value = torch.tensor([(self.at * self.shards + self.shard) / self.count])
            self.at += 1
            yield value, 3 * value - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


trainer = sw.Trainer(
    model=lambda: nn.Linear(1, 1),
    loss=lambda outputs, batch: sw.Loss((outputs - batch[1]).square().sum(), len(batch[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.3),
    data=sw.Stream(Numbers),
    global_batch=20,
    run="runs/iterable",
)
last = None
for step in trainer.run(steps=150):
    last = step
if last is not None and last.is_main:
    print(f"step {last.number}: loss {last.loss:.5f}")
