"""Building a module: under the seed, out of meta, within memory, and with every number known."""

import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs.arch import Arch
from shardwise.models import inspect, materialize
from shardwise.models.decoder import Decoder

TINY = Arch("tiny", 32, 16, 2, 4, 2, 8, 24, 16, tied_embeddings=True)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Embedding(5, 3))


def on_meta(factory):
    def build():
        with torch.device("meta"):
            return factory()

    return build


def values(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_one_seed_gives_the_same_bits_and_another_gives_others():
    a, b, c = (values(materialize.build(small, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])


def test_the_callers_random_state_stands_as_before():
    def drawing():
        random.random()
        np.random.rand()
        return small()

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    materialize.build(drawing, 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.random.get_state()[1].tolist() == before[2]


def test_python_and_numpy_draws_follow_the_seed_too():
    def drawing():
        module = nn.Linear(1, 1)
        nn.init.constant_(module.weight, random.random() + np.random.rand())
        return module

    assert torch.equal(materialize.build(drawing, 1).weight, materialize.build(drawing, 1).weight)


def test_meta_modules_are_initialised_by_their_own_rules():
    module = materialize.build(on_meta(small), 3)
    assert all(torch.isfinite(value).all() and not value.is_meta for value in values(module))
    norm = module[1]
    assert torch.equal(norm.weight, torch.ones(3)) and torch.equal(norm.running_var, torch.ones(3))
    assert norm.num_batches_tracked == 0
    again = materialize.build(on_meta(small), 3)
    assert all(torch.equal(x, y) for x, y in zip(values(module), values(again), strict=True))


def test_attention_keeps_its_parents_rule():
    module = materialize.build(on_meta(lambda: nn.MultiheadAttention(8, 2)), 0)
    assert torch.equal(module.in_proj_bias, torch.zeros(24)) and torch.equal(module.out_proj.bias, torch.zeros(8))


def test_our_decoder_out_of_meta_is_the_one_built_on_cpu_ties_and_all():
    late, soon = (
        materialize.build(on_meta(lambda: Decoder(TINY)), 4),
        materialize.build(lambda: Decoder(TINY), 4),
    )
    assert inspect.ties(late) == inspect.ties(soon) != []
    assert all(torch.equal(x, y) for x, y in zip(values(late), values(soon), strict=True))


class Forgetful(nn.Module):
    """What torch's own recipe leaves as garbage: a parameter of torch.full, and buffers, saved or not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.full((2,), 0.5))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("small", torch.arange(4, dtype=torch.uint8))


def test_what_nothing_initialises_is_named():
    with pytest.raises(ModelError) as caught:
        materialize.build(on_meta(Forgetful), 0)
    for name in ("scale", "table", "index", "small"):
        assert name in caught.value.what
    assert "inner" not in caught.value.what


class Remembering(Forgetful):
    def init_weights(self) -> None:
        self.inner.reset_parameters()
        nn.init.constant_(self.scale, 0.5)
        for buffer in self.buffers():
            buffer.copy_(torch.arange(4))


def test_the_suggested_fix_makes_the_error_vanish():
    module = materialize.build(on_meta(Remembering), 0)
    assert torch.equal(module.table, torch.arange(4.0)) and torch.equal(module.index, torch.arange(4))
    assert "table" not in module.state_dict()
    assert materialize.build(Forgetful, 0).scale[0] == 0.5


def test_what_already_has_values_keeps_them():
    def half() -> nn.Module:
        kept = nn.Linear(2, 2)
        with torch.device("meta"):
            late = nn.Linear(2, 2)
        nn.init.constant_(kept.weight, 7.0)
        return nn.Sequential(kept, late).requires_grad_(False)

    module = materialize.build(half, 0)
    assert torch.equal(module[0].weight, torch.full((2, 2), 7.0))
    assert not module[1].weight.requires_grad


def test_a_given_module_is_taken_as_it_is():
    module = small()
    before = [value.clone() for value in values(module)]
    assert materialize.build(module, 9) is module
    assert all(torch.equal(x, y) for x, y in zip(values(module), before, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_parameter_that_is_not_finite_is_named(bad):
    module = small()
    with torch.no_grad():
        module[2].weight[3, 1] = bad
    with pytest.raises(ModelError, match=r"2\.weight"):
        materialize.build(module, 0)


@pytest.mark.parametrize("wrap", [lambda factory: factory, on_meta])
def test_more_than_the_host_has_is_refused_before_it_is_filled(wrap):
    built: list[int] = []

    def deep() -> nn.Module:
        layers = []
        for index in range(8):
            layers.append(nn.Linear(256, 256, bias=False))  # 256 KiB each
            built.append(index)
        return nn.Sequential(*layers)

    with pytest.raises(ModelError, match="KiB"):
        materialize.build(wrap(deep), 0, memory_bytes=1024 * 1024 - 1)
    assert len(built) == (3 if wrap is not on_meta else 8)
    materialize.build(wrap(deep), 0, memory_bytes=8 * 256 * 1024)


def test_ranks_of_one_host_share_its_memory(monkeypatch):
    for key, value in {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    with pytest.raises(ModelError):
        materialize.build(lambda: nn.Linear(256, 256, bias=False), 0, memory_bytes=4 * 256 * 1024 - 1)
    materialize.build(lambda: nn.Linear(256, 256, bias=False), 0, memory_bytes=4 * 256 * 1024)


def test_available_memory_is_some_and_less_than_the_machines():
    assert 0 < materialize.available_bytes() <= materialize._meminfo("MemTotal")


@pytest.mark.parametrize("source", [3, lambda: 3, lambda width: nn.Linear(width, 1), "hf:some/model"])
def test_what_makes_no_module_is_an_error(source):
    with pytest.raises(ModelError):
        materialize.build(source, 0)


def test_an_error_in_the_factory_is_the_users_own():
    def broken() -> nn.Module:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        materialize.build(broken, 0)


class TestFactoriesByName:
    wrong: ClassVar = ["torch.nn", ":build", "torch.nn:", "no.such.module:build", "torch.nn:NoSuchLayer"]

    def test_the_named_function_is_found(self):
        assert materialize.load_factory("torch.nn:Identity") is nn.Identity

    @pytest.mark.parametrize("path", wrong)
    def test_a_name_that_leads_nowhere_is_an_error_with_a_fix(self, path):
        with pytest.raises(ModelError) as caught:
            materialize.load_factory(path)
        assert caught.value.fix
