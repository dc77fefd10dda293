"""MeshShape: rank and coordinate are one another's inverse."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.mesh import MeshShape

degrees = st.integers(1, 4)
meshes = st.builds(MeshShape, pp=degrees, dp_replicate=degrees, dp_shard=degrees, cp=degrees, tp=degrees)


@given(meshes)
def test_ranks_and_coordinates_are_a_bijection(mesh: MeshShape) -> None:
    coords = [mesh.coord(rank) for rank in range(mesh.world)]
    assert len(set(coords)) == mesh.world
    assert [mesh.rank(coord) for coord in coords] == list(range(mesh.world))


@given(meshes)
def test_ranks_go_through_the_axes_with_the_innermost_fastest(mesh: MeshShape) -> None:
    expected = list(itertools.product(*(range(degree) for degree in mesh.degrees)))
    assert [tuple(mesh.coord(rank)) for rank in range(mesh.world)] == expected


@given(meshes)
def test_every_data_coordinate_has_as_many_ranks(mesh: MeshShape) -> None:
    counts = [0] * mesh.data_parallel
    for rank in range(mesh.world):
        counts[mesh.data_coord(rank)] += 1
    assert set(counts) == {mesh.world // mesh.data_parallel}


@given(meshes)
def test_a_mesh_comes_back_from_json(mesh: MeshShape) -> None:
    assert msgspec.json.decode(msgspec.json.encode(mesh), type=MeshShape) == mesh


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(IndexError):
        MeshShape(dp_shard=4).coord(rank)


def test_a_coordinate_outside_its_degree_is_refused() -> None:
    mesh = MeshShape(dp_shard=4)
    with pytest.raises(IndexError):
        mesh.rank(mesh.coord(3)._replace(dp_shard=4))


def test_a_degree_of_zero_is_no_mesh() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"tp": 0}', type=MeshShape)
