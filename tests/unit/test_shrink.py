"""A shrunk plan keeps its structure, passes every rule, and shrinks no further."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import Recipe
from shardwise.plan.check import check
from shardwise.plan.mesh import AXES, MeshShape
from shardwise.plan.plan import Decision, Plan
from shardwise.verify.shrink import MOST_RANKS, samples, shrink


def recipe(**model: object) -> Recipe:
    keys = {"model": model or {"given": "mine"}, "data": {"text": ["*.txt"], "sequence_length": 4096},
            "batch": {"global_batch": 512}, "train": {"steps": 1000}}  # fmt: skip
    return recipes.from_keys(keys)


def plan(arch: Arch | None, mesh: MeshShape, zero: int, schedule: str = "none", **more: object) -> Plan:
    decision = Decision(mesh=mesh, zero=zero, global_batch=512, micro_batch=1, accumulation=8, precision="bf16",
                        schedule=schedule, compile="blocks", **more)  # fmt: skip
    spec = recipe() if arch is not None else recipe(factory="mine:build", fp32_modules=["blocks.0.norm", "blocks.9.x"])
    return Plan(spec, parse_cluster("64x8xH100-SXM5-80GB"), decision, ("a test",), arch=arch)


@st.composite
def archs(draw: st.DrawFn, tp: int, pp: int) -> Arch:
    keys = tp * draw(st.integers(1, 8))
    heads = keys * draw(st.integers(1, 12))
    head_dim = draw(st.sampled_from([2, 64, 128]))
    return Arch(
        name="any", vocab_size=draw(st.integers(257, 130_000)),
        hidden_size=heads * head_dim + draw(st.sampled_from([0, 64])), num_layers=draw(st.integers(pp, 96)),
        num_heads=heads, num_kv_heads=keys, head_dim=head_dim, ffn_size=draw(st.integers(64, 30_000)),
        max_sequence_length=8192, tied_embeddings=draw(st.booleans()), gated_ffn=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    degree = st.sampled_from([1, 1, 2, 3, 4, 8])
    mesh = MeshShape(**{axis: draw(degree) for axis in ("pp", "dp_replicate", "dp_shard", "tp")})
    zero = draw(st.sampled_from([1, 2, 3])) if mesh.dp_shard > 1 else 0
    schedule = draw(st.sampled_from(["gpipe", "1f1b"])) if mesh.pp > 1 else "none"
    return plan(draw(archs(mesh.tp, mesh.pp)), mesh, zero, schedule)


@given(plans())
@settings(max_examples=200, deadline=None)
def test_shrinking_twice_is_shrinking_once(given: Plan) -> None:
    small = shrink(given)
    assert shrink(small) == small


@given(plans())
@settings(max_examples=200, deadline=None)
def test_the_structure_is_kept(given: Plan) -> None:
    small = shrink(given)
    old, new = given.decision, small.decision
    for axis in AXES:
        assert (getattr(old.mesh, axis) > 1) == (getattr(new.mesh, axis) > 1)
        assert getattr(new.mesh, axis) <= min(3, getattr(old.mesh, axis))
    for kept in ("zero", "schedule", "recompute", "offload", "compression"):
        assert getattr(new, kept) == getattr(old, kept)
    assert new.accumulation >= max(2, new.mesh.pp)
    assert given.arch is not None and small.arch is not None
    for kept in ("tied_embeddings", "gated_ffn", "norm_eps", "rope_theta"):
        assert getattr(small.arch, kept) == getattr(given.arch, kept)


@given(plans())
@settings(max_examples=200, deadline=None)
def test_what_divides_evenly_still_does_and_what_does_not_does_not(given: Plan) -> None:
    small = shrink(given)
    assert given.arch is not None and small.arch is not None
    old, new = given.decision.mesh, small.decision.mesh
    for name, by_old, by_new in (
        ("num_heads", old.tp, new.tp), ("num_kv_heads", old.tp, new.tp), ("ffn_size", old.tp, new.tp),
        ("vocab_size", old.tp * old.dp_shard, new.tp * new.dp_shard),
    ):  # fmt: skip
        even = getattr(given.arch, name) % by_old == 0
        assert (getattr(small.arch, name) % by_new == 0) == even, name
    grouped = given.arch.num_heads > given.arch.num_kv_heads
    assert (small.arch.num_heads > small.arch.num_kv_heads) == grouped
    assert small.arch.num_layers >= new.pp


@given(plans())
@settings(max_examples=200, deadline=None)
def test_a_shrunk_plan_breaks_no_rule_about_sizes(given: Plan) -> None:
    """What the engine does not run yet it refuses before and after alike; nothing else may be wrong."""
    small = shrink(given)
    refused = {one.rule for one in check(given, given.decision.mesh.world)}
    assert {one.rule for one in check(small, small.decision.mesh.world)} <= refused


@pytest.mark.parametrize(("precision", "compiled"), [("fp64", False), ("fp32", True)])
def test_precision_is_the_tiers_and_blocks_are_compiled_only_if_asked(precision: str, compiled: bool) -> None:
    small = shrink(plan(None, MeshShape(dp_replicate=8), 0), precision=precision, compiled=compiled)
    assert small.decision.precision == precision
    assert small.decision.compile == ("blocks" if compiled else "off")


@pytest.mark.parametrize(
    ("degrees", "shrunk"),
    [
        ({"dp_replicate": 512}, {"dp_replicate": 3}),
        ({"dp_replicate": 2}, {"dp_replicate": 2}),
        ({"dp_shard": 64, "tp": 8}, {"dp_shard": 3, "tp": 2}),
        ({"dp_shard": 2, "tp": 8}, {"dp_shard": 2, "tp": 3}),
        ({"pp": 4, "dp_shard": 16, "tp": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}),
    ],
)
def test_an_axis_becomes_two_or_three_where_it_shows_the_order_of_sums(
    degrees: dict[str, int], shrunk: dict[str, int]
) -> None:
    zero = 1 if degrees.get("dp_shard", 1) > 1 else 0
    mesh = shrink(plan(None, MeshShape(**degrees), zero, "1f1b" if "pp" in degrees else "none")).decision.mesh
    assert mesh == MeshShape(**shrunk)
    assert mesh.world <= MOST_RANKS


def test_a_users_module_keeps_its_factory_and_the_names_that_are_left() -> None:
    small = shrink(plan(None, MeshShape(dp_shard=4), 3))
    assert small.recipe.model.factory == "mine:build"
    assert small.recipe.model.fp32_modules == ("blocks.0.norm",)


def test_the_data_has_a_short_batch_and_a_second_epoch() -> None:
    small = shrink(plan(None, MeshShape(dp_shard=4), 3))
    batch = small.decision.global_batch
    assert 2 * batch < samples(small) < 3 * batch
    assert msgspec.json.decode(small.to_json(), type=Plan) == small
