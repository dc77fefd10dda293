"""Tensor parallel: weights lie as DTensors on the tp mesh, and forward computes with this rank's local part of them.

The layers' own forwards are kept: around each of them the local tensor stands in its parameter's place, and the
collectives are autograd functions of ours (parallel/collectives.py). Under sequence parallel what lies between the
regions is split by position: a region gathers all positions and its row layer scatters the sum.
Source: Megatron-LM, arXiv 1909.08053 and 2205.05198.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.data.order import seed_of
from shardwise.errors import ModelError
from shardwise.names import canonical
from shardwise.parallel.collectives import Copied, Gathered, Joined, Scattered, Summed
from shardwise.parallel.device_mesh import Mesh
from shardwise.parallel.roles import Region, Roles
from shardwise.torch_private import parameter_slots

Before = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
After = Callable[[Any], Any]
Localize = Callable[[str, DTensor], torch.Tensor | None]


class TensorParallel:
    """A module's tensor-parallel part.

    sequence: whether activations between the regions are split by position. why: what stays whole, and the reasons.
    """

    def __init__(
        self, module: nn.Module, group: Any, partial: set[str], sequence: bool, why: tuple[str, ...] = ()
    ) -> None:
        self.module, self.group, self.partial, self.sequence, self.why = module, group, partial, sequence, why

    def finish(self) -> None:
        """Gradients of weights that every rank holds whole, and of which each saw a part, are summed: one all-reduce.

        After the data-parallel sum. Collective over the tp group.
        """
        found = [p.grad for name, p in self.module.named_parameters() if canonical(name) in self.partial]
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in found if g is not None]
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            same = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same])
            dist.all_reduce(flat, group=self.group)
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
            why="; ".join(roles.why),
            fix='model.sequence_parallel = "auto"',
        )
    chosen = roles.sequence and roles.known if sequence == "auto" else bool(sequence)
    modules = {canonical(name): inner for name, inner in module.named_modules()}
    regions = [region for region in roles.regions if region.row in modules]
    for region in regions:
        _require_whole_heads(region, modules, tp.size())
    split = _placements(regions, roles, modules)
    partial = _partial(module, regions, split, sequence=chosen)
    _distribute(module, split, tp)
    group = tp.get_group()
    _localize(modules, regions, roles, group, sequence=chosen, vocabulary_loss=vocabulary_loss, tp=tp)
    return TensorParallel(module, group, partial, chosen, roles.why)


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


def _placements(regions: list[Region], roles: Roles, modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """The dim by which each split parameter is cut, by name; all others stay whole."""
    split: dict[str, int] = {}
    for region in regions:
        split[f"{region.row}.weight"] = 1
        for path in () if region.parts else region.columns:
            split[f"{path}.weight"] = 0
            split[f"{path}.bias"] = 0
    for path in (roles.embedding, roles.head):
        if path in modules:
            split[f"{path}.weight"] = 0
            split[f"{path}.bias"] = 0
    return split


def _partial(module: nn.Module, regions: list[Region], split: Mapping[str, int], *, sequence: bool) -> set[str]:
    """Names of whole parameters of whose gradient each rank computes a part.

    In a region: what is not its row layer's bias (a fused layer, a norm by head). Under sequence parallel: all.
    """
    whole = [name for name, _ in _named(module) if name not in split]
    if sequence:
        return set(whole)
    inside = tuple(f"{region.path}." for region in regions)
    rows = {f"{region.row}.bias" for region in regions}
    return {name for name in whole if name.startswith(inside) and name not in rows} if inside else set()


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(canonical(name), p) for name, p in module.named_parameters(remove_duplicate=False)]


def _distribute(module: nn.Module, split: Mapping[str, int], tp: DeviceMesh) -> None:
    """Each parameter as a DTensor of this rank's part. Every rank holds the same whole values before."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    dims: dict[nn.Parameter, int | None] = {}
    for name, parameter in _named(module):
        dim = split.get(name)
        if dims.setdefault(parameter, dim) != dim:
            raise ModelError(
                f"{name} is tied to a weight that is split in another way.",
                why="one weight lies on the ranks in one way",
                fix="give both the same role, or 'replicated'",
            )
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
        here, size = tp.get_local_rank(), -(-values.shape[dim] // tp.size())
        begin = min(here * size, values.shape[dim])
        values = values.narrow(dim, begin, min(size, values.shape[dim] - begin)).clone()
    placement = Replicate() if dim is None else Shard(dim)
    whole = DTensor.from_local(
        values, tp, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, parameter.requires_grad)


class Around:
    """In a module's forward: its weights are this rank's parts, and something may stand before it and after it."""

    def __init__(
        self,
        module: nn.Module,
        before: Before | None = None,
        after: After | None = None,
        localize: Localize | None = None,
    ) -> None:
        self.module, self.forward = (module,), module.forward  # in a tuple: an attribute would make it a child
        self.before, self.after, self.localize = before, after, localize

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            args, kwargs = self.before(args, kwargs)
        slots = parameter_slots(self.module[0])
        masters = {name: p for name, p in slots.items() if isinstance(p, DTensor)}
        try:
            for name, master in masters.items():
                slots[name] = self.localize(name, master) if self.localize is not None else master.to_local()
            outputs = self.forward(*args, **kwargs)
        finally:
            slots.update(masters)
        return outputs if self.after is None else self.after(outputs)


def _localize(
    modules: Mapping[str, nn.Module], regions: list[Region], roles: Roles, group: Any, *,
    sequence: bool, vocabulary_loss: bool, tp: DeviceMesh,
) -> None:  # fmt: skip
    around: dict[str, Around] = {}
    enter, leave = (Gathered, Scattered) if sequence else (Copied, Summed)
    for number, region in enumerate(regions):
        draws = None if sequence else _Apart(number, tp.get_local_rank())
        around[region.row] = _row(modules[region.row], leave, group, draws)
        if region.parts:
            for path in region.columns:
                around[path] = Around(modules[path], localize=_pieces(region.parts, tp))
        around[region.path] = _region(modules[region.path], enter, group, draws)
    if roles.embedding in modules and isinstance(modules[roles.embedding], nn.Embedding):
        around[roles.embedding] = _embedding(modules[roles.embedding], leave, group, tp, sequence=sequence)
    if roles.head in modules and isinstance(modules[roles.head], nn.Linear):
        around[roles.head] = _head(modules[roles.head], enter, group, tp, vocabulary_loss=vocabulary_loss)
    for path, inner in modules.items():
        if path in around or any(True for p in parameter_slots(inner).values() if isinstance(p, DTensor)):
            inner.forward = around.get(path) or Around(inner)


def _hidden(change: Callable[[torch.Tensor], torch.Tensor]) -> Before:
    """Change the first tensor that a module is given, the hidden one, and every other like it.

    Like it: floating and of its shape (a query, a key and a value), or with a gradient to be summed. What comes twice
    crosses once.
    """

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if first is None:
            raise ModelError("A split module was called without a tensor.", fix="give the hidden tensor first")
        changed: dict[int, torch.Tensor] = {}

        def of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not (value is first or _is_hidden(value, first)):
                return value
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]

        return tuple(of(value) for value in args), {key: of(value) for key, value in kwargs.items()}

    return before


