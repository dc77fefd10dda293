"""A generator knows whether its loop was left by break or by an exception."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.unit import leaving_generator

seen: list[bool] = leaving_generator.seen
numbers = leaving_generator.numbers


def by_break() -> None:
    for number in numbers():
        if number == 2:
            break


def by_return() -> int:
    for number in numbers():
        if number == 2:
            return number
    return 0


def by_break_inside_with_and_try() -> None:
    for _ in numbers():
        with contextlib.suppress(ValueError):
            try:
                break
            finally:
                str(1)


def by_raise() -> None:
    for _ in numbers():
        raise ValueError("here")


def by_a_call_that_raises() -> None:
    for _ in numbers():
        int("no number")


def by_an_operator_that_raises() -> None:
    for number in numbers():
        _ = number / 0


def by_a_reraise_after_finally() -> None:
    for _ in numbers():
        try:
            raise ValueError("here")
        finally:
            str(1)


def by_an_interrupt() -> None:
    for _ in numbers():
        raise KeyboardInterrupt


@pytest.mark.parametrize("leave", [by_break, by_return, by_break_inside_with_and_try])
def test_break_and_return_are_orderly(leave: Callable[[], object]) -> None:
    seen.clear()
    leave()
    assert seen == [True]


@pytest.mark.parametrize(
    "leave",
    [
        by_raise,
        by_a_call_that_raises,
        by_an_operator_that_raises,
        by_a_reraise_after_finally,
        by_an_interrupt,
    ],
)
def test_an_exception_is_not(leave: Callable[[], object]) -> None:
    seen.clear()
    with pytest.raises((ValueError, ZeroDivisionError, KeyboardInterrupt)):
        leave()
    assert seen == [False]


def test_what_cannot_be_told_counts_as_an_exception() -> None:
    seen.clear()
    generator: Iterator[int] = numbers()
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert seen == [False]
