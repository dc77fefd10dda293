"""A GAN: two modules under one plan, two optimizers, an own loop.

Run: shardwise run examples/gan.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

plan = sw.init(global_batch=64)
torch.manual_seed(0)
real = TensorDataset(torch.randn(1024, 2) * 0.3 + torch.tensor([1.0, -1.0]), torch.randn(1024, 4))

generator = sw.parallelize(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)), plan)
critic = sw.parallelize(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)), plan)
generator_optimizer = sw.build_optimizer(generator, lambda m: torch.optim.Adam(m.parameters(), lr=2e-3))
critic_optimizer = sw.build_optimizer(critic, lambda m: torch.optim.Adam(m.parameters(), lr=2e-3))
data = sw.batches(sw.Batches(real), plan, epochs=8)
checkpointer = sw.Checkpointer(
    "runs/gan",
    {"generator": generator, "critic": critic},
    {"generator": generator_optimizer, "critic": critic_optimizer},
    data=data,
)
softplus = nn.functional.softplus


def critic_loss(scores: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
    with torch.no_grad():
        fakes = generator(batch[1])
    return sw.Loss((softplus(-scores) + softplus(critic(fakes))).sum(), len(scores))


def generator_loss(fakes: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> sw.Loss:
    return sw.Loss(softplus(-critic(fakes)).sum(), len(fakes))


def noise_only(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[tuple[torch.Tensor], dict[str, object]]:
    return (batch[1],), {}


step = checkpointer.resume()
outcome = None
for micros in data:
    sw.forward_backward(critic, micros, critic_loss)
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    # The generator's loss runs through the critic, whose own parameters stand still meanwhile.
    critic.requires_grad_(False)
    outcome = sw.forward_backward(generator, micros, generator_loss, inputs=noise_only)
    critic.requires_grad_(True)
    generator_optimizer.step()
    generator_optimizer.zero_grad()
    step += 1
    checkpointer.step(step)
checkpointer.save(step, "finished")
if sw.is_main() and outcome is not None:
    print(f"step {step}: generator loss {outcome.loss:.3f}")
