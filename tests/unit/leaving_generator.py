"""A generator in a file of its own, as the Trainer's is."""

from collections.abc import Iterator

from shardwise.resilience.leaving import in_order

seen: list[bool] = []


def numbers() -> Iterator[int]:
    yield from inner()


def inner() -> Iterator[int]:
    try:
        yield from (1, 2, 3)
    except GeneratorExit:
        seen.append(in_order(__file__))
        raise
