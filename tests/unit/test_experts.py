"""Experts: which of them a token goes to, how much each counts, and that the sums are those of a slow plain loop."""

import copy
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from shardwise.inputs.arch import Arch, Experts
from shardwise.inputs.arch.names import named_sizes
from shardwise.models import grouped, inspect, linear
from shardwise.models.decoder import Decoder, initialize_decoder, next_token_sums
from shardwise.models.experts import Choice, SparseFeedForward, by_expert
from shardwise.models.split_probe import two_split_probe

HIDDEN = 12
ARCH = Arch("tiny", 32, 16, 3, 4, 2, 8, 24, 16, experts=Experts(5, 2, 10, dense_layers=1))
ROUTERS = {
    "softmax, renormalised": Experts(6, 2, 8),
    "softmax as it is": Experts(6, 3, 8, renormalised=False),
    "softmax, scaled": Experts(6, 2, 8, renormalised=False, scale=16.0),
    "sigmoid with a bias": Experts(6, 2, 8, scoring="sigmoid", scale=2.5),
    "one expert": Experts(6, 1, 8),
    "all experts": Experts(3, 3, 8),
}
# fp64: a few dozen roundings of 1.1e-16 each.
EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-13}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(experts: Experts, *, gated: bool = True, shared: nn.Module | None = None) -> SparseFeedForward:
    made = SparseFeedForward(HIDDEN, experts, gated=gated, shared=shared).double()
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters(), start=1):
            parameter.copy_(drawn(*parameter.shape, seed=seed) * 0.4)
        if made.router.bias is not None:
            made.router.bias.copy_(drawn(experts.count, seed=99))
    return made


def chosen_by_hand(token: torch.Tensor, router: Choice) -> list[tuple[int, torch.Tensor]]:
    """One token's experts and weights, the likeliest first, as the families' papers write them."""
    experts, logits = router.experts, router.weight @ token
    if experts.scoring == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    else:
        scores = torch.exp(logits) / torch.exp(logits).sum()
    bias = [0.0] * experts.count if router.bias is None else router.bias.tolist()
    by = [score + more for score, more in zip(scores.tolist(), bias, strict=True)]
    best = sorted(range(experts.count), key=lambda e: -by[e])[: experts.per_token]
    total = sum(scores[e] for e in best) if experts.renormalised else 1.0
    return [(e, experts.scale * scores[e] / total) for e in best]


def by_hand(x: torch.Tensor, made: SparseFeedForward) -> torch.Tensor:
    """A loop over tokens, and over each token's experts."""
    experts, networks = made.router.experts, made.experts
    rows = []
    for token in x.flatten(0, 1):
        total = torch.zeros_like(token)
        for e, weight in chosen_by_hand(token, made.router):
            own = {n: p.unflatten(0, (experts.count, -1))[e] for n, p in networks.named_parameters()}
            up, down = own["up_proj.weight"], own["down_proj.weight"]
            if networks.gate_proj is None:
                inner = F.gelu(up @ token)
            else:
                inner = F.silu(own["gate_proj.weight"] @ token) * (up @ token)
            total = total + weight * (down @ inner)
        if made.shared is not None:
            shared = made.shared(token)
            gate = made.shared_gate
            total = total + (shared if gate is None else shared * torch.sigmoid(gate.weight @ token))
        rows.append(total)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", ROUTERS)
