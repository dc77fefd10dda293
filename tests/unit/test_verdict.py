"""A fault is told by its structure: made-up comparisons in, likely causes out."""

import dataclasses
from typing import Any

import msgspec
import pytest

from shardwise.plan.mesh import MeshShape
from shardwise.verify.judge import judge, judge_dropout, judge_resume, layer
from shardwise.verify.verdict import Bounds, Check, Comparison, Fault, Masks, Resumed, Tensor, Told, Verdict

NAMES = ("embed.weight", "blocks.0.q.weight", "blocks.0.norm.weight", "blocks.1.q.weight", "head.weight")


@dataclasses.dataclass
class World:
    """N ranks that agree with the one process; a test spoils one thing."""

    mesh: MeshShape
    split: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def told(self, rank: int, **changes: Any) -> Told:
        samples = tuple(range(6))
        share = samples[self.mesh.data_coord(rank) :: self.mesh.data_parallel]
        squares = {name: 1.0 for name in NAMES if rank in self.holders(name)}
        parts = {axis for axes in self.split.values() for axis in axes}
        for name in squares:
            for axis in parts & set(self.split.get(name, ())):
                squares[name] /= getattr(self.mesh, axis)
        outputs = {
            f"blocks.{i}": (1.0 / self.mesh.data_parallel,) for i in (0, 1) if rank in self.holders(f"blocks.{i}.")
        }
        told = Told((3.0, 2.0), (10.0, 10.0), (5.0**0.5, 1.0), 2.5, share, squares, outputs)
        return msgspec.structs.replace(told, **changes)

    def holders(self, name: str) -> tuple[int, ...]:
        last = name.startswith(("blocks.1", "head"))
        ranks = range(self.mesh.world)
        return tuple(r for r in ranks if self.mesh.pp == 1 or self.mesh.coord(r).pp == (self.mesh.pp - 1) * last)

    def tensor(self, name: str, kind: str, **changes: Any) -> Tensor:
        ranks = self.holders(name)
        tensor = Tensor(name, kind, ranks, (0.0,) * len(ranks), (0,) * len(ranks), self.split.get(name, ()))
        return msgspec.structs.replace(tensor, **changes)

    def comparison(self, spoil: dict[tuple[str, str], dict[str, Any]] | None = None, **changes: Any) -> Comparison:
        spoil = spoil or {}
        tensors = tuple(
            self.tensor(name, kind, **spoil.get((kind, name), {}))
            for kind in ("initial value", "gradient", "parameter")
            for name in NAMES
        )
        one = self.told(0, samples=tuple(range(6)), outputs={"blocks.0": (1.0,), "blocks.1": (1.0,)})
        made = Comparison("logic", self.mesh, 5, Bounds(1e-10, 1e-10, 1e-10, 1e-10), one,
                          tuple(self.told(r) for r in range(self.mesh.world)), tensors,
                          (("embed.weight", "head.weight"),))  # fmt: skip
        return msgspec.structs.replace(made, **changes)


def fault(comparison: Comparison) -> Fault:
    judged = judge(comparison)
    assert judged.fault is not None
    assert not all(check.passed for check in judged.checks)
    return judged.fault


WORLDS = [
    World(MeshShape()), World(MeshShape(dp_replicate=3)),
    World(MeshShape(dp_shard=3), dict.fromkeys(NAMES, ("dp_shard",))),
    World(MeshShape(tp=2), {"blocks.0.q.weight": ("tp",)}), World(MeshShape(pp=2, dp_replicate=2, tp=2)),
]  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_agree_pass_every_check(world: World) -> None:
    judged = judge(world.comparison())
    assert judged.fault is None
    assert [check.what for check in judged.checks if not check.passed] == []


