"""The canary: each private use of torch does what the engine takes it to do, and no other file has one."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader

from shardwise import torch_private
from shardwise.plan import schedules

PACKAGE = Path(torch_private.__file__).parent
PRIVATE = re.compile(
    r"torch[\w.]*\._[a-z]|from torch[\w.]* import (?:[\w, ]*\b)?_[A-Za-z]|import torch[\w.]*\._"
    r"|\._parameters\b|\._buffers\b|\._shutdown_workers|\._worker_pids|\._local_tensor"
)


def test_no_other_file_uses_what_is_private_in_torch() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if PRIVATE.search(line)
    ]
    assert found == []


def test_the_supported_torch_is_installed() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (2, 11) <= (major, minor) < (2, 15)


def test_trees_are_mapped_and_flattened() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    assert torch_private.tree_map(lambda leaf: leaf * 2, tree)["b"] == (6,)
    assert torch_private.tree_leaves(tree)[1:] == [2, 3]


def test_norms_and_scaling_work_on_many_tensors_and_on_empty_ones() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.zeros(0)]
    assert [float(norm) for norm in torch_private.norms(tensors)] == [5.0, 0.0]
    torch_private.scale_(tensors, 2.0)
    assert tensors[0].tolist() == [6.0, 8.0]


def test_a_parameter_slot_takes_a_tensor_for_one_forward() -> None:
    layer = nn.Linear(2, 1, bias=False)
    kept = layer.weight
    torch_private.parameter_slots(layer)["weight"] = torch.zeros(1, 2)
    assert layer(torch.ones(1, 2)).item() == 0
    torch_private.parameter_slots(layer)["weight"] = kept
    assert layer.weight is kept
    assert "running_mean" in torch_private.buffer_slots(nn.BatchNorm1d(2))


def test_base_classes_cover_their_kinds() -> None:
    assert isinstance(nn.BatchNorm2d(1), torch_private.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(1), torch_private.BatchNorm)
    assert isinstance(nn.Dropout2d(), torch_private.Dropout)


@pytest.mark.skipif(not torch_private.has_onednn_linear(), reason="this torch has no oneDNN")
def test_the_onednn_linear_is_a_matrix_product() -> None:
    """Small integers: every sum is exact in fp32."""
    x, weight = torch.arange(6.0).view(3, 2), torch.arange(8.0).view(4, 2)
    product = torch_private.onednn_linear(x, weight)
    assert torch.equal(product, x @ weight.T)
    assert torch_private.unsafe_view(product, (1, 3, 4)).shape == (1, 3, 4)


def test_workers_are_forgotten_and_ended() -> None:
    batches = iter(DataLoader(range(4), num_workers=1))  # type: ignore[arg-type]
    next(batches)
    torch_private.forget_workers(batches)
    torch_private.shutdown_workers(batches)
    assert not any(worker.is_alive() for worker in batches._workers)  # type: ignore[attr-defined]


def test_tensors_without_data_have_shapes_and_infect_what_they_meet() -> None:
    mode = torch_private.without_data()
    with mode:
        empty = torch.empty(2, 3)
    mixed = empty + torch.ones(3)
    assert mixed.shape == (2, 3)
    assert torch_private.lacks_data(mixed, mode)
    assert not torch_private.lacks_data(mixed, torch_private.without_data())
    assert torch_private.active_without_data() is None
    with mode:
        assert torch_private.active_without_data() is mode


CALLS: dict[str, Any] = {
    "a new tensor": lambda x: (x + 1,),
    "a view": lambda x: (x.t(),),
    "a view of a view": lambda x: (x[1:, 2:].t(),),
    "several views": lambda x: x.split(2, dim=1),
    "in place": lambda x: (x.mul_(2),),
    "a product": lambda x: (x @ x.t(),),
    "another dtype": lambda x: (x.to(torch.bfloat16),),
    "two results": lambda x: x.max(dim=0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_known_call_gives_what_torchs_own_mode_gives(call: str) -> None:
    """The third time it comes from the cache, and all its attributes at once."""
    told = []
    for mode in (torch_private.without_data(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            x = torch.empty(4, 6)
            made = [CALLS[call](x) for _ in range(3)][-1]
        told.append(
            [
                (
                    type(one), one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one.requires_grad,
                    one.untyped_storage().nbytes(), one.untyped_storage()._cdata == x.untyped_storage()._cdata,
                    one.fake_mode is mode, {key: value for key, value in one.__dict__.items() if value is not mode},
                )
                for one in made
            ]
        )  # fmt: skip
    assert told[0] == told[1]


class Notes(torch_private.OperatorMode):
    """Writes down every operator, and takes those that name a range past the modes below."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(operator)
        if operator is torch_private.NAMES_A_RANGE:
            return torch_private.below_modes(operator, args, kwargs)
        return operator(*args, **(kwargs or {}))


