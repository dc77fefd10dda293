"""`shardwise plan --gpus`: the whole catalogue, as text and as JSON."""

import json

from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.inputs.hardware import catalogue, find_gpu
from shardwise.report.catalogue import text


def test_every_name_and_alias_stands_in_the_table_and_columns_are_aligned() -> None:
    lines = text().splitlines()
    for row in (*catalogue().gpu, *catalogue().node):
        (line,) = [line for line in lines if line.split("  ")[0] == row.name]
        assert all(alias in line for alias in row.aliases)
    heads = lines[0]
    for line in lines[1 : len(catalogue().gpu) + 1]:
        assert line[heads.index("aliases") - 2 : heads.index("aliases")].strip() == ""


def test_the_command_prints_it_and_its_json_has_every_source() -> None:
    assert CliRunner().invoke(app, ["plan", "--gpus"]).stdout.strip() == text()
    told = json.loads(CliRunner().invoke(app, ["plan", "--gpus", "--json"]).stdout)
    assert [row["name"] for row in told["gpu"]] == [row.name for row in catalogue().gpu]
    assert all(row["source"] for kind in ("gpu", "node") for row in told[kind])
    assert find_gpu("H100").source == next(row for row in told["gpu"] if "H100" in row["aliases"])["source"]


def test_a_plan_of_nothing_is_a_usage_error_that_names_the_ways() -> None:
    done = CliRunner().invoke(app, ["plan"])
    assert done.exit_code == 2
    assert "--gpus" in done.output
