"""`shardwise dev score`: the JSON, the table, bad tables. Fresh processes where imports matter."""

import json
from pathlib import Path

import pytest

from tests.unit.test_cli import imported, shardwise

MEASURED = Path(__file__).with_name("measured_runs.csv")


def test_the_json_has_what_a_script_reads() -> None:
    done = shardwise("dev", "score", str(MEASURED), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["sources"]) >= {"llm-foundry", "vtrain", "SimuMax", "bridge", "InternEvo"}
    for source in found["sources"].values():
        for name in ("time", "memory"):
            assert set(source[name]) >= {"rows", "median", "p90"}
    overall = found["overall"]
    medians = [each["time"]["median"] for each in found["sources"].values() if each["time"]["rows"]]
    assert overall["time"]["median"] == pytest.approx(sum(medians) / len(medians), rel=1e-9)
    assert 0 <= overall["interval_coverage"] <= 1
    assert 0 <= overall["oom_called_fitting"] <= overall["oom_rows"] == 1
    assert all(each["reason"] and each["line"] > 1 for each in found["skipped"])
    scored = sum(each["time"]["rows"] for each in found["sources"].values())
    assert scored + len(found["skipped"]) <= found["rows"] == 17


def test_the_table_names_sources_and_the_mean() -> None:
    done = shardwise("dev", "score", str(MEASURED))
    assert done.returncode == 0, done.stderr
    assert "mean of sources" in done.stdout and "llm-foundry" in done.stdout


def test_a_users_own_table_with_few_columns_is_scored(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(
        "model,gpu,n_gpus,seq_len,tp,zero_stage_or_fsdp,micro_batch,global_batch,step_time_s,memory_gb\n"
        "llama-3-8b,H100-SXM5-80GB,8,8192,1,fsdp2(zero3),1,16,4.2,58\n"
        "llama-3-8b,H100-SXM5-80GB,8,8192,8,0,2,16,5.4,61\n"
    )
    done = shardwise("dev", "score", str(table), "--json")
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"].values()
    assert source["time"]["rows"] == 2
    assert source["memory"]["rows"] == 2


@pytest.mark.parametrize("text", ["", "model,gpu\na,b\n", "model,gpu,n_gpus,seq_len,step_time_s\na,A100,x,1,1\n"])
def test_a_bad_table_is_bad_input_with_a_fix_and_no_traceback(tmp_path: Path, text: str) -> None:
    table = tmp_path / "bad.csv"
    table.write_text(text)
    done = shardwise("dev", "score", str(table))
    assert done.returncode == 2
    assert "fix:" in done.stderr and "Traceback" not in done.stderr


def test_scoring_never_imports_torch() -> None:
    assert "torch" not in imported("import shardwise.cli.dev, shardwise.report.score")