def test_the_first_gradient_named_is_the_nearest_to_the_loss() -> None:
    world = World(MeshShape(dp_replicate=2))
    wrong = {"differences": (0.1, 0.1), "ratio": 0.9, "residual": 0.3}
    found = fault(world.comparison({("gradient", n): wrong for n in NAMES[:4]}))
    assert found.tensor == "blocks.1.q.weight"
    assert found.layer == "blocks.1"


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp", "pp"])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_factor_that_is_a_degree_names_its_axis(axis: str, inverse: bool) -> None:
    world = World(MeshShape(**{axis: 3}))
    ratio = 1 / 3 if inverse else 3.0
    spoil = {
        ("gradient", n): {"differences": (2.0,) * len(world.holders(n)), "ratio": ratio, "residual": 1e-16}
        for n in NAMES
    }
    found = fault(world.comparison(spoil))
    assert found.axis == axis
    assert ("divided" if inverse else "multiplied") in found.cause


def test_a_factor_that_is_the_number_of_micro_batches_is_told_as_such() -> None:
    world = World(MeshShape(dp_replicate=2))
    spoil = {("gradient", n): {"differences": (0.8, 0.8), "ratio": 0.2, "residual": 0.0} for n in NAMES}
    assert "accumulation" in fault(world.comparison(spoil)).cause


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_unequal_copies_name_the_axis_that_nothing_was_summed_over(axis: str) -> None:
    world = World(MeshShape(**{axis: 2}, tp=2))
    copies = tuple(getattr(world.mesh.coord(rank), axis) for rank in range(4))
    spoil = {("gradient", n): {"differences": (0.1,) * 4, "copies": copies, "residual": 0.5} for n in NAMES}
    found = fault(world.comparison(spoil))
    assert found.axis == axis
    assert "not summed" in found.cause


def test_only_what_is_whole_over_tp_differs() -> None:
    world = World(MeshShape(tp=2), {n: ("tp",) for n in NAMES if "norm" not in n})
    found = fault(
        world.comparison({("gradient", "blocks.0.norm.weight"): {"differences": (0.5, 0.5), "residual": 0.4}})
    )
    assert found.axis == "tp"
    assert "partial sum" in found.cause


def test_only_one_stage_differs() -> None:
    world = World(MeshShape(pp=2))
    spoil = {("gradient", n): {"differences": (0.5,), "residual": 0.4} for n in NAMES[:3]}
    found = fault(world.comparison(spoil, ties=()))
    assert (found.axis, "only stage 0" in found.cause) == ("pp", True)


def test_swapped_blocks_are_known_by_their_values() -> None:
    world = World(MeshShape(pp=2))
    spoil = {
        ("initial value", "blocks.0.q.weight"): {"differences": (1.4,), "twin": "blocks.1.q.weight"},
        ("initial value", "blocks.1.q.weight"): {"differences": (1.4,), "twin": "blocks.0.q.weight"},
    }
    assert "blocks.0 and blocks.1 are swapped between the stages" in fault(world.comparison(spoil)).cause


def test_only_the_tied_weight_differs() -> None:
    world = World(MeshShape(dp_replicate=2))
    spoil = {("gradient", "embed.weight"): {"differences": (0.5, 0.5), "residual": 0.2}}
    assert "untied" in fault(world.comparison(spoil)).cause


def test_the_norm_alone_tells_what_was_not_summed() -> None:
    world = World(MeshShape(dp_shard=2, tp=2), dict.fromkeys(NAMES, ("dp_shard",)))
    half = tuple(world.told(r, norms=((5 / 2) ** 0.5, 1.0)) for r in range(4))
    assert fault(world.comparison(ranks=half)).axis == "dp_shard"
    twice = tuple(world.told(r, norms=(10**0.5, 1.0)) for r in range(4))
    found = fault(world.comparison(ranks=twice))
    assert (found.axis, "once a rank" in found.cause) == ("tp", True)


def test_the_first_block_whose_output_differs_is_named() -> None:
    world = World(MeshShape(tp=2))
    ranks = tuple(world.told(r, outputs={"blocks.0": (1.0,), "blocks.1": (0.5,)}) for r in range(2))
    found = fault(world.comparison(ranks=ranks))
    assert (found.tensor, found.axis) == ("output of blocks.1", "tp")


