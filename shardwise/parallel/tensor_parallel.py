"""Tensor parallel: weights lie as DTensors on the tp mesh, and forward computes with this rank's local part of them.

The layers' own forwards are kept: around each of them the local tensor stands in its parameter's place
(parallel/local_forward.py), and split layers do their collectives there (parallel/split_layers.py). What enters a
region's column layers is copied, or gathered under sequence parallel; what leaves its row layer is summed, or
scattered. So what a region does before its column layers and after its row layer (a norm, a residual, dropout) is as
outside.

In bf16 a row layer's parts y_r are rounded, and so is each of their tp - 1 sums s_k: an error of at most
2^-8 (sum |y_r| + sum |s_k|), where one process has 2^-8 |y|. docs/decisions/007-row-sums-in-bf16.md: why it stays so.
Source: Megatron-LM, arXiv 1909.08053 and 2205.05198.
"""

import inspect
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import ModelError
from shardwise.names import canonical
from shardwise.parallel.device_mesh import Mesh
from shardwise.parallel.foreign_weights import READ_INSIDE
from shardwise.parallel.local_forward import Around, Course
from shardwise.parallel.roles import Region, Roles, inside
from shardwise.parallel.split_layers import Beginning, Column, Embedding, Head, InBlock, InRegion, Row, shares
from shardwise.parallel.staging import Stub
from shardwise.torch_private import parameter_slots


class TensorParallel:
    """A module's tensor-parallel part.

    sequence: whether activations between the regions are split by position. why: what stays whole, and the reasons.
    """

    def __init__(self, module: nn.Module, course: Course, why: tuple[str, ...] = ()) -> None:
        self.module, self.course, self.sequence, self.why = module, course, course.sequence, why

    def finish(self) -> None:
        """Gradients of weights that every rank holds whole, and of which each saw a part, are summed: one all-reduce.

        After the data-parallel sum. A gradient that this rank has not counts as zero. Collective over the tp group.
        """
        names = self.course.partial
        partial = [p for name, p in self.module.named_parameters() if canonical(name) in names and p.requires_grad]
        for parameter in partial:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in partial]
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            same = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same])
            dist.all_reduce(flat, group=self.course.group)
            for gradient, piece in zip(same, flat.split([g.numel() for g in same]), strict=True):
                gradient.copy_(piece.view_as(gradient))


def apply(
    module: nn.Module, roles: Roles, mesh: Mesh, *, sequence: bool | str = "auto", vocabulary_loss: bool = False
) -> TensorParallel:
    """Split a module's weights over the tp mesh and its forward with them, in place. Names and ties stay.

    A module that a pipeline has cut may lack what its roles name. `sequence`: "auto", or what the user wants.
    `vocabulary_loss`: the head gives a DTensor over the vocabulary; else whole outputs.
    Raises: ModelError for heads that tp does not divide, or a sequence parallel that cannot be.
    """
    tp = mesh.submesh("tp")
    if tp is None:
        raise ModelError("Tensor parallel over one rank.", fix="train.plan.tp = 2 or more")
    if sequence is True and not roles.sequence:
        raise ModelError(
            "sequence_parallel = true, and this model is not known to be position-wise between its split layers.",
            why="; ".join(why for why in roles.why if "sequence" in why),
            fix='model.sequence_parallel = "auto"',
        )
    modules = {canonical(name): inner for name, inner in module.named_modules()}
    regions = [region for region in roles.regions if region.row in modules]
    require_divisible(roles, modules, tp.size())
    split = _placements(regions, roles, modules)
    course = Course(
        tp,
        sequence=roles.sequence and roles.known if sequence == "auto" else bool(sequence),
        split=frozenset(split),
        outer={name for name, _ in _named(module) if not any(inside(name, block) for block in roles.blocks)},
        first_names=_first_names(module),
    )
    _distribute(module, split, tp)
    module.register_forward_pre_hook(course.begin)
    _surround(modules, regions, roles, course, staged=mesh.degree("pp") > 1, vocabulary_loss=vocabulary_loss)
    return TensorParallel(module, course, roles.why)


def require_divisible(roles: Roles, modules: Mapping[str, nn.Module], tp: int) -> None:
    """Raises: ModelError for heads, or an embedding's rows, that do not give every rank of tp something whole."""
    for region in roles.regions:
        if region.row in modules:
            _require_whole_heads(region, modules, tp)
    _require_rows(roles.embedding, modules, tp)


