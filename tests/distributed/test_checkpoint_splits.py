"""Checkpoints of every split: regions as torch cuts them, each written once, and any split read by any other."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint_work import SHAPES
from tests.distributed.pool import Pool

WORK = "tests.distributed.checkpoint_work"
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "sharded": (3, {"dp_shard": 3}),
    "hybrid": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp": (3, {"tp": 3}),
    "tp inside shards": (4, {"dp_shard": 2, "tp": 2}),
    "tp inside hybrid": (4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    "one tp inside shards": (3, {"dp_shard": 3, "tp": 1}),
}
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "zero 3": (3, {"zero": 3}),
    "hybrid": (4, {"zero": 3, "dp_replicate": 2, "dp_shard": 2}),
    "pp and zero 1": (4, {"pp": 2, "zero": 1}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}),
    "pp of 3": (3, {"pp": 3}),
    "tp and zero 3": (4, {"tp": 2, "zero": 3}),
    "tp and replicas": (4, {"tp": 2}),
    "pp and tp": (4, {"pp": 2, "tp": 2}),
    # At night: four more processes.
    "zero 3 of 8": (8, {"zero": 3}),
    "three axes of 8": (8, {"pp": 2, "tp": 2, "zero": 1}),
}
FOUR = [name for name, (world, _) in SPLITS.items() if world <= 4]
# Each split is saved and each is loaded, in a ring and from and to one process; those of eight ranks, at night, too.
WAYS = [
    *zip(FOUR, [*FOUR[1:], "one process"], strict=True),
    *((name, "one process") for name in FOUR[1:-1]),
    ("one process", "pp and tp"),
    ("pp and zero 1", "tp and zero 3"),
    *(
        pytest.param(*way, marks=pytest.mark.nightly)
        for way in [
            ("zero 3", "zero 3 of 8"), ("zero 3 of 8", "zbv"), ("one process", "three axes of 8"),
            ("three axes of 8", "zero 3 of 8"), ("zero 3 of 8", "hybrid"), ("three axes of 8", "one process"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_the_region_that_torch_cut(pool: Pool, mesh: str) -> None:
    world, axes = MESHES[mesh]
    kinds = ["rows", "columns", "whole"] if "tp" in axes else ["whole"]
    held = pool.run(world, f"{WORK}:regions", mesh=axes, kinds=kinds)
    for kind in kinds:
        split = axes.get("dp_shard", 1) * (axes.get("tp", 1) if kind != "whole" else 1)
        for index, shape in enumerate(SHAPES):
            # Every logical element as often as there are replicas.
            elements = sorted([*range(math.prod(shape))] * (world // split))
            assert sorted(i for rank in held for i in rank[kind][index]) == elements


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each split saved, made when it is first asked for: its folder, and the bits of every logical tensor."""
    made: dict[str, tuple[str, dict[str, str], str]] = {}

    def get(name: str) -> tuple[str, dict[str, str], str]:
        if name not in made:
            world, plan = SPLITS[name]
            folder = str(tmp_path_factory.mktemp("saved"))
            told = pool.run(world, f"{WORK}:save", folder=folder, plan=plan)
            assert {rank["bytes"] for rank in told} == {told[0]["on disk"]}
            made[name] = folder, union(told), told[0]["root"]
        return made[name]

    return get


def union(told: list[dict[str, Any]]) -> dict[str, str]:
    """All ranks' tensors by name; those that hold one alike must agree on it."""
    found: dict[str, str] = {}
    for rank in told:
        for name, bits in rank["bits"].items():
            assert found.setdefault(name, bits) == bits, f"ranks hold different bits of {name}"
    return found


@pytest.mark.parametrize(("saver", "loader"), WAYS, ids=lambda name: name)
def test_what_one_split_saved_another_loads_to_the_bit(pool: Pool, saved: Any, saver: str, loader: str) -> None:
    folder, expected, root = saved(saver)
    world, plan = SPLITS[loader]
    told = pool.run(world, f"{WORK}:load", folder=folder, plan=plan)
    assert union(told) == expected
    assert len(root) == 32 and {rank["root"] for rank in told} == {root}
    assert len({tuple(rank["losses"]) for rank in told}) == 1


@pytest.mark.parametrize(
    ("loader", "name", "rank"),
    [
        ("one process", "model/blocks.1.ffn.up_proj.weight", 0),
        ("zero 3", "optimizer/state/embed_tokens.weight/exp_avg", 2),
        ("hybrid", "model/embed_tokens.weight", 3),
        ("pp and tp", "model/norm.weight", 3),
    ],
)
def test_a_bit_that_changes_after_it_was_verified_is_found_with_its_rank(
    pool: Pool, saved: Any, loader: str, name: str, rank: int
) -> None:
    world, plan = SPLITS[loader]
    said = pool.run(world, f"{WORK}:changed_on_the_way", folder=saved("zero 3")[0], plan=plan, name=name, rank=rank)
    assert len(set(said)) == 1
    assert said[0].startswith(f"What was loaded is not what was saved: {name}.")
    assert f"(rank {rank}: {name})" in said[0]


@pytest.mark.parametrize("fault", ["copy", "groups"])
def test_a_tied_weight_whose_copies_differ_is_not_saved(pool: Pool, tmp_path: Path, fault: str) -> None:
    (first, second) = pool.run(2, f"{WORK}:refused", folder=str(tmp_path), plan={"pp": 2}, fault=fault)
    assert first == second
    assert "copies of the tied weight" in first and "embed_tokens.weight" in first and "rank 1" in first
