"""`shardwise plan`: what it tells, what it writes, and that its answers and fixes hold."""

import json
import re
import shlex
import xml.etree.ElementTree as tree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwise.cli import main
from shardwise.plan.check import check
from shardwise.plan.plan import Plan
from shardwise.units import format_bytes, parse_bytes

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ("llama-3-8b", "--cluster", "8xH100-SXM5-80GB")


class Said(msgspec.Struct):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as left:
            main(["plan", *arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Said(int(left.value.code or 0), said.out, said.err)

    return run


def with_fixed(fixes: Iterable[str]) -> list[str]:
    return [part for one in fixes for part in ("--fix", one)]


def test_the_candidates_are_best_first_fit_and_add_up(plan: Any) -> None:
    told = plan(*SMALL, "--json").json
    found = told["candidates"]
    assert len(found) == 5 and told["searched"] > 10_000 and told["search_seconds"] > 0
    assert [one["step_seconds"] for one in found] == sorted(one["step_seconds"] for one in found)
    for one in found:
        for figure, (low, high) in one["intervals"].items():
            assert low <= one[figure] <= high
        assert one["intervals"]["memory_bytes"][1] <= one["memory_limit_bytes"]
        assert sum(one["seconds"].values()) == pytest.approx(one["step_seconds"], rel=1e-9)
        assert sum(one["memory"].values()) == pytest.approx(one["memory_bytes"], rel=1e-9)
        degrees = one["degrees"]
        assert degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"] == 8
        tokens = 1024 * 4096 / 8 / one["step_seconds"]
        assert one["tokens_per_second_per_gpu"] == pytest.approx(tokens, rel=1e-9)
        assert one["runs"] == (one["planned_only"] == [])


def test_the_table_tells_the_plans_why_and_what_if(plan: Any) -> None:
    text = plan(*SMALL).out
    parts = "plans searched|80 %|tokens/s a GPU|MFU|why|time |memory |bound|thumb|what if"
    for part in parts.split("|"):
        assert part in text
    assert text.count("\n>") + text.count("\n* ") >= 1
    assert max(map(len, text.split("why")[0].splitlines())) < 200


def test_the_plan_that_is_written_runs_and_carries_its_estimate(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    told = plan(*SMALL, "--json", "-o", str(path)).json
    made = Plan.from_json(path.read_bytes())
    assert told["plan"] == json.loads(path.read_text())
    assert check(made, 8) == ()
    assert made.estimate is not None and made.arch is not None
    best = next(one for one in told["candidates"] if one["runs"])
    assert made.estimate.step_seconds <= best["step_seconds"] * 1.0101
    assert Plan.from_json(made.to_json()) == made


def test_a_plan_from_before_there_were_estimates_is_still_read(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(*SMALL, "-o", str(path))
    keys = json.loads(path.read_text())
    del keys["estimate"], keys["decision"]["sequence_parallel"]
    old = Plan.from_json(json.dumps(keys).encode())
    assert old.estimate is None and old.decision.sequence_parallel == "auto"


@pytest.mark.parametrize(
    ("fix", "key", "value"),
    [
        ("tp=4", ("degrees", "tp"), 4), ("pp=2", ("degrees", "pp"), 2), ("zero=3", ("zero",), 3),
        ("recompute=full", ("recompute",), "full"), ("micro_batch=1", ("micro_batch",), 1),
        ("compile=off", ("compile",), "off"),
    ],
)  # fmt: skip
def test_what_is_fixed_is_obeyed(plan: Any, fix: str, key: Sequence[str], value: object) -> None:
    told = plan(*SMALL, "--fix", fix, "--json", "--top", "3").json
    assert 1 <= len(told["candidates"]) <= 3
    for one in told["candidates"]:
        found: Any = one
        for part in key:
            found = found[part]
        assert found == value


@pytest.mark.parametrize("top", [1, 2, 9])
def test_so_many_plans_are_told_as_are_asked_for(plan: Any, top: int) -> None:
    assert len(plan(*SMALL, "--json", "--top", str(top)).json["candidates"]) == top


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-3-8", "--cluster", "8xH100"), "llama-3-8b"),
        (("llama-3-8b", "--cluster", "8xH10"), "There is no GPU"),
        (("llama-3-8b", "--cluster", "0xH100"), "0xH100"),
        ((*SMALL, "--fix", "tq=8"), "--fix tp="),
        ((*SMALL, "--fix", "tp"), "--fix tp="),
        ((*SMALL, "--fix", "tp=0"), "no whole number above 0"),
        ((*SMALL, "--fix", "tp=-2"), "no whole number above 0"),
        ((*SMALL, "--fix", "recompute=some"), "none or selective or full"),
        ((*SMALL, "--fix", "tp=3"), "does not divide"),
        ((*SMALL, "--fix", "tp=16"), "does not divide"),
        ((*SMALL, "--fix", "pp=64"), "does not divide"),
        ((*SMALL, "--fix", "ep=2"), "no experts"),
        ((*SMALL, "--fix", "zero=0", "--fix", "dp_shard=8"), "contradict"),
        ((*SMALL, "--top", "0"), "--top"),
        ((*SMALL, "--days", "0", "--tokens", "1T"), "--days"),
        ((*SMALL, "--days", "3"), "--tokens"),
        ((*SMALL, "--tokens", "many"), "no number above 0"),
        ((*SMALL, "--tokens", "0"), "no number above 0"),
        ((*SMALL, "--set", "batch.global_batch=0"), "batch.global_batch"),
        ((*SMALL, "--set", "data.sequence_length=-1"), "data.sequence_length"),
        ((*SMALL, "-o", "/absent/folder/plan.json"), "cannot be written"),
        (("absent.module:build",), "cannot be imported"),
        (("absent.json",), "does not exist"),
    ],
)  # fmt: skip
def test_bad_input_exits_with_two_and_a_fix(plan: Any, arguments: tuple[str, ...], said: str) -> None:
    told = plan(*arguments)
    assert told.code == 2
    assert said in told.err


@pytest.mark.parametrize("fixes", [("tp=3",), ("pp=5",), ("tp=16",), ("ep=2",), ("zero=0", "dp_shard=8")])
def test_the_fix_for_a_contradiction_works(plan: Any, fixes: tuple[str, ...]) -> None:
    error = plan(*SMALL, *with_fixed(fixes)).err
    fix = error.split("fix: ")[1].strip()
    name = re.findall(r"--fix (\w+)=", fix)[0]
    kept = with_fixed(one for one in fixes if not one.startswith(f"{name}="))
    added = with_fixed([] if fix.startswith("leave out") else [fix.removeprefix("--fix ").split(" or ")[0]])
    assert plan(*SMALL, *kept, *added).code == 0


def test_70b_on_eight_a100_without_offload_is_refused_and_every_change_that_is_told_works(plan: Any) -> None:
    """AdamW's states alone are 16 bytes x 70.6e9 = 1,129 GB, and there are 8 x 85.9 GB."""
    asked = ("llama-3-70b", "--cluster", "8xA100-SXM4-80GB", "--fix", "offload=none")
    told = plan(*asked, "--json")
    assert told.code == 2
    found = told.json
    assert found["plan"] is None and found["candidates"] == []
    states = 16 * 70.6e9 / 8
    assert found["shortfall"]["short_bytes"] > states - 80 * 2**30
    assert found["shortfall"]["changes"]
    text = plan(*asked)
    assert text.code == 2 and "nothing fits" in text.out and "what helps" in text.out
    for change in found["shortfall"]["changes"]:
        arguments = [part for one in change["arguments"] for part in shlex.split(one)]
        again = list(asked)
        if change["arguments"][0].startswith("without"):
            again = again[:3]
        elif arguments[0] == "--cluster":
            again[2] = arguments[1]
        else:
            again += arguments
        done = plan(*again, "--json")
        assert done.code == 0, change
        assert min(one["step_seconds"] for one in done.json["candidates"]) == pytest.approx(change["step_seconds"])


def test_how_many_gpus_and_at_what_price(plan: Any) -> None:
    asked = ("llama-3-8b", "--cluster", "8xH100", "--tokens", "1T", "--price", "2", "--json")
    training = plan(*asked).json["answers"]["training"]
    assert training["gpu_hours"] == pytest.approx(1e12 / training["tokens_per_second"] * 8 / 3600)
    assert training["dollars"] == pytest.approx(2 * training["gpu_hours"])
    gpus = []
    for days in ("60", "30", "15"):
        answer = plan(*asked, "--days", days).json["answers"]["machines"]
        assert answer["days"] <= float(days)
        gpus.append(answer["gpus"])
    assert gpus == sorted(gpus)


def test_the_page_is_whole_by_itself_and_has_its_pictures(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert plan("llama-3-70b", "--cluster", "8xp5.48xlarge", "--fix", "pp=4", "--html", str(path)).code == 0
    page = path.read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page and "src=" not in page and "@import" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        drawn = tree.fromstring(picture)
        right, bottom = float(drawn.attrib["width"]), float(drawn.attrib["height"])
        for box in drawn.iter(f"{SVG}rect"):
            assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= right
        for word in drawn.iter(f"{SVG}text"):
            assert 0 <= float(word.attrib["y"]) <= bottom


@pytest.mark.parametrize(
    ("fixes", "bars"),
    [
        (("pp=4", "schedule=1f1b"), [f"stage {at}" for at in range(4)]),
        (("pp=2", "schedule=interleaved-1f1b", "stages_per_rank=2"), ["rank 0", "rank 1"]),
        (("pp=1",), ["every rank"]),
    ],
)
def test_the_page_stacks_memory_by_stage_and_its_step_is_as_long_as_predicted(
    plan: Any, tmp_path: Path, fixes: tuple[str, ...], bars: list[str]
) -> None:
    path, options = tmp_path / "plan.html", [word for fix in fixes for word in ("--fix", fix)]
    asked = ("llama-3-8b", "--cluster", "2x8xH100", "--set", "batch.global_batch=64")
    told = plan(*asked, *options, "--html", str(path), "--json").json
    estimate = told["plan"]["estimate"]
    memory, steps = (tree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", path.read_text(), re.DOTALL)[:2])
    said = [str(word.text) for word in memory.iter(f"{SVG}text")]
    assert [word for word in said if word.split()[0] in ("stage", "rank", "every")] == bars
    # The fullest of the bars is the plan's own prediction, and the dashed line is the device's memory.
    sums = [parse_bytes(word) for word in said if re.fullmatch(r"[\d.]+ [GM]iB", word)]
    assert max(sums) == pytest.approx(estimate["memory_bytes"], abs=0.05 * 2**30)
    assert f"limit {format_bytes(estimate['memory_limit_bytes'])}" in said
    # The axis under the passes, and what comes after them, are the predicted step: stages drawn alike differ from it
    # by what the first and the last one have beside their blocks.
    (line,) = [one for one in steps.iter(f"{SVG}line") if one.attrib["y1"] == one.attrib["y2"]]
    ticks = [one for one in steps.iter(f"{SVG}text") if re.fullmatch(r"[\d.]+ s", str(one.text))]
    left, last = float(line.attrib["x1"]), ticks[-1]
    second = (float(last.attrib["x"]) - left) / float(str(last.text).split()[0])
    drawn = (float(line.attrib["x2"]) - left) / second
    assert drawn == pytest.approx(estimate["step_seconds"], rel=0.1)


def test_a_callable_is_built_without_memory_and_its_shape_is_known(plan: Any) -> None:
    asked = ("tests.unit.test_plan_command:build_decoder", "--cluster", "8xH100", "--set", "data.sequence_length=512")
    assert len(plan(*asked, "--json").json["candidates"]) == 5
    told = plan("tests.unit.test_plan_command:build_linear", "--cluster", "8xH100", "--json").json
    assert told["plan"]["decision"]["mesh"]["dp_replicate"] == 8


def build_decoder() -> Any:
    from shardwise.inputs.arch import preset
    from shardwise.models.decoder import Decoder

    return Decoder(preset("decoder-8m"))


def build_linear() -> Any:
    from torch import nn

    return nn.Linear(64, 64)


def test_known_machines_are_listed(plan: Any) -> None:
    text = plan("--gpus").out
    assert "H100-SXM5-80GB" in text and "p5.48xlarge" in text
