"""The global order: which sample is the k-th, and how a batch is cut."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.order import (
    Permutation,
    cells,
    check_length,
    sample_order,
    samples_per_epoch,
    seed_of,
    span,
    spans,
    steps_per_epoch,
)
from shardwise.errors import DataError

exact = settings(derandomize=True, deadline=None, max_examples=150)
LASTS = ("short", "drop", "wrap", "pad")


@exact
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_a_permutation_is_a_bijection_for_every_n(n: int, seed: int, epoch: int) -> None:
    images = Permutation(n, seed, epoch)(np.arange(n))
    assert sorted(images.tolist()) == list(range(n))


@exact
@given(n=st.integers(2**31, 2**61), seed=st.integers(0, 2**32), first=st.integers(0, 2**30))
def test_a_permutation_of_very_many_stays_inside_and_never_repeats(n: int, seed: int, first: int) -> None:
    images = Permutation(n, seed, 0)(np.arange(first, first + 1000))
    assert len(set(images.tolist())) == 1000
    assert images.min() >= 0 and images.max() < n


def test_a_permutation_does_not_depend_on_how_it_is_asked() -> None:
    whole = Permutation(1000, 3, 4)(np.arange(1000))
    assert [int(Permutation(1000, 3, 4)(np.array([k]))[0]) for k in range(0, 1000, 37)] == whole[::37].tolist()
    assert Permutation(1000, 3, 4)(np.arange(1000).reshape(10, 100)).tolist() == whole.reshape(10, 100).tolist()


def test_every_order_of_a_few_samples_is_as_likely_as_any_other() -> None:
    for n in (4, 5):
        orders = list(itertools.permutations(range(n)))
        draws = 20 * len(orders)
        counts = dict.fromkeys(orders, 0)
        for seed in range(draws):
            counts[tuple(Permutation(n, seed, 0)(np.arange(n)).tolist())] += 1
        chi_square = sum((count - 20) ** 2 / 20 for count in counts.values())
        freedom = len(orders) - 1
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # 4 standard deviations above its mean


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {tuple(Permutation(100, seed, epoch)(np.arange(100)).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_position_outside_is_an_error() -> None:
    for wrong in (-1, 10):
        with pytest.raises(IndexError):
            Permutation(10, 0, 0)(np.array([wrong]))


def test_a_seed_is_the_same_in_another_process_and_for_ever() -> None:
    code = "from shardwise.data.order import seed_of; print(seed_of('order', 7, -1, 2**70))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(there) == seed_of("order", 7, -1, 2**70)
    assert seed_of("order", 0, 1) == 5924576517485575844
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [4, 0, 8, 9, 1, 7, 2, 3, 6, 5]


def test_a_seed_tells_parts_kinds_and_order_apart() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (1, 2), (2, 1), (12,), (), ("",), (0,), (-1,)]
    assert len({seed_of(*part) for part in parts}) == len(parts)


@exact
@given(
    first=st.integers(0, 10**12),
    count=st.integers(1, 300),
    ranks=st.integers(1, 9),
    micro_batches=st.integers(1, 9),
)
def test_cells_are_contiguous_even_and_the_same_number_on_every_rank(
    first: int, count: int, ranks: int, micro_batches: int
) -> None:
    all_cells = [cells(first, count, rank, ranks, micro_batches) for rank in range(ranks)]
    assert {len(own) for own in all_cells} == {micro_batches}
    flat = [cell for own in all_cells for cell in own]
    read = [position for cell in flat for position in range(cell.first, cell.first + cell.samples)]
    assert read == list(range(first, first + count))
    assert max(cell.samples for cell in flat) - min(cell.samples for cell in flat) <= 1
    for cell in flat:
        assert cell.weight == (1.0 if cell.samples else 0.0)
        assert cell.samples + cell.extra >= 1 and first <= cell.first < first + count


@exact
@given(count=st.integers(1, 64), ranks=st.integers(1, 4), micro_batches=st.integers(1, 4))
def test_padded_cells_all_have_the_same_shape(count: int, ranks: int, micro_batches: int) -> None:
    slots = -(-64 // (ranks * micro_batches))
    flat = [cell for rank in range(ranks) for cell in cells(0, count, rank, ranks, micro_batches, slots)]
    assert {cell.samples + cell.extra for cell in flat} == {slots}
    assert sum(cell.samples for cell in flat) == count


@exact
@given(
    n=st.integers(1, 60),
    global_batch=st.integers(1, 25),
    last=st.sampled_from(LASTS),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_epoch_reads_every_sample_once_and_a_resumed_one_goes_on(
    n: int, global_batch: int, last: str, epochs: int, seed: int
) -> None:
    if last == "drop" and n < global_batch:
        return
    steps = list(spans(0, n, global_batch, last, epochs))
    read = [position for step in steps for position in range(step.first, step.first + step.samples)]
    if last == "drop":
        full = n - n % global_batch
        assert read == [epoch * n + k for epoch in range(epochs) for k in range(full)]
    else:
        assert read == list(range(epochs * n))
        for epoch in range(epochs):
            order = sample_order(np.array(read[epoch * n : (epoch + 1) * n]), n, seed, shuffle=True)
            assert sorted(order.tolist()) == list(range(n))
    if last != "wrap":
        assert len(steps) == epochs * steps_per_epoch(n, global_batch, last)
        assert sum(step.last_of_epoch for step in steps) == epochs
    assert len(read) == epochs * samples_per_epoch(n, global_batch, last)
    for at, step in enumerate(steps):
        assert list(spans(step.next_position, n, global_batch, last, epochs)) == steps[at + 1 :]


def test_a_batch_that_wraps_reads_on_into_the_next_epoch() -> None:
    step = span(8, 10, 4, "wrap")
    assert step is not None
    assert (step.first, step.samples, step.epoch, step.last_of_epoch, step.next_position) == (
        8,
        4,
        0,
        True,
        12,
    )


def test_data_that_cannot_fill_one_batch_is_an_error_whose_fix_works() -> None:
    for last in ("drop", "wrap"):
        with pytest.raises(DataError, match="3 samples, fewer than one global batch of 8") as caught:
            check_length(3, 8, last, None)
        assert "global_batch = 3" in caught.value.fix
        check_length(3, 3, last, None)
    check_length(3, 8, "short", None)
    check_length(3, 8, "wrap", 1)
    with pytest.raises(DataError, match="empty"):
        check_length(0, 8, "short", None)
