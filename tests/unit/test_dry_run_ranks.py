"""Distinct ranks stand for the whole world, and ranks that would wait for each other for ever are found."""

from collections.abc import Callable

import msgspec
import pytest

from shardwise.plan.mesh import MeshShape
from shardwise.verify.agreement import Call, axis_of, in_rows, mismatches
from shardwise.verify.distinct import chunk, distinct_ranks, micro_batch_sizes, split_lengths
from tests.distributed.work import arch, plan

MESHES = (
    {"dp_replicate": 5},
    {"dp_shard": 4},
    {"dp_shard": 512},
    {"pp": 2, "dp_shard": 3, "tp": 2},
    {"pp": 4, "dp_replicate": 2, "dp_shard": 8, "tp": 8},
)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("batch", [640, 643])
def test_every_rank_holds_what_its_representative_holds(mesh: dict[str, int], batch: int) -> None:
    zero = 1 if mesh.get("dp_shard", 1) > 1 else 0
    world = MeshShape(**mesh).world
    made = plan(world, zero=zero, global_batch=batch, mesh=mesh)
    lengths = split_lengths(arch())
    kinds = distinct_ranks(made, lengths)
    assert sorted(rank for kind in kinds for rank in kind.stands_for) == list(range(world))
    shape = made.decision.mesh

    def local(rank: int) -> tuple[object, ...]:
        coord = shape.coord(rank)
        shard, tp = (shape.dp_shard, coord.dp_shard), (shape.tp, coord.tp)
        cut = [(chunk(n, *shard), chunk(n, *tp), chunk(chunk(n, *tp), *shard)) for n in lengths]
        return coord.pp, cut, micro_batch_sizes(made, shape.data_coord(rank))

    for kind in kinds:
        assert kind.rank == kind.stands_for[0]
        assert all(local(rank) == local(kind.rank) for rank in kind.stands_for)
    assert len({str(local(kind.rank)) for kind in kinds}) == len(kinds), "two kinds that are one"


def test_pieces_of_a_length_make_it_whole_and_are_as_torch_chunks_them() -> None:
    for length in (1, 5, 61, 128_256):
        for degree in (1, 2, 3, 7, 512):
            pieces = [chunk(length, degree, index) for index in range(degree)]
            assert sum(pieces) == length
            assert pieces == sorted(pieces, reverse=True)
    assert [chunk(61, 4, index) for index in range(4)] == [16, 16, 16, 13]


def test_an_even_world_has_one_rank_a_stage() -> None:
    even = msgspec.structs.replace(arch(), vocab_size=64)
    made = plan(64, zero=1, global_batch=64, mesh={"pp": 4, "dp_shard": 4, "tp": 4})
    assert len(distinct_ranks(made, split_lengths(even))) == 4


def test_a_groups_axis_is_what_its_ranks_differ_by() -> None:
    mesh = MeshShape(pp=2, dp_shard=2, tp=2)
    assert axis_of(mesh, (0, 1)) == "tp"
    assert axis_of(mesh, (1, 3)) == "dp_shard"
    assert axis_of(mesh, (0, 4)) == "pp"
    assert axis_of(mesh, (0, 1, 2, 3)) == "dp_shard+tp"
    assert axis_of(mesh, tuple(range(8))) == "world"
    assert axis_of(MeshShape(dp_shard=4), (0, 1, 2, 3)) == "dp_shard"


def test_equal_calls_in_a_row_are_one_row_and_none_is_lost() -> None:
    mesh = MeshShape(dp_shard=2)
    calls = [Call("all_gather", 8, (0, 1), "forward")] * 3 + [Call("all_gather", 8, (0, 1), "backward")]
    rows = in_rows(mesh, calls)
    assert [row.times for row in rows] == [3, 1]
    assert {(row.axis, row.size) for row in rows} == {("dp_shard", 2)}


def planted(change: Callable[[list[Call]], None]) -> tuple[str, ...]:
    """Mismatches of three equal ranks, uneven so that each is run, after a change in what rank 2 calls."""
    mesh = MeshShape(dp_shard=3)
    kinds = distinct_ranks(plan(3, zero=3, global_batch=7, mesh={"dp_shard": 3}), (61, 5))
    group = (0, 1, 2)
    calls = {
        kind.rank: [Call("all_gather", 8, group, "forward"), Call("reduce_scatter", 8, group, "backward")]
        for kind in kinds
    }
    assert 2 in calls
    change(calls[2])
    return tuple(f"{one.axis} {one.position} {one.first} | {one.second}" for one in mismatches(mesh, kinds, calls))


def test_ranks_that_call_the_same_agree() -> None:
    assert planted(lambda calls: None) == ()


@pytest.mark.parametrize("change", [
    lambda calls: calls.pop(),
    lambda calls: calls.reverse(),
    lambda calls: calls.append(calls[0]),
    lambda calls: calls.__setitem__(0, calls[0]._replace(bytes=16)),
    lambda calls: calls.__setitem__(1, calls[1]._replace(kind="all_reduce")),
    lambda calls: calls.clear(),
], ids=["one less", "other order", "one more", "other size", "other kind", "none"])  # fmt: skip
def test_a_planted_difference_that_would_hang_is_found(change: Callable[[list[Call]], None]) -> None:
    found = planted(change)
    assert found
    assert all(one.startswith("dp_shard") for one in found)


@pytest.mark.parametrize(("sent", "received"), [([8, 16], [8]), ([8], [8, 16]), ([8, 16], [16, 8]), ([], [8])])
def test_a_send_without_its_receive_is_found(sent: list[int], received: list[int]) -> None:
    kinds = distinct_ranks(plan(2, zero=0, global_batch=4, mesh={"pp": 2}), (4,))
    calls = {
        0: [Call("send", size, (0, 1), "forward", 1) for size in sent],
        1: [Call("receive", size, (0, 1), "forward", 0) for size in received],
    }
    assert mismatches(MeshShape(pp=2), kinds, calls)
    calls[1] = [Call("receive", size, (0, 1), "forward", 0) for size in sent]
    assert mismatches(MeshShape(pp=2), kinds, calls) == ()
