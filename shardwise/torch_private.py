"""Every private use of torch, in this one file. tests/unit/test_torch_private.py is the canary that names what changed.

What begins with an underscore in torch, and why it is used:
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _DispatchCacheKey,
    in_kernel_invocation_manager,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils import signal_handling

from shardwise.regions import Region, Split, part

# Base classes, to find every batch normalisation and every dropout by type.
BatchNorm = _BatchNorm
Dropout = _DropoutNd


class OperatorMode(TorchDispatchMode):
    """Sees every operator with its arguments, below autograd. Nothing is compiled under it: torch's guard for that,
    two more calls around each operator, is left out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# The operator behind every `.item()`, `.tolist()` and `bool()` of a tensor.
READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default
# The operator behind `.device` of a tensor without data.
ASKS_DEVICE = torch.ops.prim.device.default
# The operator behind `record_function`, which FSDP2 puts around all it does.
NAMES_A_RANGE = torch.ops.profiler._record_function_enter_new.default
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_META_NEEDS_DATA = ("cannot be called on meta tensors", "data-independent implementation does not exist")


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply to every leaf of nested dicts, lists, tuples and registered dataclasses."""
    return _pytree.tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    return _pytree.tree_leaves(tree)


def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in one call."""
    return list(torch._foreach_norm(tensors))


