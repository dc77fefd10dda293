"""The recipe's optimizers: groups, updates, and which may work on shards."""

import copy

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs.arch import Arch
from shardwise.inputs.recipe import OptimizerSpec, ScheduleSpec
from shardwise.models.decoder import Decoder, next_token_sums
from shardwise.optimizer import build as optimizers

TINY = Arch("tiny", 32, 16, 2, 2, 1, 8, 24, 16, tied_embeddings=True)


def test_matrices_decay_and_norms_and_biases_do_not():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    decayed, kept = optimizers.build(OptimizerSpec(weight_decay=0.1), module).param_groups
    assert {p.ndim for p in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {p.ndim for p in kept["params"]} == {1} and kept["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(kept["params"]) == len(list(module.parameters()))


def test_a_tied_parameter_stands_once_and_a_frozen_one_not_at_all():
    module = Decoder(TINY)
    module.norm.weight.requires_grad_(False)
    held = [p for group in optimizers.decay_groups(module, 0.1) for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(module.parameters())) - 1
    assert all(p is not module.norm.weight for p in held)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_the_fused_update_is_the_plain_one(name):
    torch.manual_seed(0)
    ours = Decoder(TINY).double()
    plain = copy.deepcopy(ours)
    spec = OptimizerSpec(name=name, lr=1e-2, weight_decay=0.1, momentum=0.9)
    groups = optimizers.decay_groups(plain, spec.weight_decay)
    reference = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=False),
        "adam": lambda: torch.optim.Adam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=spec.lr, momentum=0.9, foreach=False),
    }[name]()
    tokens = torch.arange(32).view(2, 16)
    for module, optimizer in ((ours, optimizers.build(spec, ours)), (plain, reference)):
        for _ in range(3):
            next_token_sums(module(tokens), tokens)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    # Three steps of lr 1e-2 in fp64: a handful of roundings of numbers below 1.
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_schedule_scales_each_group_from_its_base():
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [module.weight], "lr": 0.4}, {"params": [module.bias], "lr": 0.1}])
    for factor in (0.5, 0.25, 1.0):
        optimizers.apply_schedule(optimizer, [0.4, 0.1], factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.4 * factor, 0.1 * factor]


def test_nothing_to_train_is_an_error():
    module = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameter"):
        optimizers.build(OptimizerSpec(), module)


def test_only_exact_known_classes_are_elementwise():
    class Mine(torch.optim.AdamW):
        pass

    parameters = list(nn.Linear(2, 2).parameters())
    assert optimizers.is_elementwise(torch.optim.AdamW(parameters))
    assert optimizers.is_elementwise(torch.optim.SGD(parameters))
    assert not optimizers.is_elementwise(Mine(parameters))
    assert not optimizers.is_elementwise(torch.optim.LBFGS(parameters))
    assert not optimizers.is_elementwise(torch.optim.Adafactor([parameters[0]]))


@pytest.mark.parametrize("kind", sorted(optimizers.ELEMENTWISE, key=lambda kind: kind.__name__))
def test_an_elementwise_update_of_a_shard_is_the_shard_of_the_update(kind):
    generator = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(*shape, 6, generator=generator).double() for shape in ((), (3,)))

    def updated(part: slice) -> torch.Tensor:
        parameter = nn.Parameter(start[part].clone())
        optimizer = kind([parameter], lr=0.1)
        for gradient in gradients:
            parameter.grad = gradient[part].clone()
            optimizer.step()
        return parameter.detach()

    whole = updated(slice(None))
    assert torch.equal(torch.cat((updated(slice(0, 2)), updated(slice(2, 6)))), whole)


def test_a_recipe_schedule_is_resolved_by_the_run():
    assert optimizers.schedule(ScheduleSpec(name="linear")).resolve(10)(10) == 0.0
