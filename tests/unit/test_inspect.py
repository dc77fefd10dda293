"""Looking at modules: names, blocks, ties, and what mixes samples, by kind and by the probe."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.inputs.arch import Arch
from shardwise.models import inspect
from shardwise.models.batch_norm import BatchNormOverRanks
from shardwise.models.decoder import Decoder, next_token_sums
from shardwise.models.split_probe import halve, two_split_probe
from shardwise.names import canonical

TINY = Arch("tiny", 32, 16, 3, 4, 2, 8, 24, 16, tied_embeddings=True)


def test_canonical_names_are_those_of_the_bare_module():
    bare = Decoder(TINY)
    names = [name for name, _ in bare.named_parameters()]
    bare.blocks[1] = torch.compile(bare.blocks[1], backend="eager")
    wrapped = nn.Sequential()
    wrapped.module = torch.compile(bare, backend="eager")
    assert [canonical(name) for name, _ in wrapped.named_parameters()] == names


@given(st.lists(st.sampled_from(["module", "_orig_mod", "_checkpoint_wrapped_module", "a", "0", "weight"]), min_size=1))
def test_a_canonical_name_is_its_own(parts):
    name = canonical(".".join(parts))
    assert canonical(name) == name and name.split(".")[-1] == parts[-1]


def test_the_blocks_of_a_decoder_are_its_layers():
    module = Decoder(TINY)
    found = inspect.find_blocks(module)
    assert found.path == "blocks" and found.blocks == list(module.blocks)
    assert inspect.find_blocks(module, "blocks") == found


def test_of_several_lists_the_largest_is_chosen():
    module = nn.ModuleDict(
        {
            "small": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "mixed": nn.Sequential(nn.Linear(99, 99), nn.ReLU()),
            "large": nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(3)]),
        }
    )
    assert inspect.find_blocks(module).path == "large"
    assert [type(block) for block in inspect.find_blocks(module, "mixed").blocks] == [nn.Linear, nn.ReLU]


def test_no_blocks_is_harmless_and_says_why():
    found = inspect.find_blocks(nn.Linear(2, 2))
    assert found.blocks == [] and found.path == "" and found.reason


def test_a_path_that_is_not_there_shows_the_nearest():
    with pytest.raises(ModelError) as caught:
        inspect.find_blocks(Decoder(TINY), "block")
    assert caught.value.fix == 'blocks = "blocks"'
    assert inspect.find_blocks(Decoder(TINY), caught.value.fix.split('"')[1]).blocks


def test_ties_are_groups_of_names_of_one_parameter():
    module = Decoder(TINY)
    assert inspect.ties(module) == [("embed_tokens.weight", "lm_head.weight")]
    assert inspect.ties(torch.compile(module, backend="eager")) == inspect.ties(module)
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.clone())
    assert inspect.ties(module) == []


def test_a_tied_parameter_counts_once_and_a_frozen_one_is_not_trained():
    module = Decoder(TINY)
    assert inspect.parameter_count(module) == TINY.parameters()
    module.embed_tokens.requires_grad_(False)
    assert inspect.parameter_count(module, trainable_only=True) == TINY.parameters() - 32 * 16
    assert "embed_tokens.weight" not in dict(inspect.trainable_parameters(module))


class Router(nn.Module):
    pass


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.load_balancing_loss = torch.zeros(())


class Qwen3MoeRMSNorm(nn.Module):
    pass


def test_what_is_known_to_mix_samples_is_found_with_its_fix():
    module = nn.ModuleDict({"norm": nn.BatchNorm2d(3), "experts": Experts(), "route": Router(), "ok": nn.LayerNorm(3)})
    found = {mixer.name: mixer for mixer in inspect.mixes_samples(module)}
    assert set(found) == {"norm", "experts", "route"}
    assert all(mixer.why and "mixes_samples" in mixer.fix for mixer in found.values())
    assert "sync_batchnorm" in found["norm"].fix


@pytest.mark.parametrize("module", [Decoder(TINY), nn.GroupNorm(1, 3), nn.SyncBatchNorm(3), Qwen3MoeRMSNorm()])
def test_what_does_not_mix_is_left_alone(module):
    assert inspect.mixes_samples(module) == []


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, affine=False, momentum=None)
    )


def test_synchronised_batch_norm_is_batch_norm_on_one_rank():
    with torch.random.fork_rng():
        plain = convolutions().double()
    ours = inspect.sync_batchnorm(copy.deepcopy(plain))
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert inspect.mixes_samples(ours) == []
    x = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for training in (True, True, False):
        results = []
        for module in (plain, ours):
            module.train(training).zero_grad()
            y = module(x)
            y.pow(3).sum().backward()
            results.append([y, *(p.grad for p in module.parameters()), *module.buffers()])
        for a, b in zip(*results, strict=True):
            # fp64 sums of 80 numbers, cubed: well within.
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_batch_norm_alone_is_replaced_too():
    replaced = inspect.sync_batchnorm(nn.BatchNorm1d(2).eval())
    assert isinstance(replaced, BatchNormOverRanks) and not replaced.training


# ---------------------------------------------------------------- the two-split probe


def batch(samples: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(samples, 8, generator=generator),
        "y": torch.randint(0, 3, (samples,), generator=generator),
    }


def inputs(given):
    return (given["x"],), {}


def summed(outputs, given):
    return SimpleNamespace(total=F.cross_entropy(outputs, given["y"], reduction="sum"), count=len(outputs))


def mlp(*middle: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), *middle, nn.ReLU(), nn.Linear(8, 3))


def test_a_sum_over_samples_is_additive():
    result = two_split_probe(mlp(nn.LayerNorm(8), nn.Dropout(0.5)), summed, inputs, batch())
    assert result.verdict == "additive", result
    # All of it in fp64: far below what an fp32 part inside would make.
    assert result.difference < 1e-12


def test_our_decoder_with_uneven_labels_is_additive():
    tokens = torch.randint(0, 32, (3, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 2:] = -100

    def loss(outputs, given):
        total, count = next_token_sums(outputs, given["labels"])
        return {"tokens": SimpleNamespace(total=total, count=count)}

    given = {"tokens": tokens, "labels": labels}
    result = two_split_probe(Decoder(TINY), loss, lambda b: ((b["tokens"],), {}), given)
    assert result.verdict == "additive", result


def mean(outputs, given):
    return F.cross_entropy(outputs, given["y"])


def contrastive(outputs, given):
    scores = F.normalize(outputs, dim=-1) @ F.normalize(outputs, dim=-1).T
    return SimpleNamespace(
        total=F.cross_entropy(scores / 0.1, torch.arange(len(outputs)), reduction="sum"), count=len(outputs)
    )


def balanced(outputs, given):
    share = outputs.softmax(-1).mean(0)
    loss = summed(outputs, given)
    return SimpleNamespace(total=loss.total + 0.01 * len(outputs) * 3 * share.square().sum(), count=loss.count)


@pytest.mark.parametrize(
    ("module", "loss"),
    [(mlp(nn.BatchNorm1d(8)), summed), (mlp(), mean), (mlp(), contrastive), (mlp(), balanced)],
    ids=["batch norm", "mean", "contrastive", "router balance"],
)
def test_what_mixes_samples_is_found(module, loss):
    result = two_split_probe(module, loss, inputs, batch())
    assert result.verdict == "mixes" and result.difference > result.bound and result.reason


def test_a_count_that_does_not_add_up_is_found():
    def loss(outputs, given):
        return SimpleNamespace(total=summed(outputs, given).total, count=1)

    assert two_split_probe(mlp(), loss, inputs, batch()).reason.startswith("the count of loss")


def test_the_probe_leaves_everything_as_it_was():
    module = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    module[0].weight.grad = torch.ones(8, 8)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    two_split_probe(module, summed, inputs, batch())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.training and torch.equal(module[0].weight.grad, torch.ones(8, 8)) and module[2].p == 0.5


class Random(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Fp32Inside(nn.Module):
    def forward(self, x):
        return x.float().tanh().to(x.dtype)


@pytest.mark.parametrize(
    ("module", "given", "says"),
    [
        (mlp(Random()), batch(), "random"),
        (mlp(), batch(1), "cut in two"),
        (mlp(), {"x": torch.ones(4, 8), "y": torch.zeros(3, dtype=torch.int64)}, "cut in two"),
        (mlp(), {"x": torch.ones(4, 9), "y": torch.zeros(4, dtype=torch.int64)}, "could not run"),
        (mlp(), {"x": torch.full((4, 8), torch.nan), "y": torch.zeros(4, dtype=torch.int64)}, "not finite"),
    ],
)
def test_what_it_cannot_tell_it_says(module, given, says):
    result = two_split_probe(module, summed, inputs, given)
    assert result.verdict == "unknown" and says in result.reason


def test_a_part_that_computes_in_fp32_is_still_additive():
    assert two_split_probe(mlp(Fp32Inside()), summed, inputs, batch()).verdict == "additive"


def test_a_batch_of_any_nesting_is_cut_by_samples_and_put_together_again():
    given = {"a": [torch.arange(6).view(3, 2), {"b": (torch.arange(3),)}], "name": "x"}
    first, second = halve(given)
    assert torch.equal(torch.cat((first["a"][0], second["a"][0])), given["a"][0])
    assert torch.equal(torch.cat((first["a"][1]["b"][0], second["a"][1]["b"][0])), given["a"][1]["b"][0])
    assert first["name"] == second["name"] == "x"
