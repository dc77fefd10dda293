"""torch's DeviceMesh from our MeshShape, and this rank's place on it."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import ranks
from shardwise.plan.mesh import AXES, Coord, MeshShape


class Mesh:
    """A plan's axes as torch knows them. Torch's mesh has the axes of a degree above one, outermost first.

    device_mesh: None for a world of one. coord: this rank's.
    """

    def __init__(self, shape: MeshShape, device_mesh: DeviceMesh | None, rank: int) -> None:
        self.shape, self.device_mesh = shape, device_mesh
        self.coord: Coord = shape.coord(rank)

    def degree(self, axis: str) -> int:
        return int(getattr(self.shape, axis))

    def index(self, axis: str) -> int:
        """This rank's coordinate on the axis."""
        return int(getattr(self.coord, axis))

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """This rank's part of the mesh along those of the axes that have a degree above one; None where none has."""
        split = tuple(axis for axis in axes if self.degree(axis) > 1)
        return self.device_mesh[split] if split and self.device_mesh is not None else None

    def group(self, axis: str) -> Any:
        """The process group along an axis; None where its degree is one."""
        return self.device_mesh.get_group(axis) if self.degree(axis) > 1 and self.device_mesh is not None else None


def build(shape: MeshShape) -> Mesh:
    """Collective."""
    axes = [(name, degree) for name, degree in zip(AXES, shape.degrees, strict=True) if degree > 1]
    if not axes:
        return Mesh(shape, None, ranks.rank())
    names, degrees = zip(*axes, strict=True)
    return Mesh(shape, init_device_mesh(ranks.device_kind(), degrees, mesh_dim_names=names), ranks.rank())
