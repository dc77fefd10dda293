"""Recompute keeps fewer bytes and changes no bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import recompute
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.parallel import precision
from shardwise.torch_private import products_and_attention
from tests.distributed import work
from tests.distributed.pool import Pool
from tests.distributed.test_parity import STEPS, trained, worst

KINDS = ["selective", "full"]


class Kept(TorchDispatchMode):
    """Bytes that the selective kind keeps by its own list of operators, which no saved-tensor hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in products_and_attention():
            first = out[0] if isinstance(out, tuple) else out
            self.bytes += first.numel() * first.element_size()
        return out


def run(kind: str, dtype: str, dropout: float) -> tuple[nn.Module, torch.Tensor, int]:
    """A model after one backward, its loss, and the bytes kept for it (parameters are among them in every kind)."""
    module = Decoder(work.arch(dropout=dropout))
    initialize_decoder(module, 0)
    precision.to_master(module, dtype)
    if kind != "none":
        for block in module.blocks:
            recompute.wrap(block, kind)
    if precision.is_mixed(dtype):
        precision.apply_compute_copies(module, list(module.blocks), [module.blocks[1].ffn], dtype)
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(5)
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), kept:
        loss = module(torch.arange(24).view(2, 12) % work.VOCABULARY).float().square().sum()
    loss.backward()
    return module, loss, sum(storages.values()) + (kept.bytes if kind == "selective" else 0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_bits_of_a_block_that_kept_everything(kind: str, dtype: str, dropout: float) -> None:
    """With dropout, both forwards have one mask. In bf16 a module in a block is kept in fp32."""
    plain, loss, _ = run("none", dtype, dropout)
    module, again, _ = run(kind, dtype, dropout)
    assert torch.equal(loss, again)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert list(gradients) == [name for name, _ in module.named_parameters()]
    for name, p in module.named_parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype
        assert torch.equal(p.grad, gradients[name]), name


def test_another_mask_in_the_second_forward_would_be_seen() -> None:
    """The planted fault: without the first forward's random numbers the gradients differ."""
    plain, _, _ = run("none", "fp64", 0.3)
    broken = Decoder(work.arch(dropout=0.3)).double()
    initialize_decoder(broken, 0)
    for block in broken.blocks:
        recompute.wrap(block, "full")
        recompute.during(block, _other_random_numbers)
    torch.manual_seed(5)
    broken(torch.arange(24).view(2, 12) % work.VOCABULARY).float().square().sum().backward()
    assert not torch.equal(broken.blocks[0].ffn.up_proj.weight.grad, plain.blocks[0].ffn.up_proj.weight.grad)


@contextmanager
def _other_random_numbers() -> Iterator[None]:
    torch.manual_seed(6)
    yield


def test_less_is_kept_the_more_is_recomputed() -> None:
    everything, some, little = (run(kind, "fp64", 0.0)[2] for kind in ("none", "selective", "full"))
    assert little < some < everything


def test_without_gradients_a_block_runs_once_and_as_it_is() -> None:
    module = Decoder(work.arch(dropout=0.0))
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        plain = module(tokens)
        recompute.wrap(module.blocks[0], "full")
        assert torch.equal(module(tokens), plain)


@cache
def reference() -> dict[str, Any]:
    return work.reference(steps=STEPS, shape={"tied_embeddings": True})


def taking_turns(cases: list[tuple[int, ...]]) -> list[Any]:
    """Each case with both kinds; by day it has one of them, in turn."""
    return [
        pytest.param(*case, kind, marks=() if KINDS[index % 2] == kind else pytest.mark.nightly)
        for index, case in enumerate(cases)
        for kind in KINDS
    ]


@pytest.mark.parametrize(("world", "zero", "kind"), taking_turns([(1, 0), (2, 0), (3, 1), (2, 2), (4, 3)]))
def test_recompute_composes_with_every_stage(pool: Pool, tmp_path: Path, world: int, zero: int, kind: str) -> None:
    expected = reference()
    results, tensors = trained(
        pool, tmp_path, world, zero=zero, accumulation=2, recompute=kind, shape={"tied_embeddings": True}
    )
    np.testing.assert_allclose(results[0]["losses"], expected["losses"], rtol=1e-10)
    assert worst(tensors, expected["tensors"], "grad/") < 1e-10
    assert worst(tensors, expected["tensors"], "param/") < 1e-10


@pytest.mark.parametrize(("zero", "kind"), taking_turns([(0,), (1,), (3,)]))
def test_recompute_in_bf16_gives_the_bits_of_none_on_shards_too(
    pool: Pool, tmp_path: Path, zero: int, kind: str
) -> None:
    """With modules kept in fp32 inside a block (a unit in a unit) and dropout."""
    arguments: dict[str, Any] = {
        "zero": zero, "precision": "bf16", "accumulation": 2, "shape": {"dropout": 0.2},
        "model": {"fp32_modules": ["blocks.0.ffn_norm", "blocks.1.ffn"]},
    }  # fmt: skip
    (tmp_path / "none").mkdir()
    plain, one = trained(pool, tmp_path / "none", 2, **arguments)
    again, two = trained(pool, tmp_path, 2, recompute=kind, **arguments)
    assert plain == again
    assert all(np.array_equal(one[name], two[name]) for name in one)