def test_each_token_goes_to_its_best_experts_with_the_familys_weights(name: str) -> None:
    router = layer(ROUTERS[name]).router
    tokens = drawn(17, HIDDEN)
    weights, chosen = router(tokens)
    for token, ours, experts in zip(tokens, weights, chosen, strict=True):
        expected = dict(chosen_by_hand(token, router))
        assert set(experts.tolist()) == set(expected)
        torch.testing.assert_close(ours, torch.stack([expected[int(e)] for e in experts]), **EXACT)
    if ROUTERS[name].renormalised:
        torch.testing.assert_close(weights.sum(1), torch.full_like(weights[:, 0], ROUTERS[name].scale), **EXACT)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    router = layer(ROUTERS["sigmoid with a bias"]).router
    tokens = drawn(9, HIDDEN)
    assert router.bias is not None and "bias" not in dict(router.named_parameters())
    router.bias.zero_()
    plain, before = router(tokens)
    router.bias[4] = 10.0
    weights, chosen = router(tokens)
    assert (chosen == 4).any(1).all() and not (before == 4).any(1).all()
    kept = (chosen.sort(1).values == before.sort(1).values).all(1)
    torch.testing.assert_close(weights[kept].sort(1).values, plain[kept].sort(1).values, **EXACT)


@pytest.mark.parametrize(
    ("experts", "gated"),
    [*((experts, True) for experts in ROUTERS.values()), (ROUTERS["softmax, renormalised"], False)],
    ids=[*ROUTERS, "plain"],
)
def test_the_layer_and_its_gradients_are_those_of_a_loop_over_tokens(experts: Experts, gated: bool) -> None:
    shared = linear.Linear(HIDDEN, HIDDEN) if experts.per_token == 2 else None
    made = layer(msgspec.structs.replace(experts, shared_gate=experts.scale == 1), gated=gated, shared=shared)
    found = []
    for function in (made, lambda x: by_hand(x, made)):
        x = drawn(2, 7, HIDDEN, seed=50).requires_grad_()
        made.zero_grad()
        y = function(x)
        (y * drawn(*y.shape, seed=51)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in made.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_an_expert_without_tokens_and_one_with_all_of_them() -> None:
    made = layer(Experts(4, 1, 8))
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[2] = 1.0
    x = drawn(1, 5, HIDDEN).abs()
    made(x).sum().backward()
    gradient = made.experts.up_proj.weight.grad.unflatten(0, (4, -1))
    assert gradient[2].abs().min() > 0 and not gradient[[0, 1, 3]].any()


def test_rows_are_sorted_by_expert_and_come_back() -> None:
    chosen = torch.tensor([[3, 1], [1, 0], [3, 2], [1, 3]])
    order, place, ends = by_expert(chosen, 5)
    assert chosen.flatten()[order].tolist() == sorted(chosen.flatten().tolist())
    assert order[place].tolist() == list(range(8))
    assert ends.tolist() == [1, 4, 5, 8, 8] and ends.dtype == torch.int32
    assert order[1:4].tolist() == [1, 2, 6]  # of one expert in the order of the tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast", [True, False])
def test_grouped_products_are_one_product_a_group(dtype: torch.dtype, fast: bool, monkeypatch: Any) -> None:
    if fast and not linear.has_onednn_linear():
        pytest.skip("this torch has no oneDNN linear operator")
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: fast)
    rows, weight = drawn(11, 6).to(dtype), drawn(4, 6, 5, seed=1).to(dtype)
    other, ends = drawn(11, 7, seed=2).to(dtype), torch.tensor([3, 3, 10, 11], dtype=torch.int32)
    product, sums = grouped.grouped_product(rows, weight, ends), grouped.grouped_outer(rows, other, ends)
    # A sum of at most 7 products of numbers below 4, rounded once in the result.
    bound = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 64 * torch.finfo(dtype).eps}
    for group, (first, end) in enumerate(((0, 3), (3, 3), (3, 10), (10, 11))):
        mine, others = rows[first:end].double(), other[first:end].double()
        torch.testing.assert_close(product[first:end].double(), mine @ weight[group].double(), **bound)
        torch.testing.assert_close(sums[group].double(), mine.t() @ others, **bound)


