"""Unions and shares of windows, against a count of every single nanosecond."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.profiling.intervals import Union, covered, exclusive, of_all, union

STAMP = st.integers(-40, 40)
INTERVALS = st.lists(st.tuples(STAMP, STAMP), max_size=12)
WINDOWS = st.lists(st.tuples(STAMP, STAMP), min_size=1, max_size=4)


def made(intervals: list[tuple[int, int]]) -> Union:
    table = np.array(intervals, np.int64).reshape(-1, 2)
    return union(table[:, 0], table[:, 1])


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {at for begin, end in intervals for at in range(begin, end)}


@given(INTERVALS)
def test_a_union_is_disjoint_in_order_and_covers_what_its_parts_do(intervals: list[tuple[int, int]]) -> None:
    found = made(intervals)
    assert moments(list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))) == moments(intervals)
    assert (found.starts < found.ends).all() and (found.ends[:-1] < found.starts[1:]).all()
    assert found.total == len(moments(intervals))


@given(INTERVALS, WINDOWS)
def test_what_a_window_is_covered_is_counted(intervals: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    begins, ends = np.array(windows, np.int64).T
    expected = [len(moments(intervals) & moments([window])) for window in windows]
    assert covered(made(intervals), begins, ends).tolist() == expected


@given(st.lists(INTERVALS, max_size=4), WINDOWS)
def test_a_moment_is_the_first_layers_that_covers_it_and_all_moments_are_someones(
    layers: list[list[tuple[int, int]]], windows: list[tuple[int, int]]
) -> None:
    begins, ends = np.array(windows, np.int64).T
    found = exclusive([made(layer) for layer in layers], begins, ends)
    for row, window in zip(found.tolist(), windows, strict=True):
        left, expected = moments([window]), []
        for layer in layers:
            expected.append(len(left & moments(layer)))
            left -= moments(layer)
        assert row == [*expected, len(left)]


def test_stamps_of_a_clock_since_1970_lose_nothing() -> None:
    now = 1_800_000_000_000_000_001
    found = of_all([made([]), made([(now, now + 3), (now + 2, now + 5)])])
    assert covered(found, np.array([now + 1]), np.array([now + 9])).tolist() == [4]