def _is_hidden(value: torch.Tensor, first: torch.Tensor) -> bool:
    return value.is_floating_point() and (value.shape == first.shape or value.requires_grad)


class _Apart:
    """A random stream of this rank's own between a region's column layers and its row layer.

    What is whole on every rank must be dropped alike, what is split must not. The stream's seed is that of the
    micro-batch, the region and the rank, so recompute draws the same again; the shared one stands still meanwhile.
    """

    def __init__(self, region: int, here: int) -> None:
        self.region, self.here = region, here
        self.shared: list[torch.Tensor] = []
        self.device = torch.device("cpu")

    def begin(self, device: torch.device) -> None:
        self.device, self.shared = device, [torch.get_rng_state()]
        if device.type == "cuda":
            self.shared.append(torch.cuda.get_rng_state(device))
        torch.manual_seed(seed_of(torch.initial_seed(), "split region", self.region, self.here))

    def end(self) -> None:
        """Idempotent: the row layer ends it, and the region does so where an error came before."""
        if self.shared:
            torch.set_rng_state(self.shared[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self.shared[1], self.device)
            self.shared = []


def _row(module: nn.Module, leave: Any, group: Any, draws: _Apart | None) -> Around:
    """The bias is added once, after the sum; from there on all ranks hold the same, and draw the same."""
    bias: list[torch.Tensor] = []

    def localize(name: str, master: DTensor) -> torch.Tensor | None:
        if name != "bias":
            return master.to_local()
        bias[:] = [master.to_local()]
        return None

    def after(outputs: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = leave.apply(outputs, group)
        if draws is not None:
            draws.end()
        return total + bias.pop() if bias else total

    return Around(module, after=after, localize=localize)


def _pieces(parts: tuple[int, ...], tp: DeviceMesh) -> Localize:
    """Of a fused layer that every rank holds whole, this rank's rows of each part."""

    def localize(name: str, master: DTensor) -> torch.Tensor:
        whole, here, ranks = master.to_local(), tp.get_local_rank(), tp.size()
        pieces = [
            part.narrow(0, here * (size // ranks), size // ranks)
            for part, size in zip(whole.split(parts), parts, strict=True)
        ]
        return torch.cat(pieces)

    return localize


def _region(module: nn.Module, enter: Any, group: Any, draws: _Apart | None) -> Around:
    around = Around(module, before=_hidden(lambda x: enter.apply(x, group)))
    if draws is not None:
        inner = around.forward

        def drawing(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return inner(*args, **kwargs)
            device = next(
                (a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), torch.device("cpu")
            )
            draws.begin(device)
            try:
                return inner(*args, **kwargs)
            finally:
                draws.end()

        around.forward = drawing
    return around


def _embedding(module: nn.Module, leave: Any, group: Any, tp: DeviceMesh, *, sequence: bool) -> Around:
    """Each rank looks up the ids of its own rows; the others are zero, and the sum is the whole."""
    outside: list[torch.Tensor] = []
    size = -(-module.num_embeddings // tp.size())
    begin = min(tp.get_local_rank() * size, module.num_embeddings)
    end = min(begin + size, module.num_embeddings)

    def before(ids: torch.Tensor) -> torch.Tensor:
        if sequence and (ids.ndim < 2 or ids.shape[1] % tp.size()):
            raise ModelError(
                f"Token ids of shape {tuple(ids.shape)} do not divide by tp = {tp.size()} along the sequence.",
                why="sequence parallel gives each rank as many positions",
                fix="model.sequence_parallel = false, or sequences of a multiple of tp",
            )
        missing = (ids < begin) | (ids >= end)
        outside[:] = [missing]
        return (ids - begin).masked_fill(missing, 0)

    def after(outputs: torch.Tensor) -> torch.Tensor:
        found = outputs.masked_fill(outside.pop().unsqueeze(-1), 0.0)
        total: torch.Tensor = leave.apply(found, group)
        return total

    return Around(module, before=_hidden(before), after=after)


def _head(module: nn.Module, enter: Any, group: Any, tp: DeviceMesh, *, vocabulary_loss: bool) -> Around:
    vocabulary = module.out_features
    size = -(-vocabulary // tp.size())
    sizes = tuple(max(0, min(size, vocabulary - rank * size)) for rank in range(tp.size()))

    def after(outputs: torch.Tensor) -> torch.Tensor:
        if not vocabulary_loss:
            whole: torch.Tensor = Joined.apply(outputs, group, sizes)
            return whole
        shape = (*outputs.shape[:-1], vocabulary)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            outputs, tp, [Shard(len(shape) - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    return Around(module, before=_hidden(lambda x: enter.apply(x, group)), after=after)
