"""Who writes what of that which several ranks hold alike. Pure integers, no torch."""

from collections.abc import Mapping, Sequence

from shardwise.checkpoint.manifest import digest_of
from shardwise.regions import Region


def spread(sizes: Sequence[int], writers: int) -> list[int]:
    """A writer for each size, so that all write about the same: largest first, to the one with least.

    The same on every rank that passes the same sizes.
    """
    load = [0] * writers
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        owner = min(range(writers), key=lambda writer: (load[writer], writer))
        owners[item] = owner
        load[owner] += sizes[item]
    return owners


def key_of(name: str, region: Region) -> str:
    """A short name of a region of a tensor, the same on every rank that holds it."""
    return digest_of(f"{name} {region}".encode())[:16]


def shares(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]], rank: int) -> set[str]:
    """Of what this rank holds, bytes by key, that which it writes: each key has one writer among its holders.

    What the same ranks hold is spread over them by bytes, in the same way on each, without asking the others.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for key in sorted(sizes):
        together.setdefault(tuple(holders[key]), []).append(key)
    mine: set[str] = set()
    for group, keys in together.items():
        owners = spread([sizes[key] for key in keys], len(group))
        mine |= {key for key, owner in zip(keys, owners, strict=True) if group[owner] == rank}
    return mine
