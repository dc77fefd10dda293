"""The table of plan/combinations.py, cell by cell: each that runs gives one process's numbers.

A cell gets the smallest mesh that has it. Few of them run each time: together with the splits of test_matrix every part
meets every other one; all of them in `make nightly`, those with compiled blocks too.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.plan import combinations
from shardwise.plan.check import check
from shardwise.plan.combinations import COMPILE, DATA, RECOMPUTE, SCHEDULES, TENSOR, Cell
from shardwise.plan.mesh import MeshShape
from shardwise.plan.rough_memory import parameters_of_a_rank
from tests.distributed import work
from tests.distributed.pool import Pool
from tests.distributed.test_matrix import MATRIX, SHAPE, TIED, reference, trained
from tests.distributed.test_parity import EPS32, worst

CI_RANKS = 4


def arguments(cell: Cell) -> dict[str, Any]:
    """The smallest mesh and the numbers that make a decision of this cell."""
    mesh = {"pp": 2} if cell.schedule != "none" else {}
    if cell.data.startswith("hybrid"):
        mesh |= {"dp_replicate": 2, "dp_shard": 2}
    elif cell.data != "one":
        mesh |= {"dp_replicate" if cell.data == "zero0" else "dp_shard": 2}
    if cell.tensor == "yes":
        mesh |= {"tp": 2}
    two = cell.schedule not in ("none", "gpipe", "1f1b")
    return {
        "mesh": mesh, "zero": 0 if cell.data == "one" else int(cell.data[-1]), "schedule": cell.schedule,
        "stages_per_rank": 2 if two else 1, "recompute": cell.recompute, "compile": cell.compile,
        "accumulation": 4 if mesh.get("pp", 1) > 1 else 2,
    }  # fmt: skip


def world(cell: Cell) -> int:
    return int(np.prod(list(arguments(cell)["mesh"].values()) or [1]))


def starts(cell: Cell) -> bool:
    """Whether `check` lets the cell's plan through."""
    made = work.plan(world(cell), global_batch=12, **arguments(cell))
    assert combinations.cell_of(made.decision) == cell
    return not check(made, world(cell))


RUNS = [
    cell
    for cell in itertools.starmap(Cell, itertools.product(SCHEDULES, DATA, RECOMPUTE, COMPILE, TENSOR))
    if isinstance(combinations.verdict(cell), str)
]
EAGER, COMPILED = ([cell for cell in RUNS if cell.compile == kind] for kind in COMPILE)


@pytest.mark.parametrize("cell", RUNS, ids="-".join)
def test_a_cell_that_runs_is_refused_by_no_other_rule(cell: Cell) -> None:
    assert starts(cell)


def pairs(cell: Cell) -> set[tuple[int, str, int, str]]:
    """The parts of a cell, two by two."""
    return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}


def covering(cells: list[Cell], elsewhere: set[Cell]) -> set[Cell]:
    """A few cells with every pair of parts that any has and none of `elsewhere`, taken greedily; small worlds first."""
    missing = set().union(*map(pairs, cells)) - set().union(*map(pairs, elsewhere))
    wanted, chosen = set(missing), set[Cell]()
    while missing:
        best = max(sorted(cells, key=world), key=lambda cell: len(pairs(cell) & missing) / world(cell))
        chosen.add(best)
        missing -= pairs(best)
    for cell in sorted(chosen, key=world):  # those that later ones made superfluous
        if pairs(cell) & wanted <= set().union(*map(pairs, chosen - {cell})):
            chosen.remove(cell)
    return chosen


def cell_of_a_split(split: dict[str, Any]) -> Cell:
    """The cell that a case of test_matrix runs in fp64 in CI too."""
    asked = {key: value for key, value in split.items() if key != "shape"}
    made = work.plan(int(np.prod(list(split["mesh"].values()))), global_batch=12, **asked)
    return combinations.cell_of(made.decision)


SPLITS = {cell_of_a_split(case.values[0]) for case in MATRIX if not case.marks}
CI = covering([cell for cell in EAGER if world(cell) <= CI_RANKS], SPLITS)
# On eight ranks two: what no four can have.
CI |= {Cell("1f1b", "hybrid3", "none", "off", "no"), Cell("interleaved-1f1b", "zero3", "full", "off", "yes")}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id="-".join(cell), marks=[] if cell in CI else pytest.mark.nightly) for cell in EAGER],
)
def test_a_cell_that_runs_gives_the_hand_written_loop(pool: Pool, tmp_path: Path, cell: Cell) -> None:
    """fp64 logic tier: 1e-10 leaves rounding a factor of 1e5."""
    expected = reference(TIED, "fp64", "adamw")
    results, tensors = run(pool, tmp_path, cell, precision="fp64", optimizer="adamw")
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-10)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-10)
    assert worst(tensors, expected["tensors"], "grad/") < 1e-10
    assert worst(tensors, expected["tensors"], "param/") < 1e-10


@pytest.mark.nightly
@pytest.mark.parametrize("cell", COMPILED, ids="-".join)
@pytest.mark.usefixtures("compiling")
def test_a_compiled_cell_stays_within_the_rounding_bound(pool: Pool, tmp_path: Path, cell: Cell) -> None:
    """fp32 rounding tier, as in test_matrix: the compiler fuses, so sums come in another order."""
    expected = reference(TIED, "fp32", "sgd")
    results, tensors = run(pool, tmp_path, cell, precision="fp32", optimizer="sgd")
    terms = np.sqrt(48 * 12 * 12)
    for result in results:
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-6)
        np.testing.assert_allclose(result["norms"], expected["norms"], rtol=1e-5)
    assert worst(tensors, expected["tensors"], "grad/") < 4 * 1.03**6 * terms * EPS32
    assert worst(tensors, expected["tensors"], "param/") < 1e-5


def run(pool: Pool, folder: Path, cell: Cell, **more: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
    asked = arguments(cell)
    mesh = asked.pop("mesh") or {"dp_replicate": 1}
    return trained(pool, folder / "out", {"mesh": mesh, "shape": TIED, **asked}, **more)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("mesh", "schedule", "stages"),
    [
        ({"pp": 2}, "1f1b", 1),
        ({"pp": 2}, "zbv", 2),
        ({"pp": 3}, "gpipe", 1),
        ({"tp": 2}, "none", 1),
        ({"pp": 2, "tp": 2}, "interleaved-1f1b", 2),
    ],
)
def test_the_planner_counts_what_the_fullest_rank_holds(
    pool: Pool, mesh: dict[str, int], schedule: str, stages: int, tied: bool
) -> None:
    """Five blocks, 61 tokens and 51 of the feed-forward part: nothing divides."""
    shape = {**SHAPE, "ffn_size": 51, "tied_embeddings": tied}
    held = pool.run(
        int(np.prod(list(mesh.values()))), "tests.distributed.combinations_work:parameters_held", mesh=mesh,
        world=int(np.prod(list(mesh.values()))), shape=shape, schedule=schedule, stages_per_rank=stages,
    )  # fmt: skip
    assert max(held) == parameters_of_a_rank(work.arch(**shape), MeshShape(**mesh), schedule, stages)