def scale_(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all in place, in one call."""
    torch._foreach_mul_(tensors, factor)


def parameter_slots(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, to put a compute copy in a parameter's place for one forward."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Any]:
    return module._buffers


def has_onednn_linear() -> bool:
    """Whether torch carries oneDNN's fused linear operator, which its compiler uses on CPU."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear_operator() -> Any:
    return torch.ops.mkldnn._linear_pointwise


def onednn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`, without a gradient. Shapes: [m, k], [n, k] -> [m, n]."""
    return onednn_linear_operator()(x, weight, None, "none", [], "")


def is_asked_for(edge: tuple[Any, int]) -> bool:
    """In a function's backward: whether the backward under way goes on along this one of its `next_functions`.

    `ctx.needs_input_grad` only says what could have a gradient: half a backward leaves the rest for later.
    """
    if edge[0] is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(edge[0]))
    except RuntimeError:
        return True  # it ends there: torch answers for leaves of autograd.grad by an error that says so


def unsafe_view(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view that autograd treats as a new tensor: for a result that nobody else holds."""
    return torch.ops.aten._unsafe_view(x, shape)


def forget_workers(batches: Any) -> None:
    """Take a DataLoader iterator's workers off torch's SIGCHLD watch, which raises at arbitrary lines when one ends."""
    signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
    batches._worker_pids_set = False


def shutdown_workers(batches: Any) -> None:
    """What dropping a DataLoader iterator's last reference calls; a traceback may hold one for long."""
    batches._shutdown_workers()


class _WithoutData(FakeTensorMode):
    """torch's mode, which finds in its cache with less asking: half of a dry run's time was the keys to that cache.

    What stands in a key is what torch puts there; what it keeps, and what it keeps nothing of, stays torch's choice.
    """

    _SIMPLE = frozenset(
        {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
    )

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[torch.device, tuple[torch.device, dict[str, Any]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default  # the same tensor below autograd, and torch's cache takes it
        return self.dispatch(func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        values = [_WithoutData, func, torch.get_default_dtype(), torch._C._get_default_device(),
                  torch.is_inference_mode_enabled()]  # fmt: skip
        if self._put(values, args) and self._put(values, kwargs.keys()) and self._put(values, kwargs.values()):
            return _DispatchCacheKey(tuple(values))
        return super()._cache_key(state, func, args, kwargs)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        """A new tensor as a known call gives it: a third of a dry run's time was this. The rest is left to torch."""
        metadata = entry.metadata
        plain = (
            entry.inplace_idx is None and metadata is not None and metadata.layout is torch.strided
            and not metadata.is_conj and not metadata.is_neg and self.shape_env is None
        )  # fmt: skip
        if not plain:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, func, args)
        of = args[entry.view_idx].untyped_storage() if func.is_view else None
        shape, stride, offset = metadata.shape, metadata.stride, metadata.storage_offset
        with in_kernel_invocation_manager(self):
            made = torch.empty_strided(
                shape, stride, dtype=metadata.dtype, device="meta", requires_grad=metadata.requires_grad
            )
            if of is not None:
                made.set_(of, offset, shape, stride)
        return self._with_device(made, metadata.device)

    def _with_device(self, made: torch.Tensor, device: torch.device) -> Any:
        """`FakeTensor(self, made, device)`: from the second one for a device on, all attributes are copied at once."""
        if device not in self._known:
            first = FakeTensor(self, made, device)
            self._known[device] = first.fake_device, dict(first.__dict__)
            return first
        stands_for, attributes = self._known[device]
        tensor = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=stands_for
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__dict__.update(attributes)
        return tensor

    def _put(self, values: list[Any], args: Any) -> bool:
        """Whether all could be told apart by what this put into `values`."""
        values.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and arg.layout is torch.strided:
                # Among the keys are conjugate, negative, quantized, inference; the memory format follows from strides.
                keys = torch._C._dispatch_keys(arg).raw_repr()
                place = arg.stride(), arg.storage_offset(), arg.fake_device, arg.untyped_storage().nbytes()
                values += (kind, arg.dtype, arg.shape, *place, arg.requires_grad, keys)
            elif kind in self._SIMPLE:
                values += (kind, arg)
            elif kind in (list, tuple, torch.Size):
                values.append(kind)
                if not self._put(values, arg):
                    return False
            else:
                return False
        return True


def without_data() -> Any:
    """A new mode whose tensors have a shape, a dtype and a device and no data; it takes real ones for such."""
    return _WithoutData()


def active_without_data() -> Any:
    """The mode of that kind that everything runs under (a dry run), if there is one."""
    return detect_fake_mode()


def needs_data(error: Exception) -> bool:
    """Whether an operator raised this because it would have to look at a number that is not there."""
    return isinstance(error, _NEEDS_DATA) or any(words in str(error) for words in _META_NEEDS_DATA)


def device_without_data(tensor: Any) -> torch.device:
    """The device that a tensor without data stands for; `.device` asks every mode for it, some times an operator."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def below_modes(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator that takes no tensor, and is asked of no mode: a mode without data takes 0.4 ms for nothing."""
    with torch._C._DisableTorchDispatch():
        return operator(*args, **(kwargs or {}))


def lacks_data(tensor: Any, mode: Any) -> bool:
    """Whether a tensor was made under this mode, or from one that was."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode


def load_split_backward() -> None:
    """Import what the next two functions use, which takes a second and makes a tensor: a mode would count it."""
    import torch.distributed.pipelining._backward  # noqa: F401


def backward_to_input(
    output: torch.Tensor, gradient: torch.Tensor | None, received: torch.Tensor, weights: list[nn.Parameter]
) -> list[Any]:
    """The gradient of `received`, into its `.grad`; what `backward_to_weights` needs to do the rest.

    `gradient` None: `output` is a scalar. No hook on a parameter runs in either half.
    """
    from torch.distributed.pipelining._backward import stage_backward_input  # a second of imports

    if output._is_view():
        output = unsafe_view(output, tuple(output.shape))  # torch detaches it in place, which a view does not allow
    gradients = None if gradient is None else [gradient]
    return stage_backward_input([output], gradients, [received], iter(weights))[1]


def backward_to_weights(weights: list[nn.Parameter], rest: list[Any]) -> None:
    """Add to each weight's `.grad`."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), rest)


def weights_met_again(output: torch.Tensor, received: torch.Tensor, weights: list[nn.Parameter]) -> list[nn.Parameter]:
    """The weights that `backward_to_weights` cannot do: used in two places, one behind the other, with others between.

    From the one place it would go back as far as the other, and what lies between is gone with those others' gradients.
    """
    from torch.distributed.pipelining import _backward

    node_of = _backward._get_grad_fn_or_grad_acc
    accumulating = {node_of(weight): weight for weight in weights if weight.requires_grad}
    edges = _backward.construct_reverse_graph([node_of(output)])  # type: ignore[list-item]
    groups = _backward.get_param_groups([node_of(received)], list(accumulating), edges)  # type: ignore[list-item, arg-type]
    group_of = {node: index for index, group in enumerate(groups) for node in group["intermediates"]}
    met = list[nn.Parameter]()
    for index, group in enumerate(groups):
        if len(group["intermediates"]) > 1 and _meets(group["intermediates"], index, group_of):
            met += [accumulating[node] for node in group["params"]]
    return met


def _meets(places: set[Any], index: int, group_of: dict[Any, int]) -> bool:
    """Whether the way back from one of these nodes leads to another of them past one of another group."""
    stack = [(following, False) for place in places for following, _ in place.next_functions]
    seen = set[tuple[Any, bool]]()
    while stack:
        node, past = stack.pop()
        if node is None or (node, past) in seen:
            continue
        seen.add((node, past))
        if past and node in places:
            return True
        past = past or group_of.get(node, index) != index
        stack += [(following, past) for following, _ in node.next_functions]
    return False


def pipeline_order(schedule: str, pp: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """torch's own table of "zbv" or "dualpipev": of each pipeline rank (kind, stage, micro-batch), kinds F, B, I and W.

    A pair that torch marks to overlap is its forward, then its backward, as torch runs it where nothing else is
    registered. What ours in plan/schedules.py is held against.
    """
    from torch.distributed.pipelining import schedules  # a second of imports

    torchs = {"zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}[schedule]
    shape = SimpleNamespace(pp_group_size=pp, num_stages=2 * pp, _n_microbatches=micro_batches)
    kinds = {
        schedules.FORWARD: "F", schedules.FULL_BACKWARD: "B",
        schedules.BACKWARD_INPUT: "I", schedules.BACKWARD_WEIGHT: "W",
    }  # fmt: skip
    return [
        [
            (kinds[part.computation_type], part.stage_index, part.microbatch_index)
            for action in torchs._calculate_single_rank_operations(shape, rank)
            if action is not None
            for part in action.sub_actions or (action,)
        ]
        for rank in range(pp)
    ]


def fake_store() -> Any:
    """What a fake process group is made with; importing it registers the backend `fake`, which answers at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_of_name(name: str) -> Any:
    """The process group that functional collectives call by this name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


@contextmanager
def storage_resizes(seen: Callable[[Any], None]) -> Iterator[None]:
    """Call `seen(storage)` after every resize, which no operator shows: FSDP2 frees and regrows whole weights so."""
    before = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        result = before(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]


def gathered(unit: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What an FSDP2 unit holds whole beside its shards: parameters that have storage, and gradients not yet reduced."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            if whole is None:
                continue
            if all(output.untyped_storage().size() for output in one.all_gather_outputs):
                parameters.append(whole)
            found = (whole.grad, one.unsharded_accumulated_grad)
            gradients.extend(gradient for gradient in found if gradient is not None)
    return parameters, gradients


def products_and_attention() -> frozenset[Any]:
    """The operators that matrix products and attention come down to, our own linear layer's among them."""
    aten = torch.ops.aten
    found = {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
    }
    if has_onednn_linear():
        found.add(onednn_linear_operator().default)
    if hasattr(torch.ops.shardwise, "grouped_product"):  # models/grouped.py registers it where experts are
        found.add(torch.ops.shardwise.grouped_product.default)
    return frozenset(found)


def selective_contexts() -> tuple[Any, Any]:
    """torch's contexts for selective recompute that keep `products_and_attention`; all else runs again unlooked at.

    torch's own second context counts every operator, and raises where a sharded module inside the block gathers in one
    of the two forwards and not in the other.
    """
    from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, create_selective_checkpoint_contexts

    kept = products_and_attention()

    class Reuse(_CachedTorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in kept:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, Reuse(policy, second.storage)


def held_region(tensor: DTensor) -> Region:
    """The part of the logical tensor that this rank holds: each dim cut by torch.chunk's rule, uneven sizes too.

    Axes of the mesh cut from the outermost, except where fully_shard cut what tensor parallel had cut before: torch
    marks that as _StridedShard, and there the inner axes cut first. Raises: ValueError for any other, saying why.
    """
    mesh, coordinate, found = tensor.device_mesh, tensor.device_mesh.get_coordinate(), tensor.placements
    if coordinate is None:
        raise ValueError("this rank is outside its device mesh")
    splits: list[Split] = []
    after: list[Split] = []
    for axis, placement in enumerate(found):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ValueError(f"it is placed as {placement}")
        split = Split(placement.dim % tensor.ndim, mesh.size(axis), coordinate[axis])
        if not isinstance(placement, _StridedShard):
            splits.append(split)
            continue
        inner = [a for a in range(axis + 1, mesh.ndim) if getattr(found[a], "dim", None) == placement.dim]
        if placement.split_factor != math.prod(mesh.size(a) for a in inner):
            raise ValueError(f"its placement {placement} is not that of fully_shard over the axes inside it")
        after.insert(0, split)
    region, local = part(tensor.shape, splits + after), tuple(tensor.to_local().shape)
    if local != region.shape:
        raise ValueError(f"its local shape is {local}, and torch.chunk's rule gives {region.shape}")
    return region


def alike_ranks(mesh: Any, sharded: Sequence[int]) -> tuple[int, ...]:
    """The ranks, in order, whose coordinates along the mesh's `sharded` axes are this rank's: all else is replicas.

    The ranks of the mesh that it was sliced from count too: what a rank holds along `mesh["tp"]` others hold along the
    axes beside it.
    """
    coordinate = mesh.get_coordinate()
    # Every slice of the root along these axes, this rank's among them: slices x the mesh's own shape.
    slices = mesh._layout.remap_to_tensor(mesh._rank_map)
    picked = tuple(coordinate[axis] if axis in sharded else slice(None) for axis in range(mesh.ndim))
    return tuple(sorted(slices[(slice(None), *picked)].reshape(-1).tolist()))


def store_connection() -> Any:
    """The group's store through a connection of its own: what waits in it holds up nobody else. Thread-safe."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()


def forget_layouts() -> None:
    """Empty DTensor's caches: they take meshes of one shape for equal, and would hand on another rank's."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def gather_into(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Every rank's part, one after another. Public, under another name since torch 2.13, where the old one warns."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """This rank's part of the sum of all ranks' wholes; as `gather_into`."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, whole, group=group)


class LayoutsWorkedOut:
    """`with LayoutsWorkedOut() as layouts:` `layouts.under_way` is true while DTensor works out a result's shape.

    It makes whole tensors without data for that alone, and a mode sees them as if the program had made them.
    """

    def __init__(self) -> None:
        self.under_way = False

    def __enter__(self) -> "LayoutsWorkedOut":
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        self.before = before = ShardingPropagator._propagate_tensor_meta_non_cached

        def noticed(propagator: Any, schema: Any) -> Any:
            self.under_way = True
            try:
                return before(propagator, schema)
            finally:
                self.under_way = False

        ShardingPropagator._propagate_tensor_meta_non_cached = noticed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_error: object) -> None:
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        ShardingPropagator._propagate_tensor_meta_non_cached = self.before  # type: ignore[method-assign]


def last_collectives() -> list[tuple[str, int, str, str]]:
    """What torch's recorder holds of collectives, oldest first: group, number in it, name, "done" or how far it is.

    Empty where the recorder is off, or no group was made. From any thread.
    """
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries = msgspec.json.decode(_dump_fr_trace_json()).get("entries") or []
    return [
        (
            " ".join(dict.fromkeys(one["process_group"])),
            one["p2p_seq_id"] if one["is_p2p"] else one["collective_seq_id"],
            one["profiling_name"],
            "done" if one["retired"] else one["state"],
        )
        for one in sorted(entries, key=lambda one: one["record_id"])
    ]


def around_compiling(begin: Callable[[], None], end: Callable[[], None]) -> bool:
    """Call these around every compilation of torch.compile's in this process, from now on; False where its compiler is
    not loaded yet, which takes a second and happens before anything is compiled.
    """
    if "torch._dynamo.callback" not in sys.modules:
        return False
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: begin())
    callback_handler.register_end_callback(lambda _: end())
    return True
