"""The reference decoder: its shape, its masks and positions, its start, its loss and its sampling."""

import copy

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise import torch_private
from shardwise.inputs.arch import PRESETS, Arch
from shardwise.models import inspect, linear
from shardwise.models.decoder import Decoder, attend, generate, initialize_decoder, next_token_sums, rotate

TINY = Arch("tiny", 32, 16, 2, 4, 2, 8, 24, 16)
TIED = msgspec.structs.replace(TINY, tied_embeddings=True)


def decoder(arch: Arch = TINY, seed: int = 0) -> Decoder:
    module = Decoder(arch)
    module.init_weights(seed)
    return module


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name, arch in PRESETS.items() if not arch.engine_problem()])
def test_a_preset_has_the_parameters_that_its_arch_counts(name):
    with torch.device("meta"):
        module = Decoder(PRESETS[name])
    assert sum(p.numel() for p in module.parameters()) == PRESETS[name].parameters()


@pytest.mark.parametrize("change", [{"tied_embeddings": True}, {"gated_ffn": False}, {"num_kv_heads": 1}])
def test_every_shape_counts_and_runs(change):
    arch = msgspec.structs.replace(TINY, **change)
    module = decoder(arch)
    assert sum(p.numel() for p in module.parameters()) == arch.parameters()
    assert module(tokens()).shape == (2, 12, 32)


def test_no_position_sees_a_later_one():
    module, first = decoder().double(), tokens()
    second = first.clone()
    second[:, 8:] = (second[:, 8:] + 1) % 32
    a, b = module(first), module(second)
    assert torch.equal(a[:, :8], b[:, :8])
    assert not torch.allclose(a[:, 8:], b[:, 8:])


def test_no_sample_sees_another():
    module, rows = decoder().double(), tokens(3)
    # One row alone takes other matrix kernels: rounding of fp64, no more.
    torch.testing.assert_close(module(rows)[1:2], module(rows[1:2]), rtol=1e-12, atol=1e-14)


def test_attention_is_the_textbook_one_for_each_head_group():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 6, 8, generator=generator, dtype=torch.float64)
    mask = torch.ones(6, 6).tril().bool()
    for head in range(4):
        scores = (q[:, head] @ k[:, head // 2].transpose(1, 2)) / 8**0.5
        expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, head // 2]
        torch.testing.assert_close(attend(q, k, v)[:, head], expected, rtol=1e-12, atol=1e-14)


def test_rotation_keeps_lengths_and_scores_depend_on_distance_alone():
    module = decoder().double()
    module.rotary.fill()
    cos, sin = module.rotary(16)
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotate(x.expand(1, 16, 1, 8), cos, sin)[0, :, 0]
    torch.testing.assert_close(turned.norm(dim=-1), x.norm().expand(16), rtol=1e-12, atol=0)
    scores = turned @ turned.T
    for distance in range(15):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-9, atol=1e-9)


def test_built_on_meta_and_filled_it_starts_with_the_same_bits():
    with torch.device("meta"):
        late = Decoder(TIED)
    late.to_empty(device="cpu")
    initialize_decoder(late, 5)
    assert inspect.ties(late) == [("embed_tokens.weight", "lm_head.weight")]
    soon = decoder(TIED, 5)
    for name, value in [*soon.named_parameters(), *soon.named_buffers()]:
        assert torch.equal(value, late.get_parameter(name) if "weight" in name else late.get_buffer(name)), name


def test_the_start_is_that_of_torchs_seed_where_none_is_given():
    with torch.random.fork_rng():
        torch.manual_seed(11)
        given = Decoder(TINY)
    for a, b in zip(given.parameters(), decoder(TINY, 11).parameters(), strict=True):
        assert torch.equal(a, b)


def test_wrappers_do_not_change_the_start():
    wrapped = nn.Sequential()
    wrapped.module = torch.compile(decoder(TINY, 1), backend="eager")
    initialize_decoder(wrapped, 9)
    for a, b in zip(wrapped.parameters(), decoder(TINY, 9).parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(LookupError):
        initialize_decoder(nn.Linear(2, 2), 0)


def test_the_untrained_model_knows_nothing():
    total, count = next_token_sums(decoder()(tokens(8)), tokens(8))
    # Logits start with a variance of about 1: the loss is half of that above the log of the vocabulary.
    assert (total / count).item() == pytest.approx(torch.log(torch.tensor(32.0)).item() + 0.5, abs=0.5)


def test_the_loss_counts_only_labels_that_are_not_ignored():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[0, 1, -100, 3, -100], [-100, -100, -100, 6, 2]])
    total, count = next_token_sums(logits, labels)
    expected = [-F.log_softmax(logits[b, s], -1)[t] for b, r in enumerate(labels) for s, t in enumerate(r) if t >= 0]
    assert count == len(expected) == 5
    torch.testing.assert_close(total, torch.stack(expected).sum(), rtol=1e-12, atol=0)
    assert next_token_sums(logits.bfloat16(), labels)[0].dtype == torch.float32
    nothing, none = next_token_sums(logits, torch.full_like(labels, -100))
    assert nothing == 0 and none == 0