def test_the_grouped_layer_has_the_gradients_of_its_products() -> None:
    made = grouped.GroupedLinear(3, 4, 5).double()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(made, {"weight": weight}, (rows, ends))

    given = drawn(6, 4).requires_grad_(), drawn(15, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(product, given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shapes_do_not_depend_on_values(dtype: torch.dtype) -> None:
    """Fake tensors and meta tensors go through, forward and backward, in every dtype."""
    for mode, device in ((FakeTensorMode(), "cpu"), (torch.device("meta"), "meta")):
        with mode:
            made = SparseFeedForward(HIDDEN, ROUTERS["softmax, renormalised"], gated=True)
            for parameter in made.parameters():
                parameter.data = torch.empty_like(parameter, dtype=dtype)
            x = torch.empty(2, 3, HIDDEN, dtype=dtype, device=device, requires_grad=True)
            y = made(x)
            assert y.shape == x.shape and y.dtype == dtype
            y.sum().backward()
            assert all(p.grad is not None and p.grad.shape == p.shape for p in made.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_the_compiler_takes_it_in_one_piece(backend: str) -> None:
    made, x = layer(ROUTERS["softmax, renormalised"]).float(), drawn(2, 9, HIDDEN).float()
    compiled = torch.compile(made, backend=backend, fullgraph=True)
    found = []
    for function in (made, compiled):
        made.zero_grad()
        y = function(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in made.parameters())])
    for ours, theirs in zip(*found, strict=True):
        # In norm: four products of at most 18 terms after one another, each rounded to 6e-8.
        assert (ours - theirs).norm() <= 4 * 18 * 6e-8 * theirs.norm()


def test_in_bf16_the_choice_is_that_of_fp32_products() -> None:
    """Products are made of what bf16 holds, and not rounded to it: two experts hardly ever score alike."""
    experts = Experts(64, 4, 8)
    router = Choice(HIDDEN, experts)
    nn.init.normal_(router.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    router, tokens = router.bfloat16(), drawn(500, HIDDEN).bfloat16()
    weights, chosen = router(tokens)
    exact = (tokens.double() @ router.weight.double().t()).topk(4, dim=1).indices
    assert weights.dtype == torch.float32 and torch.equal(chosen, exact)


# ---------------------------------------------------------------- in the decoder


@pytest.mark.parametrize(
    "change",
    [
        {}, {"dense_layers": 0}, {"shared_ffn_size": 12}, {"shared_ffn_size": 12, "shared_gate": True},
        {"scoring": "sigmoid", "shared_ffn_size": 6},
    ],
)  # fmt: skip
def test_a_decoder_has_the_names_and_numbers_that_its_arch_counts(change: dict[str, Any]) -> None:
    arch = msgspec.structs.replace(ARCH, qk_norm=True, experts=msgspec.structs.replace(ARCH.experts, **change))
    with torch.device("meta"):
        module = Decoder(arch)
    assert named_sizes(arch) == {name: p.numel() for name, p in module.named_parameters()}
    assert arch.engine_problem() == ""
    assert [type(block.ffn).__name__ for block in module.blocks].count("FeedForward") == arch.dense_layers


def test_built_on_meta_and_filled_it_starts_with_the_same_bits() -> None:
    arch = msgspec.structs.replace(ARCH, experts=msgspec.structs.replace(ARCH.experts, scoring="sigmoid"))
    with torch.device("meta"):
        late = Decoder(arch)
    late.to_empty(device="cpu")
    initialize_decoder(late, 5)
    soon = Decoder(arch)
    soon.init_weights(5)
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (late, soon))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_experts_mix_no_samples() -> None:
    module = Decoder(ARCH)
    assert inspect.mixes_samples(module) == []
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    class Summed:
        def __init__(self, total: torch.Tensor, count: torch.Tensor) -> None:
            self.total, self.count = total, count

    probe = two_split_probe(
        module, lambda out, given: Summed(*next_token_sums(out, given["labels"])), lambda b: ((b["tokens"],), {}), batch
    )
    assert probe.verdict == "additive", probe.reason


def test_the_same_batch_gives_the_same_bits_twice() -> None:
    tokens, runs = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(1)), []
    module = Decoder(ARCH)
    for _ in range(2):
        again = copy.deepcopy(module)
        next_token_sums(again(tokens), tokens)[0].backward()
        runs.append([p.grad for p in again.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
