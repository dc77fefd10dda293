"""Mixture: exact shares, a pure function of (seed, k)."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.batches import Batches
from shardwise.data.mixture import BLOCK, Mixture, draws, quotas, recipe_data
from shardwise.data.tokens import TokenData
from shardwise.errors import DataError
from shardwise.inputs.recipe import DataSpec, Source

exact = settings(derandomize=True, deadline=None, max_examples=60)
weights = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


@exact
@given(weights=weights)
def test_quotas_use_every_slot_and_meet_each_weight_to_within_one(weights: list[float]) -> None:
    counts = quotas(weights)
    assert sum(counts) == BLOCK and min(counts) >= 1
    lifted = sum(1 for weight in weights if weight / sum(weights) * BLOCK < 1)
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - weight / sum(weights) * BLOCK) <= 1 + lifted


@exact
@given(weights=weights, seed=st.integers(0, 99), block=st.integers(0, 10**9))
def test_every_block_has_exactly_the_share_of_each_source_and_draws_go_on_in_order(
    weights: list[float], seed: int, block: int
) -> None:
    shares = quotas(weights)
    sources, counts = draws(np.arange(block * BLOCK, (block + 1) * BLOCK), shares, seed)
    for source, share in enumerate(shares):
        assert counts[sources == source].tolist() == list(range(block * share, (block + 1) * share))


def test_a_draw_depends_on_its_position_alone() -> None:
    shares = quotas([3, 1])
    whole = draws(np.arange(3 * BLOCK), shares, 5)
    for at in (0, 17, BLOCK - 1, BLOCK, 2 * BLOCK + 5):
        one = draws(np.array([at]), shares, 5)
        assert (one[0][0], one[1][0]) == (whole[0][at], whole[1][at])


def samples_of(data: Any, ranks: int, micro_batches: int, start: int = 0) -> list[list[int]]:
    options = {"seed": 1, "global_batch": 64, "micro_batches": micro_batches, "epochs": 40, "start": start}
    loaders = [data.loader(rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    return [
        [sample for micros in together for micro in micros if micro.weight for sample in micro.batch.tolist()]
        for together in zip(*loaders, strict=True)
    ]


def test_a_mixture_of_datasets_is_the_same_for_any_ranks_and_goes_through_each_source_in_turn() -> None:
    data = Mixture([(list(range(100)), 3.0), (list(range(1000, 1010)), 1.0)])
    steps = samples_of(data, 1, 1)
    assert samples_of(data, 3, 2) == steps
    assert samples_of(data, 2, 1, start=64 * 5) == steps[5:]
    first_block = [sample for step in steps for sample in step][:BLOCK]
    assert sum(sample >= 1000 for sample in first_block) == BLOCK // 4
    small = [sample for sample in first_block if sample >= 1000]
    for epoch in range(len(small) // 10):
        assert sorted(small[epoch * 10 : epoch * 10 + 10]) == list(range(1000, 1010))
    assert max(Counter(first_block).values()) <= BLOCK // 4 // 10 + 1


def test_a_mixture_of_texts_gives_whole_sequences_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_bytes(b"a" * 400)
    (tmp_path / "b.txt").write_bytes(b"b" * 400)
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    options = {"sequence_length": 16, "valid_fraction": 0.1}
    data = Mixture([(TokenData(texts[0], **options), 1), (TokenData(texts[1], **options), 3)])
    loader = data.loader(seed=0, global_batch=8, micro_batches=1)
    batches = [next(loader).batches[0].batch for _ in range(BLOCK // 8)]
    starts = torch.cat([batch["tokens"][:, 0] for batch in batches])
    assert int((starts == ord("b")).sum()) == 3 * BLOCK // 4
    assert all(torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1]) for batch in batches)
    spec = DataSpec(
        mixture=(Source((texts[0],), 1.0), Source((texts[1],), 3.0)), sequence_length=16, valid_fraction=0.1
    )
    train, valid = recipe_data(spec)
    again = next(train.loader(seed=0, global_batch=8, micro_batches=1)).batches[0].batch
    assert torch.equal(again["tokens"], batches[0]["tokens"])
    assert valid is not None and len(valid) == 4
    held_out = valid.loader(seed=0, global_batch=3, micro_batches=1, epochs=1, shuffle=False, last="short")
    rows = torch.cat([micros.batches[0].batch["tokens"] for micros in held_out])
    assert sorted(rows[:, 0].tolist()) == [ord("a")] * 2 + [ord("b")] * 2, "an evaluation sees each sample once"


def test_what_cannot_be_mixed_is_an_error() -> None:
    with pytest.raises(DataError, match="weights"):
        Mixture([([1], 0.0)])
    with pytest.raises(DataError, match="weights"):
        Mixture([])
    with pytest.raises(DataError, match="empty"):
        Mixture([([], 1.0)])
    with pytest.raises(DataError, match="cannot be a source"):
        Mixture([(Batches([1]), 1.0)])
    with pytest.raises(DataError, match="names no data"):
        recipe_data(DataSpec())
