"""An exponential moving average of the weights, kept beside the run and saved with it through `state=`.

Run: shardwise run examples/ema.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw


class Ema:
    """Averages the parameters that this rank holds: whole ones or shards."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if name in self.average:
                self.average[name].lerp_(parameter.detach(), 1 - self.decay)
            else:
                self.average[name] = parameter.detach().clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.average

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.average = dict(state)


torch.manual_seed(0)
x = torch.randn(256, 8)
ema = Ema(decay=0.9)
trainer = sw.Trainer(
    model=lambda: nn.Linear(8, 1),
    loss=lambda outputs, batch: sw.Loss((outputs - batch[1]).square().sum(), len(batch[1])),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    data=sw.Batches(TensorDataset(x, x.sum(1, keepdim=True))),
    global_batch=32,
    run="runs/ema",
    state={"ema": ema},
)
for _ in trainer.run(steps=40):
    ema.update(trainer.model)
if sw.is_main():
    print(f"averaged weights: {len(ema.average)} tensors")
