"""What is split by whom: guessed for known patterns only, given by patterns, and refused with a fix that works."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.models.decoder import Decoder, attend
from shardwise.parallel import roles
from tests.distributed import work


class FeedForward(nn.Module):
    def __init__(self, between: nn.Module | None = None, *, wide: int = 8, linear: type = nn.Linear) -> None:
        super().__init__()
        self.fc1, self.fc2 = linear(4, wide), linear(8, 4)
        self.between = between or nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.between(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self, *, head_dim: int | None = 2, keys: int = 4, **more: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 8), nn.Linear(4, keys), nn.Linear(4, keys)
        self.o_proj = nn.Linear(8, 4)
        if head_dim is not None:
            self.head_dim = head_dim
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    def __init__(self, keys: int = 4, *, wide: int | None = None) -> None:
        super().__init__()
        self.head_dim = 2
        self.qkv, self.proj = nn.Linear(4, wide or 8 + 2 * keys), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.qkv(x)
        q, k, v = both.split((both.shape[-1] // 2, both.shape[-1] // 4, both.shape[-1] // 4), dim=-1)
        q, k, v = (one.unflatten(-1, (-1, 2)).transpose(1, 2) for one in (q, k, v))
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))


class ByHead(nn.Module):
    """GPT-NeoX's: each head's q, k and v together."""

    def __init__(self, name: str = "qkv") -> None:
        super().__init__()
        self.head_dim = 2
        self.add_module(name, nn.Linear(4, 24))
        self.dense, self.fused = nn.Linear(8, 4), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = getattr(self, self.fused)(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        return self.dense(attend(*both.chunk(3, dim=-1)).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up in one layer, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(4, 14), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate) * up)


class Residual(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Normed(FeedForward):
    """No module shows that it norms between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.nn.functional.normalize(self.fc1(x), dim=-1))


class Masked(FeedForward):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mask


class CountsItself(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, k + v).transpose(1, 2).flatten(2))


def OnMeta(module: nn.Module) -> nn.Module:
    return module.to("meta")


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    """An embedding, blocks of one inner module with a norm, a norm and a head over the vocabulary."""

    def __init__(self, *inner: nn.Module, table: nn.Module | None = None, **more: Any) -> None:
        super().__init__()
        self.table = table or nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"inner": one, "norm": nn.LayerNorm(4)}) for one in inner)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 11)
        for name, value in more.items():
            setattr(self, name, value)


def found(model: nn.Module, given: dict[str, str] | None = None) -> roles.Roles:
    return roles.of(model, list(model.blocks), given)


def test_our_decoder_is_split_whole_and_by_position() -> None:
    got = found(Decoder(work.arch()))
    assert [region.path for region in got.regions] == [
        f"blocks.{index}.{name}" for index in range(3) for name in ("attention", "ffn")
    ]
    assert (got.embedding, got.head, got.sequence, got.known, got.why) == ("embed_tokens", "lm_head", True, True, ())


@pytest.mark.parametrize(
    "inner", [FeedForward(), Attention(), Fused(), Residual()], ids=["plain", "attention", "fused", "residual"]
)
def test_known_names_make_a_region(inner: nn.Module) -> None:
    got = found(Model(inner, inner))
    assert [region.path for region in got.regions] == ["blocks.0.inner"], "one module used twice is one region"
    assert got.sequence
    assert not got.known, "what has no weights may look at several positions: the user's word"
    assert "unless asked for" in got.why[-1]


def test_a_fused_layer_is_cut_into_queries_keys_and_values() -> None:
    assert found(Model(Fused(keys=4))).regions[0].parts == (8, 4, 4)


WHOLE = [
    (FeedForward(nn.LayerNorm(8)), "other weights"),
    (FeedForward(nn.LayerNorm(8, elementwise_affine=False)), "LayerNorm may not work number by number"),
    (FeedForward(nn.Softmax(-1)), "Softmax may not work number by number"),
    (FeedForward(wide=16), "not its last one's inputs"),
    (FeedForward(linear=Scaled), "no plain nn.Linear"),
    (Attention(head_dim=None), "no head_dim"),
    (Attention(num_heads=4), "counts its heads by num_heads"),
    (Attention(q_norm=nn.LayerNorm(8)), "weights across heads"),
    (Attention(q_norm=nn.LayerNorm(8, elementwise_affine=False)), "a norm that may be across heads"),
    (Attention(scale=nn.Parameter(torch.ones(2, 1, 1))), "weights across heads"),
    (Attention(gate=nn.Linear(4, 8)), "weights across heads"),
    (Fused(wide=17), "not q, k and v one after another"),
    (Normed(), "split in two it computes something else"),
    (ByHead(), "split in two it computes something else"),
    (Masked(), "could not be tried"),
]


@pytest.mark.parametrize(("inner", "why"), WHOLE, ids=[why for _, why in WHOLE])
def test_what_is_not_known_to_be_split_rightly_stays_whole_and_says_why(inner: nn.Module, why: str) -> None:
    got = found(Model(inner))
    assert got.regions == ()
    assert any(why in reason for reason in got.why)


def test_weights_by_head_and_scalars_may_stand_in_an_attention() -> None:
    inner = Attention(q_norm=nn.LayerNorm(2), scale=nn.Parameter(torch.ones(1)))
    assert len(found(Model(inner)).regions) == 1


