"""docs/coverage.toml as values, and the table that README shows."""

import tomllib
from typing import Annotated, Literal

import msgspec

from tests.docs.blocks import ROOT

Text = Annotated[str, msgspec.Meta(min_length=1)]
BEGIN, END = "<!-- coverage: made from docs/coverage.toml -->", "<!-- coverage: end -->"


class Works(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="status", tag="works"):
    claim: Text
    command: Text
    module: Text
    test: Text
    proved: Literal["CPU ranks", "one CPU process"]


class Planned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="status", tag="planned"):
    claim: Text


class Coverage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    row: tuple[Works | Planned, ...]


def rows() -> tuple[Works | Planned, ...]:
    return msgspec.convert(tomllib.loads((ROOT / "docs" / "coverage.toml").read_text()), Coverage).row


def table() -> str:
    """What stands in README between BEGIN and END."""
    works = [row for row in rows() if isinstance(row, Works)]
    planned = [row for row in rows() if isinstance(row, Planned)]
    lines = ["| it runs | proved on | by |", "|---|---|---|"]
    for row in works:
        path, _, name = row.test.partition("::")
        lines.append(f"| {row.claim} | {row.proved} | [{name.removeprefix('test_').replace('_', ' ')}]({path}) |")
    lines += ["", "| it does not run yet |", "|---|", *(f"| {row.claim} |" for row in planned)]
    return "\n".join(lines)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
