"""Your own module and data: scikit-learn's digits, an accuracy metric, held-out samples, early stopping.

Run: shardwise run examples/digits.py      (or python examples/digits.py, or torchrun --nproc-per-node 2 ...)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
train = TensorDataset(images[:1500], labels[:1500])
valid = TensorDataset(images[1500:], labels[1500:])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
    target = batch[1]
    hits = (outputs.argmax(-1) == target).sum()
    total = nn.functional.cross_entropy(outputs, target, reduction="sum")
    return sw.Loss(total, len(target), metrics={"accuracy": (hits, len(target))})


trainer = sw.Trainer(
    model=build_model,
    loss=loss,
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3),
    schedule=sw.cosine(warmup_steps=10),
    data=sw.Batches(train),
    valid=valid,
    global_batch=100,
    run="runs/digits",
)
best = float("inf")
for step in trainer.run(epochs=20):
    if step.number % 60 == 0:
        now = trainer.evaluate(valid).loss
        if now > best:
            trainer.stop("no longer improving")
        best = min(best, now)
print(f"accuracy {trainer.evaluate(valid).metrics['accuracy']:.3f}")