def test_a_named_range_is_one_operator_that_no_mode_needs_to_see() -> None:
    with torch_private.without_data(), Notes() as notes, torch.profiler.record_function("a range"):
        made = torch.ones(2)
    assert notes.seen[0] is torch_private.NAMES_A_RANGE and made.shape == (2,)
    range_named = torch.profiler.record_function("another range")
    with torch.profiler.profile() as profile, torch_private.without_data(), Notes(), range_named:
        torch.ones(2)
    assert "another range" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("scalar", [False, True])
def test_a_backward_in_two_halves_gives_the_gradients_of_one(scalar: bool) -> None:
    """Twice, so that what adds up is seen; the output is a view, and a weight is used twice."""
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 4).double()
    weights = [*first.parameters(), *second.parameters()]
    received = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    towards = None if scalar else torch.randn(4, 2, dtype=torch.float64)

    def forward() -> torch.Tensor:
        output = second(first(first(received).tanh())).square().t()
        return output.sum() if scalar else output

    for _ in range(2):
        torch.autograd.backward(forward(), towards)
    expected = [received.grad / 2, *(w.grad.clone() for w in weights)]  # type: ignore[union-attr, operator]
    received.grad = None
    for weight in weights:
        weight.grad = None
    for _ in range(2):
        received.grad = None
        rest = torch_private.backward_to_input(forward(), towards, received, weights)
        torch_private.backward_to_weights(weights, rest)
    for found, wanted in zip([received.grad, *(w.grad for w in weights)], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class _Product(torch.autograd.Function):
    """x times y, whose backward says what it was asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _Product.asked = tuple(torch_private.is_asked_for(edge) for edge in ctx.next_functions)
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x

    asked: tuple[bool, ...] = ()


def test_a_backward_of_ones_own_learns_what_it_was_asked_for() -> None:
    """Of a leaf x, of y that was made from another leaf, and of a constant."""
    x, leaf = (torch.ones(2, requires_grad=True) for _ in range(2))
    y = 2 * leaf
    _Product.apply(x, y).sum().backward(retain_graph=True)
    assert _Product.asked == (True, True)
    for wanted, asked in ((x, (True, False)), (y, (False, True)), (leaf, (False, True))):
        torch.autograd.grad(_Product.apply(x, y).sum(), wanted, retain_graph=True)
        assert _Product.asked == asked
        torch.autograd.backward(_Product.apply(x, y).sum(), inputs=[wanted], retain_graph=True)
        assert _Product.asked == asked
    _Product.apply(x, torch.ones(2)).sum().backward()
    assert _Product.asked == (True, False)


@pytest.mark.parametrize("schedule", schedules.V_SHAPED)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8])
def test_our_table_of_a_v_is_torchs_own(schedule: str, pp: int) -> None:
    for micros in [one for one in range(1, 4 * pp + 2) if not schedules.requires(schedule, pp, 2, one)]:
        ours = schedules.actions(schedule, pp, 2, micros)
        assert [[tuple(a) for a in table] for table in ours] == torch_private.pipeline_order(schedule, pp, micros)


def test_a_storage_that_changes_its_size_is_seen_and_the_method_is_torchs_own_again() -> None:
    seen: list[int] = []
    tensor, before = torch.zeros(4), torch.UntypedStorage.resize_
    with torch_private.storage_resizes(lambda storage: seen.append(storage.nbytes())):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16)
    assert seen == [0, 16]
    assert torch.UntypedStorage.resize_ is before


def test_a_fake_group_answers_at_once_and_is_found_by_its_name() -> None:
    import torch.distributed as dist

    dist.init_process_group("fake", rank=3, world_size=512, store=torch_private.fake_store())
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
        assert torch_private.group_of_name(dist.group.WORLD.group_name).size() == 512
    finally:
        dist.destroy_process_group()


def test_products_and_attention_are_the_operators_that_autograd_runs() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, 4, 4, requires_grad=True)
    with Watch():
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        nn.Linear(4, 4)(x)
    kept = torch_private.products_and_attention()
    assert len([func for func in seen if func in kept]) == 2


def test_what_a_sharded_unit_holds_whole_is_found() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        unit = fully_shard(nn.Linear(3, 2), reshard_after_forward=False)
        assert torch_private.gathered(unit) == ([], [])
        unit.set_requires_gradient_sync(False)
        unit.set_reshard_after_backward(False)
        unit(torch.ones(1, 3)).sum().backward()
        parameters, gradients = torch_private.gathered(unit)
        assert [p.numel() for p in parameters] == [g.numel() for g in gradients] == [6, 2]
        unit.reshard()
        assert torch_private.gathered(unit)[0] == []
    finally:
        dist.destroy_process_group()


def test_dtensors_caches_can_be_emptied() -> None:
    torch_private.forget_layouts()


def test_fully_shard_over_tensor_parallel_cuts_what_tensor_parallel_had_cut() -> None:
    """Rank 5 of 2 x 2 x 2 is replica 1, shard 0, tp 1: tp leaves it rows 4 to 6 of 7, and the shard two of these."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from shardwise.regions import Region

    dist.init_process_group("fake", rank=5, world_size=8, store=torch_private.fake_store())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        placed = [Shard(0), Shard(1), Replicate()]
        module = nn.ParameterList([distribute_tensor(torch.zeros(7, 5), mesh["tp"], [one]) for one in placed])
        fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
        regions = [torch_private.held_region(p) for p in module]
        assert regions == [Region((4, 0), (2, 5)), Region((0, 3), (4, 2)), Region((0, 0), (4, 5))]
        sums = torch.distributed.tensor.DTensor.from_local(torch.zeros(2), mesh["tp"], [Partial()])
        with pytest.raises(ValueError, match="it is placed as"):
            torch_private.held_region(sums)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(8))
