"""The table of combinations in the guide is the one that `check` obeys."""

from shardwise.plan.combinations import TABLE, Refusal
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "guides" / "splits.md"
BEGIN, END = "<!-- combinations: made from shardwise/plan/combinations.py -->", "<!-- combinations: end -->"


def table() -> str:
    lines = ["| schedule | data parallel | recompute | compile | tp > 1 | |", "|---|---|---|---|---|---|"]
    for row in TABLE:
        said = f"refused: {row.verdict.why}" if isinstance(row.verdict, Refusal) else "runs"
        lines.append(f"| {' | '.join(row[:5])} | {said} |")
    return "\n".join(lines)


def test_the_guides_table_is_the_one_made_from_the_code() -> None:
    _, _, rest = PAGE.read_text().partition(BEGIN)
    shown, end, _ = rest.partition(END)
    assert end
    assert shown.strip() == table(), "python -m tests.docs.test_splits writes it anew"


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
