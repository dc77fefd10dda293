"""Your own loop: the engine's parts, one by one, with a checkpoint that resumes.

Run: shardwise run examples/own_loop.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

plan = sw.init(global_batch=32, seed=1)
torch.manual_seed(1)
x = torch.randn(512, 16)
dataset = TensorDataset(x, x[:, :4].sum(1, keepdim=True))

model = sw.parallelize(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), plan)
optimizer = sw.build_optimizer(model, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
data = sw.batches(sw.Batches(dataset), plan, epochs=4)


def loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
    return sw.Loss((outputs - batch[1]).square().sum(), len(batch[1]))


# Inside, Ctrl-C and SIGTERM save after the step, on all ranks together, and leave with 130 and 75.
with sw.StopSignals() as signals:
    checkpointer = sw.Checkpointer("runs/own_loop", model, optimizer, data=data, signals=signals)
    step = checkpointer.resume()
    outcome = None
    for micros in data:
        outcome = sw.forward_backward(model, micros, loss)
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        checkpointer.step(step)
    checkpointer.save(step, "finished")
if sw.is_main() and outcome is not None:
    print(f"step {step}: loss {outcome.loss:.4f}")