def _require_whole_heads(region: Region, modules: Mapping[str, nn.Module], tp: int) -> None:
    for path in region.columns:
        layer = modules[path]
        sizes = region.parts or (layer.out_features,)
        if region.head_dim > 1 and any(size % (region.head_dim * tp) for size in sizes):
            heads = ", ".join(str(size // region.head_dim) for size in sizes)
            raise ModelError(
                f"tp = {tp} does not divide the heads of {path}: {heads}.",
                why="tensor parallel gives each rank whole heads",
                fix="train.plan.tp = a divisor of them, or the role 'replicated' for the layers of this attention",
            )


def _require_rows(embedding: str, modules: Mapping[str, nn.Module], tp: int) -> None:
    table = modules.get(embedding)
    if isinstance(table, nn.Embedding) and not all(shares(table.num_embeddings, tp)):
        raise ModelError(
            f"{embedding} has {table.num_embeddings} rows, and tp = {tp} leaves a rank without one.",
            why="each rank looks up its own rows",
            fix=f"model.roles = {{ {embedding!r} = 'replicated' }}, or a smaller tp",
        )


def _placements(regions: list[Region], roles: Roles, modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """The dim by which each split parameter is cut, by name; all others stay whole."""
    split: dict[str, int] = {}
    for region in regions:
        split[_join(region.row, "weight")] = 1
        for path in () if region.parts else region.columns:
            split[_join(path, "weight")] = 0
            split[_join(path, "bias")] = 0
    for path in (roles.embedding, roles.head):
        if path and path in modules:
            split[_join(path, "weight")] = 0
            split[_join(path, "bias")] = 0
    return split


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(canonical(name), p) for name, p in module.named_parameters(remove_duplicate=False)]


def _first_names(module: nn.Module) -> dict[str, str]:
    first = {p: canonical(name) for name, p in module.named_parameters()}
    return {name: first[p] for name, p in _named(module)}


def _distribute(module: nn.Module, split: Mapping[str, int], tp: DeviceMesh) -> None:
    """Each parameter as a DTensor of this rank's part. Every rank holds the same whole values before."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    dims: dict[nn.Parameter, int | None] = {}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in _named(module):
        dim = split.get(name)
        if dims.setdefault(parameter, dim) != dim:
            raise ModelError(
                f"{name} and {first[parameter]} are one weight, split in two ways.",
                why="one weight lies on the ranks in one way",
                fix="give both the same role, or 'replicated'",
            )
        first.setdefault(parameter, name)
    for owner in module.modules():
        slots = parameter_slots(owner)
        for name, parameter in slots.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                made[parameter] = _as_dtensor(parameter, dims[parameter], tp)
            slots[name] = made[parameter]


def _as_dtensor(parameter: nn.Parameter, dim: int | None, tp: DeviceMesh) -> nn.Parameter:
    values = parameter.detach()
    if dim is not None:
        here, sizes = tp.get_local_rank(), shares(values.shape[dim], tp.size())
        values = values.narrow(dim, sum(sizes[:here]), sizes[here]).clone()
    placement = Replicate() if dim is None else Shard(dim)
    whole = DTensor.from_local(
        values, tp, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, parameter.requires_grad)


def _surround(
    modules: Mapping[str, nn.Module], regions: list[Region], roles: Roles, course: Course, *,
    staged: bool, vocabulary_loss: bool,
) -> None:  # fmt: skip
    """Put what each module needs in the place of its forward."""
    around: dict[str, Around] = {}
    for region in regions:
        around[region.row] = Row(modules[region.row], region.row, course, region.path)
        for path in region.columns:
            around[path] = Column(modules[path], path, course, region.path, region.parts)
        around[region.path] = InRegion(modules[region.path], region.path, course)
    embedding, head = modules.get(roles.embedding), modules.get(roles.head)
    if roles.embedding and isinstance(embedding, nn.Embedding):
        around[roles.embedding] = Embedding(embedding, roles.embedding, course, staged=staged)
    elif roles.embedding and isinstance(embedding, Stub):
        around[roles.embedding] = _stub(embedding, roles.embedding, course)
    if roles.head and isinstance(head, nn.Linear):
        around[roles.head] = Head(head, roles.head, course, shards=vocabulary_loss)
    if course.sequence and not staged:
        blocks = {path: modules[path] for path in roles.blocks if path in modules and path not in around}
        around.update({path: InBlock(block, path, course) for path, block in blocks.items()})
    for path, inner in modules.items():
        if path not in around and _has_weights(inner):
            own = [m for name, m in inner.named_modules() if name and _join(path, canonical(name)) not in around]
            around[path] = Around(inner, path, course, tuple(own) if isinstance(inner, READ_INSIDE) else ())
    # The root always: what is raised in a module without weights passes there at the latest.
    around.setdefault("", Around(modules[""], "", course))
    for path, one in around.items():
        modules[path].forward = one


def _has_weights(module: nn.Module) -> bool:
    inner = module.modules() if isinstance(module, READ_INSIDE) else (module,)
    return any(isinstance(p, DTensor) for owner in inner for p in parameter_slots(owner).values())


def _stub(stub: Stub, path: str, course: Course) -> Beginning:
    """Token ids pass a stage that has not the embedding too, with the name that the embedding has for them."""
    beginning = Beginning(stub, path, course, staged=True)
    beginning.hidden = next(iter(inspect.signature(stub.shell[0].forward).parameters), "")
    return beginning