def test_dropout_acts_in_training_only():
    module = decoder(msgspec.structs.replace(TINY, dropout=0.5))
    assert not torch.equal(module(tokens()), module(tokens()))
    module.eval()
    assert torch.equal(module(tokens()), module(tokens()))


def test_sampling_continues_the_prompt_and_repeats_under_one_generator():
    module = decoder().train()
    prompt = tokens(2, 4)
    a, b = (generate(module, prompt, 20, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert a.shape == (2, 24) and torch.equal(a, b) and torch.equal(a[:, :4], prompt)
    assert module.training
    greedy = generate(module, prompt, 1, temperature=0)
    assert torch.equal(greedy[:, -1], module(prompt)[:, -1].argmax(-1))
    assert generate(module, prompt, 30, vocabulary=5)[:, 4:].max() < 5


def test_the_fast_linear_layer_computes_what_torchs_does(monkeypatch):
    if not linear.has_onednn_linear():
        pytest.skip("this torch has no oneDNN linear operator")
    layers = {}
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(0))
    layer = linear.Linear(24, 40)
    exact = F.linear(x.double(), layer.weight.double())
    for fast in (True, False):
        monkeypatch.setattr(linear, "onednn_is_faster", lambda fast=fast: fast)
        own, given = copy.deepcopy(layer), x.clone().requires_grad_()
        y = own(given)
        y.square().sum().backward()
        layers[fast] = (y.detach(), given.grad, own.weight.grad)
        # fp32 sums of 24 products of numbers below 4: 24 roundings of at most 2^-24 each.
        torch.testing.assert_close(y.double(), exact, rtol=24 * 2**-24, atol=24 * 2**-22)
    for ours, torchs in zip(layers[True], layers[False], strict=True):
        assert ours.shape == torchs.shape and ours.is_contiguous()
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    assert not layers[True][0]._is_view()


def test_the_same_batch_gives_the_same_bits_twice():
    runs = []
    for _ in range(2):
        module = decoder()
        next_token_sums(module(tokens()), tokens())[0].backward()
        runs.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.skipif(not linear.onednn_is_faster(), reason="on this processor the linear layer is torch's own")
def test_a_backward_in_two_halves_multiplies_as_often_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(linear.Linear(4, 6), nn.Tanh(), linear.Linear(6, 5))
    weights, made = list(layers.parameters()), list[torch.Tensor]()
    received = torch.randn(2, 3, 4, requires_grad=True)
    counted = linear.onednn_linear

    def counting(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made.append(x)
        return counted(x, weight)

    monkeypatch.setattr(linear, "onednn_linear", counting)
    output = layers(received)
    assert len(made) == 2
    rest = torch_private.backward_to_input(output, torch.ones_like(output), received, weights)
    assert len(made) == 4
    torch_private.backward_to_weights(weights, rest)
    assert len(made) == 6