def test_parts_of_an_output_add_up_and_copies_count_once() -> None:
    world = World(MeshShape(dp_replicate=2, tp=2))
    parts = [(0.2,), (0.3,), (0.5,), (0.5,)]
    ranks = tuple(world.told(r, outputs={"blocks.0": parts[r], "blocks.1": (0.5,)}) for r in range(4))
    spoiled = judge(world.comparison(ranks=ranks))
    assert [check.what for check in spoiled.checks if not check.passed] == []


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_samples_that_are_read_twice_name_the_axis(axis: str) -> None:
    world = World(MeshShape(**{axis: 2}))
    ranks = tuple(world.told(r, samples=(0, 1, 2)) for r in range(2))
    assert fault(world.comparison(ranks=ranks)).axis == axis


def test_ranks_of_one_tensor_parallel_group_must_read_the_same() -> None:
    world = World(MeshShape(tp=2))
    ranks = (world.told(0), world.told(1, samples=(1, 2)))
    assert fault(world.comparison(ranks=ranks)).axis == "tp"


def test_a_value_that_is_not_finite_never_passes() -> None:
    world = World(MeshShape(dp_replicate=2))
    nan = float("nan")
    assert judge(world.comparison({("gradient", NAMES[0]): {"differences": (0.0, nan)}})).fault is not None
    assert judge(world.comparison(ranks=(world.told(0), world.told(1, losses=(nan, nan))))).fault is not None


def test_a_parameter_whose_true_gradient_is_zero_is_noise() -> None:
    world = World(MeshShape(dp_replicate=2))
    spoil = {("parameter", "blocks.0.q.weight"): {"differences": (0.3, 0.3)}}
    assert judge(world.comparison(spoil)).fault is not None
    assert judge(world.comparison(spoil, zero_gradients=("blocks.0.q.weight",))).fault is None


def test_a_resume_tells_what_was_not_restored() -> None:
    assert judge_resume(Resumed(2, ((1.0, 2.0),), ((1.0, 2.0),), ())).fault is None
    states = judge_resume(Resumed(2, ((1.0, 2.0),), ((1.0, 2.5),), ("a",))).fault
    position = judge_resume(Resumed(2, ((1.0, 2.0),), ((1.5, 2.5),), ("a",))).fault
    assert states is not None and "optimizer's states" in states.cause
    assert position is not None and "position" in position.cause


@pytest.mark.parametrize(
    ("mesh", "drawn", "apart", "axis", "said"),
    [
        (MeshShape(dp_replicate=2), ("ab", "cd"), False, "", ""),
        (MeshShape(dp_replicate=2), ("ab", "ab"), False, "dp_replicate", "same masks"),
        (MeshShape(dp_replicate=2), ("aa", "cc"), False, "", "micro-batches draw the same"),
        (MeshShape(tp=2), ("ab", "ab"), False, "", ""),
        (MeshShape(tp=2), ("ab", "cd"), False, "tp", "different masks"),
        (MeshShape(tp=2), ("ab", "cd"), True, "", ""),
        (MeshShape(tp=2), ("ab", "ab"), True, "tp", "same masks"),
    ],
)
def test_dropout_differs_where_samples_do_and_agrees_where_tensors_do(
    mesh: MeshShape, drawn: tuple[str, str], apart: bool, axis: str, said: str
) -> None:
    found = judge_dropout(mesh, [Masks({"blocks.0.dropout": tuple(one)}, 2, apart) for one in drawn]).fault
    assert (found is None) == (said == "")
    assert found is None or (found.axis == axis and said in found.cause)


def test_a_verdict_comes_back_from_json() -> None:
    verdict = Verdict(
        False, 4, "4 ranks", (Check("logic", "losses", 1.0, 1e-10, False),), Fault("losses", "a", "b", "tp", "c", "d"),
        ("k.bias",), "additive", ("note",), "", 1.5,
    )  # fmt: skip
    assert Verdict.from_json(verdict.to_json()) == verdict
    with pytest.raises(msgspec.ValidationError):
        Verdict.from_json(verdict.to_json()[:-1] + b',"more":1}')


def test_a_layer_is_the_block_in_a_name() -> None:
    assert layer("model.layers.12.mlp.up.weight") == "model.layers.12"
    assert layer("head.weight") == "outside the blocks"
