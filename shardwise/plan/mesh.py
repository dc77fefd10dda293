"""MeshShape: the degrees of a plan, and the bijection between a rank and its coordinate. No torch."""

from typing import Annotated, NamedTuple

import msgspec

Degree = Annotated[int, msgspec.Meta(gt=0)]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Coord(NamedTuple):
    """A rank's position on the axes, outermost first."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


class MeshShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees by axis, outermost first: tp varies fastest with the rank. ep divides dp_shard."""

    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world(self) -> int:
        """The number of ranks."""
        product = 1
        for degree in self.degrees:
            product *= degree
        return product

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def coord(self, rank: int) -> Coord:
        """Raises: IndexError outside 0..world-1."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is outside a world of {self.world}")
        values = []
        for degree in reversed(self.degrees):
            rank, value = divmod(rank, degree)
            values.append(value)
        return Coord(*reversed(values))

    def rank(self, coord: Coord) -> int:
        """The inverse of `coord`."""
        rank = 0
        for degree, value in zip(self.degrees, coord, strict=True):
            if not 0 <= value < degree:
                raise IndexError(f"coordinate {value} is outside a degree of {degree}")
            rank = rank * degree + value
        return rank

    def stage_ranks(self, rank: int) -> range:
        """The ranks that work on the same stages of the pipeline as this one: all, where there is none."""
        each = self.world // self.pp
        return range(self.coord(rank).pp * each, (self.coord(rank).pp + 1) * each)

    def data_coord(self, rank: int) -> int:
        """The position of a rank among the data-parallel ranks, 0..data_parallel-1."""
        coord = self.coord(rank)
        return coord.dp_replicate * self.dp_shard + coord.dp_shard
