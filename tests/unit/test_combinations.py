"""The table of what composes: complete, and every refusal leads to what runs."""

import ast
import itertools
from pathlib import Path

import pytest

from shardwise.plan import combinations, schedules
from shardwise.plan.combinations import COMPILE, DATA, RECOMPUTE, SCHEDULES, TABLE, TENSOR, Cell, Refusal

ROOT = Path(__file__).parents[2]
ALL = [Cell(*parts) for parts in itertools.product(SCHEDULES, DATA, RECOMPUTE, COMPILE, TENSOR)]


def test_every_cell_is_decided_and_every_refusal_leads_to_one_that_runs() -> None:
    for cell in ALL:
        decided = cell
        for reason in combinations.refusals(cell):
            assert reason.why and combinations.overrides(reason)
            decided = decided._replace(**{reason.part: reason.instead})
        assert isinstance(combinations.verdict(decided), str)
        assert (decided.tensor, decided.schedule == "none") == (cell.tensor, cell.schedule == "none")


def test_every_row_decides_some_cell_and_says_only_words_that_exist() -> None:
    known = (SCHEDULES, DATA, RECOMPUTE, COMPILE, TENSOR)
    for row in TABLE:
        for words, values in zip(row[:5], known, strict=True):
            assert words == "any" or set(words.split()) <= set(values)
    deciding = {next(index for index, row in enumerate(TABLE) if row.holds(cell)) for cell in ALL}
    assert deciding == set(range(len(TABLE)))


@pytest.mark.parametrize("test", sorted({row.verdict for row in TABLE if isinstance(row.verdict, str)}))
def test_what_runs_names_a_test_that_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_zero_bubble_takes_whole_copies_alone_and_any_other_schedule_any_sharding() -> None:
    for cell in ALL:
        refused = isinstance(combinations.verdict(cell), Refusal)
        if cell.schedule in schedules.SPLIT_BACKWARD:
            assert refused == (cell[1:4] not in (("one", "none", "off"), ("zero0", "none", "off")))
        elif cell.compile == "off":
            assert not refused
