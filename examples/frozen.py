"""Frozen parameters: a fixed backbone and a head that is trained.

Run: shardwise run examples/frozen.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw


def build_model() -> nn.Module:
    backbone = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
    backbone.requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(32, 1))


torch.manual_seed(0)
x = torch.randn(256, 8)
trainer = sw.Trainer(
    model=build_model,
    loss=lambda outputs, batch: sw.Loss((outputs - batch[1]).square().sum(), len(batch[1])),
    optimizer=lambda m: torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2),
    data=sw.Batches(TensorDataset(x, x.sin().sum(1, keepdim=True))),
    global_batch=32,
    run="runs/frozen",
)
last = None
for step in trainer.run(epochs=10):
    last = step
if last is not None and last.is_main:
    print(f"step {last.number}: loss {last.loss:.4f}")
