"""Who writes what of that which several ranks hold alike: each rank works it out by itself. Pure integers, no torch."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

from shardwise.checkpoint.manifest import Record, digest_of
from shardwise.regions import Region

Ranks = tuple[int, ...]


def spread(sizes: Sequence[int], writers: int) -> list[int]:
    """A writer for each size, so that all write about the same: largest first, to the one with least.

    The same on every rank that passes the same sizes.
    """
    load = [(0, writer) for writer in range(writers)]
    heapify(load)
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        least, owner = load[0]
        owners[item] = owner
        heapreplace(load, (least + sizes[item], owner))
    return owners


def shares(sizes: Mapping[str, int], holders: Mapping[str, Ranks], rank: int) -> set[str]:
    """Of what this rank holds, bytes by name, that which it writes: each has one writer among its holders.

    What the same ranks hold is spread over them by bytes, in the same way on each, without asking the others: they
    hold it under the same names.
    """
    together: dict[Ranks, list[str]] = {}
    for name in sorted(sizes):
        together.setdefault(holders[name], []).append(name)
    mine: set[str] = set()
    for group, names in together.items():
        owners = spread([sizes[name] for name in names], len(group))
        mine |= {name for name, owner in zip(names, owners, strict=True) if group[owner] == rank}
    return mine


class Alike(Record, frozen=True):
    """What a rank takes to be held alike by `ranks`: a digest over the names and regions."""

    ranks: Ranks
    digest: str


def alike(regions: Mapping[str, Region], holders: Mapping[str, Ranks]) -> tuple[Alike, ...]:
    """What this rank shares with others, one value for each set of ranks."""
    together: dict[Ranks, list[str]] = {}
    for name in sorted(regions):
        if len(holders[name]) > 1:
            together.setdefault(holders[name], []).append(f"{name} {regions[name]}")
    return tuple(Alike(group, digest_of("\n".join(lines).encode())) for group, lines in together.items())


def disagreeing(told: Sequence[Iterable[Alike]]) -> tuple[int, int] | None:
    """The first two ranks of which one takes the other to hold the same, and it does not; None where all agree.

    `told` by rank. Takes time in proportion to what all ranks told.
    """
    heard: dict[Alike, list[int]] = {}
    for rank, each in enumerate(told):
        for one in each:
            heard.setdefault(one, []).append(rank)
    for one, said in heard.items():
        missing = sorted(set(one.ranks) - set(said))
        if missing:
            return said[0], missing[0]
    return None
