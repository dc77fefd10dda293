"""A plain torchrun loop with torch's DDP, without Plan or Trainer: checkpoints, signals and the watchdog alone.

Run: torchrun --nproc-per-node=2 examples/plain_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

STEPS = 40
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
module = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

# A rank that says nothing for a minute is named, with the stacks of all in runs/plain/hangs/, and all are ended.
with sw.StopSignals() as signals, sw.Watchdog("runs/plain", hang_seconds=60) as watchdog:
    policy = sw.CheckpointPolicy(every_steps=20, keep=2)
    with watchdog.phase("load"):
        checkpointer = sw.Checkpointer("runs/plain", module, optimizer, policy=policy, signals=signals)
        first = checkpointer.resume() + 1
    for step in range(first, STEPS + 1):
        watchdog.step(step)
        mine = torch.arange(rank, 32, world) + 32 * step  # of the step's 32 samples every world-th
        loss = (module(x[mine % 512]) - y[mine % 512]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with watchdog.phase("save"):
            checkpointer.step(step)  # also after Ctrl-C, TERM or USR1 on any rank: saves, and exits with 130 or 75
    with watchdog.phase("save"):
        checkpointer.finish(STEPS, "the end")

if rank == 0:
    print(f"step {STEPS}, begun after step {first - 1}, {len(checkpointer.committed())} checkpoints in runs/plain")
if dist.is_initialized():
    dist.destroy_process_group()
