"""Whether the ranks of one group call the same collectives in the same order: what differs would hang. No torch."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple

from shardwise.plan.mesh import AXES, MeshShape
from shardwise.verify.distinct import Distinct
from shardwise.verify.values import Collective, Mismatch, Phase

NOTHING = "nothing more"


class Call(NamedTuple):
    """One collective of one rank. `ranks`: the group's, global; `peer`: the other one of a send or receive, global."""

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    phase: Phase
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.bytes} bytes ({self.phase})"


def axis_of(mesh: MeshShape, group: Sequence[int]) -> str:
    """The axes along which the ranks of a group differ, joined by "+"; "world" for all ranks of a mesh of several."""
    coords = [mesh.coord(rank) for rank in group]
    axes = [axis for axis in AXES if len({getattr(coord, axis) for coord in coords}) > 1]
    return "world" if len(axes) > 1 and len(group) == mesh.world else "+".join(axes)


def in_rows(mesh: MeshShape, calls: Sequence[Call]) -> tuple[Collective, ...]:
    """The calls in order, equal ones in a row as one."""
    axes = {group: axis_of(mesh, group) for group in {call.ranks for call in calls}}
    return tuple(
        Collective(call.kind, call.bytes, axes[call.ranks], len(call.ranks), call.phase, len(list(same)), call.peer)
        for call, same in groupby(calls)
    )


def mismatches(mesh: MeshShape, kinds: Sequence[Distinct], calls: Mapping[int, Sequence[Call]]) -> tuple[Mismatch, ...]:
    """The first difference of each two ranks that meet in a group; empty where every collective finds its partners.

    `calls`: of each distinct rank, which speaks for the ranks that it stands for.
    """
    speaker = {rank: kind.rank for kind in kinds for rank in kind.stands_for}
    by_axis = {rank: _by_axis(mesh, rank, made) for rank, made in calls.items()}
    found: dict[tuple[str, int, int], Mismatch] = {}
    for rank, axes in by_axis.items():
        for axis, (group, own) in axes.items():
            for member in group:
                other = speaker[member]
                pair = (axis, min(rank, other), max(rank, other))
                if other != rank and pair not in found:
                    theirs = by_axis[other].get(axis, ((), []))[1]
                    found.update(_first_difference(pair, rank, own, other, theirs))
    crossing = (one for rank in calls for one in _unmatched(mesh, rank, speaker, calls))
    return (*found.values(), *crossing)


def _by_axis(mesh: MeshShape, rank: int, calls: Sequence[Call]) -> dict[str, tuple[tuple[int, ...], list[Call]]]:
    """A rank's collectives by the axes of their group, and that group; sends and receives are matched by themselves."""
    found: dict[str, tuple[tuple[int, ...], list[Call]]] = {}
    axes = {group: axis_of(mesh, group) for group in {call.ranks for call in calls}}
    for call in calls:
        if call.peer is None:
            found.setdefault(axes[call.ranks], (call.ranks, []))[1].append(call)
    return found


def _first_difference(
    pair: tuple[str, int, int], rank: int, own: Sequence[Call], other: int, theirs: Sequence[Call]
) -> dict[tuple[str, int, int], Mismatch]:
    for position, (mine, yours) in enumerate(zip_longest(own, theirs)):
        if mine is None or yours is None or (mine.kind, mine.bytes) != (yours.kind, yours.bytes):
            texts = (str(mine or NOTHING), str(yours or NOTHING))
            return {pair: Mismatch(pair[0], (rank, other), position, *texts)}
    return {}


def _unmatched(
    mesh: MeshShape, rank: int, speaker: Mapping[int, int], calls: Mapping[int, Sequence[Call]]
) -> Iterator[Mismatch]:
    """Sends of a rank that its peer does not receive, in their order and of their size; and the other way round."""
    for kind, answer in (("send", "receive"), ("receive", "send")):
        by_peer: dict[int, list[Call]] = defaultdict(list)
        for call in calls[rank]:
            if call.kind == kind and call.peer is not None:
                by_peer[call.peer].append(call)
        for peer, own in by_peer.items():
            # The peer's speaker may lie elsewhere on other axes; it meets the rank at this one's place on the group's.
            axis = axis_of(mesh, (rank, peer))
            here = _place(mesh, rank, axis)
            theirs = [
                call
                for call in calls[speaker[peer]]
                if call.kind == answer and call.peer is not None and _place(mesh, call.peer, axis) == here
            ]
            for position, (mine, yours) in enumerate(zip_longest(own, theirs)):
                if kind == "receive" and mine is not None and yours is not None:
                    continue  # the sender's turn has compared these
                if mine is None or yours is None or mine.bytes != yours.bytes:
                    yield Mismatch(axis, (rank, peer), position, str(mine or NOTHING), str(yours or NOTHING))
                    break


def _place(mesh: MeshShape, rank: int, axis: str) -> tuple[int, ...]:
    return tuple(getattr(mesh.coord(rank), name) for name in axis.split("+"))