def test_the_ranks_that_hold_what_this_one_does_are_those_that_differ_along_other_axes(rank: int) -> None:
    """A mesh of 2 x 2 x 2 as a, b, c: rank = 4 a + 2 b + c; slices and joined axes of it too."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    a, b, c = rank // 4, rank // 2 % 2, rank % 2
    everyone = [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    dist.init_process_group("fake", rank=rank, world_size=8, store=torch_private.fake_store())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        joined = mesh["a", "b"]._flatten("ab")
        for part, sharded, same in (
            (mesh, (), lambda x, y, z: True),
            (mesh, (1,), lambda x, y, z: y == b),
            (mesh, (0, 2), lambda x, y, z: (x, z) == (a, c)),
            (mesh["c"], (0,), lambda x, y, z: z == c),
            (mesh["b", "c"], (0,), lambda x, y, z: y == b),
            (joined, (0,), lambda x, y, z: (x, y) == (a, b)),
        ):
            expected = tuple(4 * x + 2 * y + z for x, y, z in everyone if same(x, y, z))
            assert torch_private.alike_ranks(part, sharded) == expected
    finally:
        dist.destroy_process_group()


def test_a_connection_of_its_own_sees_what_the_groups_store_holds() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, is_master=True), rank=0, world_size=1)
    try:
        ours, theirs = torch_private.store_connection(), torch_private.store_connection()
        ours.set("shardwise/a", b"\x00report")
        assert theirs.get("shardwise/a") == b"\x00report"
        assert theirs.check(["shardwise/a"]) and not theirs.check(["shardwise/b"])
        assert theirs.delete_key("shardwise/a") and not ours.check(["shardwise/a"])
    finally:
        dist.destroy_process_group()


def test_parts_are_gathered_and_scattered_without_a_warning() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, part = torch.zeros(3), torch.zeros(3)
        torch_private.gather_into(whole, torch.ones(3), dist.group.WORLD)
        torch_private.reduce_scatter(part, whole, dist.group.WORLD)
        assert whole.tolist() == part.tolist() == [1.0, 1.0, 1.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("between", [False, True])
def test_a_weight_met_again_is_told_where_torch_fails_and_only_there(between: bool) -> None:
    """A norm before and behind a layer with weights: torch's second half raises; behind a plain function not."""
    norm, layer = nn.LayerNorm(3), nn.Linear(3, 3)
    weights = [*norm.parameters(), *(layer.parameters() if between else ())]
    received = torch.randn(2, 3, requires_grad=True)
    middle = norm(received)
    output = norm(layer(middle) if between else middle.tanh()).square()
    met = torch_private.weights_met_again(output, received, weights)
    assert {id(p) for p in met} == ({id(p) for p in norm.parameters()} if between else set())
    rest = torch_private.backward_to_input(output, torch.ones_like(output), received, weights)
    if between:
        with pytest.raises(RuntimeError, match="second time"):
            torch_private.backward_to_weights(weights, rest)
    else:
        torch_private.backward_to_weights(weights, rest)
        assert all(weight.grad is not None for weight in weights)
