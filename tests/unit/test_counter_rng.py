"""Counter-based values: a slice is a slice of the whole, and the values are normal."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.models.counter_rng import CHUNK, fill_normal_, normal_values, uniform_values

WHOLE = {make: make(3, "a.weight", 0, 3 * CHUNK) for make in (normal_values, uniform_values)}


@pytest.mark.parametrize("make", [normal_values, uniform_values])
@settings(max_examples=40, deadline=None)
@given(first=st.integers(0, 3 * CHUNK), count=st.integers(0, 2 * CHUNK))
def test_a_slice_equals_the_slice_of_the_whole(make, first, count):
    count = min(count, 3 * CHUNK - first)
    np.testing.assert_array_equal(make(3, "a.weight", first, count), WHOLE[make][first : first + count])


def test_seed_name_and_index_each_change_the_values():
    a = normal_values(0, "a", 0, 64)
    for other in (normal_values(1, "a", 0, 64), normal_values(0, "b", 0, 64), normal_values(0, "a", 64, 64)):
        assert not np.any(a == other)


def test_an_index_beyond_32_bits_has_its_own_values():
    far = normal_values(0, "a", 2**40 + 5, 100)
    assert far.shape == (100,) and not np.any(far == normal_values(0, "a", 5, 100))


def test_moments_and_independence_are_those_of_the_normal():
    n = 1_000_000
    values = normal_values(7, "w", 0, n).astype(np.float64)
    # Each statistic's own standard error, five of them.
    assert abs(values.mean()) < 5 / n**0.5
    assert abs(values.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs((values[1:] * values[:-1]).mean()) < 5 / n**0.5
    # Kolmogorov-Smirnov at one in a million.
    from statistics import NormalDist

    ranks = np.sort(values)[:: n // 1000]
    expected = np.array([NormalDist().cdf(x) for x in ranks])
    assert np.abs(expected - np.arange(len(ranks)) * (n // 1000) / n).max() < 2.7 / n**0.5 + 1 / n


def test_uniform_values_fill_their_range():
    values = uniform_values(0, "u", 0, 100_000, low=-2.0, high=6.0)
    assert values.min() >= -2 and values.max() <= 6
    assert abs(values.mean() - 2) < 5 * (64 / 12 / 100_000) ** 0.5


def test_std_and_mean_scale_a_filled_tensor():
    plain, scaled = torch.empty(7, 5), torch.empty(7, 5, dtype=torch.float64)
    fill_normal_(plain, seed=1, name="w", std=1.0)
    fill_normal_(scaled, seed=1, name="w", std=0.5, mean=2.0)
    torch.testing.assert_close(scaled, plain.double() * 0.5 + 2, rtol=1e-6, atol=1e-6)


def test_scalars_and_empty_tensors_are_filled():
    scalar, empty = torch.full((), float("nan")), torch.empty(0, 4)
    fill_normal_(scalar, seed=1, name="s", std=1.0)
    fill_normal_(empty, seed=1, name="e", std=1.0)
    assert scalar.item() == normal_values(1, "s", 0, 1)[0]


def test_values_stay_as_they_are():
    # A changed value would change the start of every run.
    np.testing.assert_allclose(
        normal_values(0, "embed_tokens.weight", 0, 4),
        [-0.8168206, 0.6884875, 0.4289399, -0.326217],
        rtol=2e-6,
    )