NOT_BY_POSITION = [
    (Model(FeedForward(), positions=nn.Embedding(5, 4)), "positions may look"),
    (Model(FeedForward(), mixer=nn.Conv1d(4, 4, 3)), "mixer may look"),
    (Model(FeedForward(), temperature=nn.Parameter(torch.ones(1))), "the model may look"),
    (Model(FeedForward(), head=nn.Linear(4, 3)), "needs a split embedding"),
    (Model(FeedForward(), table=nn.Embedding(11, 4, padding_idx=0)), "padding_idx treats some rows apart"),
    (Model(), "split blocks"),
]


@pytest.mark.parametrize(("model", "why"), NOT_BY_POSITION, ids=[why for _, why in NOT_BY_POSITION])
def test_what_may_look_at_several_positions_is_no_sequence_parallel(model: nn.Module, why: str) -> None:
    got = found(model)
    assert not got.sequence
    assert any(why in reason for reason in got.why), got.why


def test_a_table_of_positions_is_no_sequence_parallel_and_a_rotary_one_is() -> None:
    for name, expected in (("sinusoid", False), ("rotary", True)):
        model = Model(FeedForward())
        table = nn.Module()
        table.register_buffer("table", torch.zeros(5, 4))
        model.add_module(name, table)
        assert found(model).sequence is expected


def test_an_embedding_that_is_tied_to_something_else_stays_whole() -> None:
    model = Model(FeedForward(), head=nn.Linear(4, 11), other=nn.Linear(4, 11))
    model.head = model.other  # `other` is the last linear, under its first name
    model.second = nn.Module()
    model.second.weight = model.table.weight
    got = found(model)
    assert got.embedding == ""
    assert any("tied to second" in reason for reason in got.why)


REFUSED = [
    (FeedForward(), {"blocks.*.fc1": "colum"}, "'colum' is no role", {"blocks.*.fc1": "column", "blocks.*.fc2": "row"}),
    (FeedForward(), {"block.*.fc1": "column"}, "no module is at", {"blocks.0.inner.fc1": "replicated"}),
    (FeedForward(), {"blocks.*.fc1": "column"}, "1 column layers and 0 row", {"blocks.*.fc1": "replicated"}),
    (FeedForward(), {"blocks.*.norm": "row"}, "no plain nn.Linear", {"blocks.0.norm": "replicated"}),
    (FeedForward(linear=Scaled), {"*.fc1": "column", "*.fc2": "row"}, "no plain nn.Linear",
     {"blocks.0.inner.fc1": "replicated"}),
    (OnMeta(FeedForward(wide=16)), {"*.fc1": "column", "*.fc2": "row"}, "how parts lie is unknown",
     {"blocks.0.inner.fc1": "replicated"}),
    (OnMeta(Attention(num_heads=4)), {"*_proj": "column", "*.o_proj": "row"}, "counts its heads by num_heads",
     {"blocks.0.inner.q_proj": "replicated"}),
    (OnMeta(Fused(wide=17)), {"*.qkv": "column", "*.proj": "row"}, "not q, k and v",
     {"blocks.0.inner.qkv": "replicated"}),
    (Normed(), {"*.fc1": "column", "*.fc2": "row"}, "computes something else", {"blocks.0.inner.fc1": "replicated"}),
    (CountsItself(keys=8), {"*_proj": "column", "*.o_proj": "row"}, "computes something else",
     {"blocks.0.inner.q_proj": "replicated"}),
    (FeedForward(), {"head": "head", "blocks.*.fc1": "head"}, "have the role 'head'", {"head": "head"}),
    (FeedForward(), {"norm": "embedding"}, "cannot be an embedding", {"norm": "replicated"}),
]  # fmt: skip


@pytest.mark.parametrize(("inner", "given", "message", "fixed"), REFUSED, ids=[one[2] for one in REFUSED])
def test_a_role_that_cannot_be_is_refused_and_the_fix_is_not(
    inner: nn.Module, given: dict[str, str], message: str, fixed: dict[str, str]
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        found(Model(inner), given)
    assert "fix: " in str(caught.value)
    found(Model(inner), fixed)


def test_given_roles_are_taken_and_replicated_ones_are_not_guessed() -> None:
    model = Model(FeedForward(), FeedForward())
    got = found(model, {"blocks.0.inner.fc*": "replicated", "head": "replicated"})
    assert [region.path for region in got.regions] == ["blocks.1.inner"]
    assert (got.embedding, got.head, got.sequence) == ("table", "", False)


def test_a_given_fused_layer_is_cut_into_its_parts() -> None:
    got = found(Model(Fused()), {"*.qkv": "column", "*.proj": "row"})
    assert got.regions[0].parts == (8, 4, 4)


@pytest.mark.parametrize(
    ("inner", "given", "parts", "head_dim"),
    [
        (ByHead("query_key_value"), {"*.query_key_value": "column", "*.dense": "row"}, (), 6),
        (ByHead(), {"*.qkv": "column", "*.dense": "row"}, (), 6),
        (Gated(), {"*.gate_up": "column", "*.down": "row"}, (7, 7), 1),
    ],
    ids=["by-head", "by-head-under-a-known-name", "gate-and-up"],
)
def test_of_the_ways_to_cut_a_given_layer_the_one_is_taken_that_computes_the_same(
    inner: nn.Module, given: dict[str, str], parts: tuple[int, ...], head_dim: int
) -> None:
    region = found(Model(inner), given).regions[0]
    assert (region.parts, region.head_dim) == (parts, head_dim)


def test_a_trial_leaves_everything_as_it_was() -> None:
    model = Model(FeedForward(nn.Dropout(0.5)))
    model.blocks[0]["inner"].fc1.eval()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    assert found(model).regions
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert not any("forward" in vars(m) for m in model.modules())
