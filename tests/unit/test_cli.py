"""The command: its verbs, exit codes, and what it does not import. Fresh processes throughout."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import main

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")
VERBS = ("train", "run", "plan", "verify", "doctor")


def shardwise(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-c", "from shardwise.cli import main; main()", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SHARDWISE_CACHE": str(cwd / "cache")}
    return subprocess.run(program, capture_output=True, text=True, cwd=cwd, env=env, timeout=120, check=False)


def imported(statement: str) -> set[str]:
    """The modules that a fresh process has after a statement."""
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_help_imports_neither_torch_nor_numpy() -> None:
    statement = "sys.argv = ['shardwise', '--help']\nfrom shardwise.cli import main\n" + (
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    assert not {"torch", "numpy", "rich"} & imported(statement)


def test_planning_launching_and_reporting_never_import_torch() -> None:
    verbs = "from shardwise.cli import doctor, main, plan, run, train, verify"
    layers = (
        "import shardwise.launch.watch, shardwise.launch.run_folder, shardwise.launch.outcome, "
        "shardwise.plan.check, shardwise.report.summary, shardwise.report.doctor, shardwise.events.live, "
        "shardwise.report.verify, shardwise.verify.parity"
    )
    found = imported(f"{verbs}\n{layers}")
    assert "shardwise.plan.rule_of_thumb" in found
    assert "torch" not in found


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_and_help_with_an_example(verb: str) -> None:
    text = shardwise(verb, "--help").stdout
    assert f"Example: shardwise {verb}" in text.replace("\n  ", " ")
    assert "--json" in text


def test_the_version_is_told() -> None:
    assert shardwise("--version").stdout.startswith("shardwise ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "absent.toml"], "There is no recipe"),
        (["train", QUICKSTART, "--set", "optimizer.lrr=1"], "the nearest known key is optimizer.lr"),
        (["train", QUICKSTART, "--set", "train.plan.cp=2"], "planned only"),
        (["train", QUICKSTART, "--set", "data.text=['absent/*.txt']"], "matches no file"),
        (["train", QUICKSTART, "--set", "train.devices=2", "--set", "train.plan.dp_replicate=3"], "degrees"),
        (["train", QUICKSTART, "--fork", "other"], "there is no run"),
        (["train", QUICKSTART, "--fork", "other", "--fresh"], "contradict"),
        (["train", QUICKSTART, "--set", "data.valid_fraction=0.0"], "nothing to evaluate on"),
        (["train", QUICKSTART, "--devices", "0"], "--devices"),
        (["run", "absent.py"], "There is no script"),
        (["plan", QUICKSTART, "--cluster", "8xH10"], "There is no GPU"),
        (["plan", "absent.json"], "does not exist"),
        (["verify", "absent.json"], "There is no plan or recipe"),
        (["verify", QUICKSTART, "--half", "third"], "none of dry, parity and both"),
        (["verify", QUICKSTART, "--set", "train.plan.cp=2"], "planned only"),
        (["fly"], "fly"),
    ],
)
def test_bad_input_is_told_before_anything_starts_and_exits_with_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_an_error_is_json_where_json_is_asked_for() -> None:
    done = shardwise("train", "absent.toml", "--json")
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 2


def test_a_dry_run_shows_the_plan_and_the_command_and_starts_nothing(tmp_path: Path) -> None:
    done = shardwise("train", QUICKSTART, "--devices", "3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    assert "--nproc-per-node=3" in done.stdout and "why" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_needs_no_gpu_and_is_written_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = shardwise("plan", QUICKSTART, "--cluster", "8xH100", "-o", str(path), "--json")
    assert json.loads(done.stdout)["plan"] == json.loads(path.read_text())
    assert json.loads(path.read_text())["decision"]["precision"] == "bf16"


def test_a_preset_can_be_planned_without_a_recipe() -> None:
    done = shardwise("plan", "decoder-8m", "--cluster", "8xH100", "--set", "data.sequence_length=512")
    assert done.returncode == 0
    assert "decoder-8m" in done.stdout and "cannot run as it is" not in done.stdout


def test_doctor_tells_what_is_here() -> None:
    found = json.loads(shardwise("doctor", "--json").stdout)
    assert {"python", "torch", "devices", "backend", "cores", "memory"} <= set(found)


def test_a_script_runs_with_its_own_arguments_and_prints_through(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nprint('got', sys.argv[1:])\nprint('low', file=sys.stderr)\n")
    done = shardwise("run", "--devices", "1", "mine.py", "--json", "--devices", "7", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "got ['--json', '--devices', '7']\n")
    assert done.stderr == "low\n"


def test_a_script_that_raises_shows_one_traceback_and_where_the_logs_are(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('begin')\nraise ValueError('planted')\n")
    done = shardwise("run", "--devices", "1", "--json", "mine.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 0 failed" in done.stderr and "runs/logs/mine" in done.stderr
    assert json.loads(done.stdout) == {"exit_code": 1, "ranks": 1, "logs": "runs/logs/mine"}


def test_the_first_failing_of_several_ranks_is_shown_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('planted')\nsignal.pause()\n"
    )
    start = time.perf_counter()
    done = shardwise("run", "--devices", "2", "mine.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: planted" in done.stderr and "rank 1 failed" in done.stderr
    assert time.perf_counter() - start < 15


@pytest.mark.parametrize("code", [2, 75, 130])
def test_a_scripts_own_exit_code_is_the_commands(tmp_path: Path, code: int) -> None:
    (tmp_path / "mine.py").write_text(f"raise SystemExit({code})\n")
    assert shardwise("run", "--devices", "1", "mine.py", cwd=tmp_path).returncode == code


def test_an_error_stands_below_the_steps_that_it_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.follow import Screen
    from shardwise.events.reader import Tail
    from shardwise.events.values import Evaluated, to_line
    from shardwise.launch.watch import Output

    rank = tmp_path / "logs" / "single" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    (rank / "stdout.log").touch()
    (rank / "stderr.log").write_text("rank 0, step 5: the disk is full\n")
    (tmp_path / "events.jsonl").write_bytes(to_line(Evaluated(step=5, loss=1.5, count=1.0, metrics={}, seconds=0.1)))
    Screen(Output(tmp_path / "logs"), Tail(tmp_path / "events.jsonl"), quiet_stdout=True).tick()
    said = capfd.readouterr().err
    assert 0 <= said.index("held-out loss") < said.index("the disk is full")


def test_what_earlier_attempts_told_stands_where_this_one_has_nothing_to_train(tmp_path: Path) -> None:
    from shardwise.cli.train import _told_before
    from shardwise.events.values import Evaluated, Saved, Step
    from shardwise.events.writer import EventWriter
    from shardwise.launch.run_folder import events_path
    from shardwise.report import summary

    def step(number: int) -> Step:
        return Step(
            step=number, steps=9, loss=10.0 - number, grad_norm=1.0, lr=1.0, samples=1, tokens=1, step_seconds=1
        )

    for attempt, numbers in ((1, range(1, 5)), (2, range(5, 10))):
        writer = EventWriter(events_path(tmp_path, attempt))
        writer.emit(Evaluated(step=numbers[0] - 1, loss=20.0 - numbers[0], count=1))
        for number in numbers:
            writer.emit(step(number))
        writer.emit(Saved(step=numbers[-1], path=f"at-{numbers[-1]}", bytes=1, seconds=1, why="policy"))
        writer.close()
    told = _told_before(tmp_path, 3)
    line = json.loads(summary.last_line(told, "run", 0))
    assert (line["first_loss"], line["last_loss"], line["valid_loss"]) == (9.0, 1.0, 15.0)
    assert (line["step"], line["checkpoint"]) == (9, "at-9")
