"""What is claimed is there: each row's module and test exist, and README says the same."""

import ast

import pytest

from tests.docs.blocks import ROOT
from tests.docs.coverage import BEGIN, END, Works, rows, table

VERBS = ("plan", "verify", "train", "run", "checkpoints", "doctor", "dev")


@pytest.mark.parametrize("row", [row for row in rows() if isinstance(row, Works)], ids=lambda row: row.claim[:40])
def test_what_works_has_its_module_and_its_test(row: Works) -> None:
    assert (ROOT / row.module).is_file()
    path, _, name = row.test.partition("::")
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert name in functions
    assert row.command.split()[:2] in [["shardwise", verb] for verb in VERBS]


def test_no_claim_stands_twice() -> None:
    claims = [row.claim for row in rows()]
    assert len(claims) == len(set(claims))


def test_the_readmes_table_is_the_one_made_from_the_file() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
    shown, end, _ = rest.partition(END)
    assert end
    assert shown.strip() == table(), "python -m tests.docs.coverage writes it anew"
