"""ZeRO 1, 2, 3 and hybrid sharding: one process's numbers, and the bytes of plan/zero.py's table."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.plan import zero as table
from tests.distributed import work
from tests.distributed.pool import Pool
from tests.distributed.test_parity import STEPS, trained, worst

HYBRID = {"dp_replicate": 2, "dp_shard": 2}
CASES = [(2, None), (3, None), (4, None), (4, HYBRID)]
IDS = ["2", "3", "4", "2x2"]


@cache
def reference(tied: bool) -> dict[str, Any]:
    return work.reference(steps=STEPS, shape={"tied_embeddings": tied})


# One accumulation for each number of ranks, and both at night; test_matrix has others.
SHARDED = [
    pytest.param(world, mesh, zero, accumulation, id=f"{name}-{zero}-{accumulation}",
                 marks=pytest.mark.nightly if (accumulation == 3) == (world == 3) else ())
    for (world, mesh), name in zip(CASES, IDS, strict=True) for zero in (1, 2, 3) for accumulation in (1, 3)
]  # fmt: skip


@pytest.mark.parametrize(("world", "mesh", "zero", "accumulation"), SHARDED)
def test_sharded_ranks_give_the_hand_written_loop(
    pool: Pool, tmp_path: Path, world: int, mesh: dict[str, int] | None, zero: int, accumulation: int
) -> None:
    """Logic tier, uneven tokens; the head is tied where the ranks are not three."""
    tied = world != 3
    expected = reference(tied)
    results, tensors = trained(
        pool, tmp_path, world, zero=zero, mesh=mesh, accumulation=accumulation, shape={"tied_embeddings": tied}
    )
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-10)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-10)
    assert worst(tensors, expected["tensors"], "grad/") < 1e-10
    assert worst(tensors, expected["tensors"], "param/") < 1e-10


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("fault", ["rank-scale", "mean-of-means"])
def test_a_planted_fault_is_seen(pool: Pool, tmp_path: Path, zero: int, fault: str) -> None:
    _, tensors = trained(pool, tmp_path, 4, zero=zero, mesh=HYBRID, accumulation=1, fault=fault, clip=0.5) \
        if fault != "rank-scale" else trained(pool, tmp_path, 3, zero=zero, accumulation=1, fault=fault)  # fmt: skip
    assert worst(tensors, reference(False)["tensors"], "grad/") > 1e-10


@pytest.mark.parametrize(("world", "zero", "mesh"), [(3, 1, None), (4, 2, None), (4, 1, HYBRID)])
def test_the_same_run_twice_gives_the_same_bits(
    pool: Pool, tmp_path: Path, world: int, zero: int, mesh: dict[str, int] | None
) -> None:
    arguments = {"zero": zero, "mesh": mesh, "accumulation": 2, "precision": "bf16"}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, one = trained(pool, tmp_path / "a", world, **arguments)
    second, two = trained(pool, tmp_path / "b", world, **arguments)
    assert first == second
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kept", [[], ["norm", "blocks.0.ffn_norm", "blocks.1.ffn"]], ids=["bf16", "fp32_modules"])
@pytest.mark.parametrize(("zero", "mesh"), [(1, None), (2, None), (1, HYBRID), (3, HYBRID)])
def test_bf16_means_one_thing_under_every_stage(
    pool: Pool, tmp_path: Path, zero: int, mesh: dict[str, int] | None, kept: list[str]
) -> None:
    """The bound of test_parity: one bf16 rounding of each micro-batch's product, twice."""
    arguments: dict[str, Any] = {"precision": "bf16", "model": {"fp32_modules": kept}}
    (tmp_path / "one").mkdir()
    one, one_tensors = trained(pool, tmp_path / "one", 1, zero=0, **arguments)
    many, tensors = trained(pool, tmp_path, 4, zero=zero, mesh=mesh, accumulation=2, **arguments)
    np.testing.assert_allclose(many[0]["losses"][0], one[0]["losses"][0], rtol=1e-6)
    assert worst(tensors, one_tensors, "grad/") < 2 * 2.0**-9


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_what_the_table_says(pool: Pool, world: int, zero: int) -> None:
    """Live parameters, gradients and one optimizer state, counted in storages that FSDP2 has at each moment."""
    for result in pool.run(world, "tests.distributed.zero_work:held", world=world, zero=zero):
        sizes = table.Sizes(**result["sizes"])
        expected = {moment: list(table.held(zero, moment, sizes)) for moment in table.MOMENTS}
        assert result["found"] == expected


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
def test_a_stage_of_a_pipeline_holds_what_the_table_says(pool: Pool, zero: int, schedule: str, stages: int) -> None:
    """Zero 2 keeps its shard of the gradients after each backward; zero 3 lets blocks go while a micro-batch flies."""
    arguments = {"zero": zero, "schedule": schedule, "stages_per_rank": stages}
    for rank in pool.run(4, "tests.distributed.combinations_work:held_in_a_pipeline", **arguments):
        assert len(rank) == stages
        for stage in rank:
            sizes = table.Sizes(**stage["sizes"])
            assert stage["found"] == {moment: list(table.held(zero, moment, sizes)) for moment in table.MOMENTS}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_tensor_parallel_weights_are_sums_over_the_data_ranks(
    pool: Pool, zero: int, accumulation: int
) -> None:
    for result in pool.run(4, "tests.distributed.zero_work:over_tensor_parallel", zero=zero, accumulation=accumulation):
        assert result["worst"] < 1e-14


@pytest.mark.parametrize("world", [2, 3])
def test_a_gradient_that_no_hook_announced_is_summed_too(pool: Pool, world: int) -> None:
    total = float(sum(range(1, world + 1)))
    for found in pool.run(world, "tests.distributed.zero_work:late_gradients"):
        assert found == [[2 * total] * 3, [total] * 3, [0.0] * 3]
