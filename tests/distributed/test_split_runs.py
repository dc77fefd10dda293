"""Whole runs of every split: the same values on every rank, resumed to the bit, evaluated, in own loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.pool import Pool

RUNS = "tests.distributed.split_runs"
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "hybrid": (4, {"zero": 3, "dp_replicate": 2, "dp_shard": 2}),
    "pp and zero 1": (4, {"pp": 2, "zero": 1}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}),
    "tp and zero 3": (4, {"tp": 2, "zero": 3}),
    "recompute": (3, {"zero": 3, "recompute": "full"}),
}
# Each of these axes stands above beside another one; DualPipeV and interleaved stages are ZB-V by other tables.
AT_NIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1": (3, {"zero": 1}),
    "pp interleaved": (2, {"pp": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}),
    "pp and tp": (4, {"pp": 2, "tp": 2}),
    "zero 2": (2, {"zero": 2}),
    "pp": (2, {"pp": 2}),
    "tp": (2, {"tp": 2}),
    "dualpipev": (2, {"pp": 2, "schedule": "dualpipev", "stages_per_rank": 2}),
}
_ALONE: dict[str, Any] = {}


def of_one_process(pool: Pool, function: str, **arguments: Any) -> Any:
    """What it gives without any split, run once for all that are compared with it."""
    if function not in _ALONE:
        _ALONE[function] = pool.run(1, f"{RUNS}:{function}", plan={}, **arguments)[0]
    return _ALONE[function]


SPLIT = pytest.mark.parametrize("split", [*SPLITS, *(pytest.param(one, marks=pytest.mark.nightly) for one in AT_NIGHT)])


@SPLIT
def test_a_resumed_run_gives_the_bits_of_one_that_was_never_stopped(pool: Pool, tmp_path: Path, split: str) -> None:
    """With dropout, after the first step and before the last, which is in another epoch."""
    world, plan = (SPLITS | AT_NIGHT)[split]
    unbroken = pool.run(world, f"{RUNS}:run", folder=str(tmp_path / "a"), plan=plan, breaks=[])
    broken = pool.run(world, f"{RUNS}:run", folder=str(tmp_path / "b"), plan=plan, breaks=[1, 4])
    assert broken == unbroken
    for rank in unbroken:
        assert rank["losses"] == unbroken[0]["losses"] and rank["norms"] == unbroken[0]["norms"]
        assert rank["evaluated"] == unbroken[0]["evaluated"]


@SPLIT
def test_named_losses_and_metrics_are_one_process_on_every_rank(pool: Pool, tmp_path: Path, split: str) -> None:
    one = of_one_process(pool, "named_losses", folder=str(tmp_path / "one"))
    world, plan = (SPLITS | AT_NIGHT)[split]
    for told in pool.run(world, f"{RUNS}:named_losses", folder=str(tmp_path / "many"), plan=plan):
        for found, expected in zip(told["losses"] + told["metrics"], one["losses"] + one["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-10)
        np.testing.assert_allclose(told["norms"], one["norms"], rtol=1e-10)


@SPLIT
def test_an_own_loop_is_one_process(pool: Pool, split: str) -> None:
    one = of_one_process(pool, "own_loop")
    world, plan = (SPLITS | AT_NIGHT)[split]
    for told in pool.run(world, f"{RUNS}:own_loop", plan=plan):
        np.testing.assert_allclose(told, one, rtol=1e-10)


def test_a_second_module_under_a_pipeline_is_refused(pool: Pool) -> None:
    for said in pool.run(2, f"{RUNS}:second_module", plan={"pp": 2}):
        assert "A second module" in said and "train.plan.pp = 1" in said
    assert pool.run(2, f"{RUNS}:second_module", plan={"zero": 3}) == ["accepted"] * 2


@pytest.mark.parametrize(("world", "plan"), [(2, {"tp": 2}), (4, {"tp": 4}), (4, {"tp": 2, "zero": 3})])
def test_generate_writes_the_same_under_every_split(pool: Pool, world: int, plan: dict[str, Any]) -> None:
    (expected,) = pool.run(1, f"{RUNS}:generated", plan={})
    assert pool.run(world, f"{RUNS}:generated", plan=plan) == [expected] * world
