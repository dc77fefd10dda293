"""torch's DeviceMesh from our MeshShape: one axis for each degree above one."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import ranks
from shardwise.plan.mesh import AXES, MeshShape


def build(shape: MeshShape) -> DeviceMesh | None:
    """The mesh of a plan, outermost axis first; None for a world of one. Collective."""
    axes = [(name, degree) for name, degree in zip(AXES, shape.degrees, strict=True) if degree > 1]
    if not axes:
        return None
    return init_device_mesh(
        ranks.device_kind(),
        tuple(degree for _, degree in axes),
        mesh_dim_names=tuple(name for name, _ in axes),
    )
