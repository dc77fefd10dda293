"""The run folder: new, going on, finished, in use, moved aside."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shardwise.errors import RunFolderError
from shardwise.events.values import Failed, to_line
from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import MachineFacts, local_cluster
from shardwise.inputs.recipe import Recipe, from_keys, with_overrides
from shardwise.launch import run_folder
from shardwise.launch.run_folder import (
    COMMAND,
    RunRecord,
    held,
    locked,
    move_aside,
    open_run,
    require_free,
)
from shardwise.plan.plan import Plan
from shardwise.plan.rule_of_thumb import plan


def recipe(folder: Path, *overrides: str) -> Recipe:
    keys = {
        "model": {"preset": "decoder-2m"},
        "data": {"text": ["a.txt"]},
        "batch": {"global_batch": 8},
        "train": {"steps": 10},
        "run": str(folder),
    }
    return from_keys(with_overrides(keys, overrides))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def test_looking_at_a_new_run_makes_nothing(folder: Path) -> None:
    state = open_run(folder, recipe(folder))
    assert (state.attempt, state.resume, state.finished, state.changes) == (1, False, False, ())
    assert not folder.exists()


def test_attempts_are_counted_and_the_next_one_resumes(folder: Path) -> None:
    for attempt in (1, 2, 3):
        with held(folder, recipe(folder)) as state:
            assert (state.attempt, state.resume) == (attempt, attempt > 1)
        assert open_run(folder, recipe(folder)).attempt == attempt + 1


def test_what_is_held_is_what_was_looked_at(folder: Path) -> None:
    with held(folder, recipe(folder)):
        pass
    seen = open_run(folder, recipe(folder, "train.steps=20"))
    with held(folder, recipe(folder, "train.steps=20")) as state:
        assert state == seen


def test_a_finished_run_stays_finished_until_its_end_moves(folder: Path) -> None:
    with held(folder, recipe(folder)):
        run_folder.finish(folder, 10)
    assert open_run(folder, recipe(folder)).finished
    assert open_run(folder, recipe(folder, "optimizer.lr=1e-4")).finished
    assert not open_run(folder, recipe(folder, "train.steps=20")).finished
    with held(folder, recipe(folder)) as state:
        assert state.finished
    assert open_run(folder, recipe(folder)).attempt == state.attempt, "a finished run gets no further attempt"


def test_allowed_changes_are_shown_and_recorded(folder: Path) -> None:
    with held(folder, recipe(folder)):
        pass
    with held(folder, recipe(folder, "optimizer.lr=1e-5")) as state:
        assert [change.key for change in state.changes] == ["optimizer.lr"]
    assert open_run(folder, recipe(folder, "optimizer.lr=1e-5")).changes == ()


def test_another_seed_is_refused_with_the_difference_and_the_ways_out(folder: Path) -> None:
    with held(folder, recipe(folder)):
        pass
    with pytest.raises(RunFolderError) as raised:
        open_run(folder, recipe(folder, "seed=1", "optimizer.lr=1e-5"))
    assert raised.value.why == "seed: 0 -> 1"
    assert "--fork" in raised.value.fix and "--fresh" in raised.value.fix


def test_a_second_holder_is_refused_and_told_who_the_first_is(folder: Path) -> None:
    with locked(folder):
        with pytest.raises(RunFolderError, match="in use") as raised, locked(folder):
            pytest.fail("two held the lock")
        assert str(os.getpid()) in raised.value.why
        with pytest.raises(RunFolderError, match="in use"):
            require_free(folder)
        with pytest.raises(RunFolderError, match="in use"):
            move_aside(folder)
    require_free(folder)
    with locked(folder):
        pass


def test_the_lock_is_free_when_its_holder_was_killed(folder: Path) -> None:
    program = (
        "import sys, time\nfrom shardwise.launch.run_folder import locked\n"
        f"with locked({str(folder)!r}):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(RunFolderError, match=f"process {process.pid}"):
            require_free(folder)
        process.kill()
        process.wait()
        require_free(folder)


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(folder: Path) -> None:
    program = (
        "import os, sys, time\nfrom shardwise.launch.run_folder import locked\n"
        f"with locked({str(folder)!r}):\n"
        "    if os.fork() == 0:\n        print('forked', flush=True); sys.stdin.read(); os._exit(0)\n"
        "    os._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"forked\n"
        process.wait()
        require_free(folder)


def test_starting_over_moves_the_old_run_aside_and_deletes_nothing(folder: Path) -> None:
    for number in (1, 2):
        with held(folder, recipe(folder), fresh=True) as state:
            assert state.attempt == 1
            (folder / "mine").write_text(str(number))
    with held(folder, recipe(folder), fresh=True):
        pass
    aside = [folder.with_name(f"one.{number}") for number in (1, 2)]
    assert [(path / "mine").read_text() for path in aside] == ["1", "2"]


def test_a_record_comes_back_and_a_broken_one_is_refused(folder: Path) -> None:
    record = RunRecord(recipe=recipe(folder), attempts=3, forked_from="runs/zero")
    run_folder.write_record(folder, record)
    assert run_folder.read_record(folder) == record
    (folder / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match="cannot be read"):
        open_run(folder, recipe(folder))


def test_a_run_folder_that_is_a_file_or_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        open_run(tmp_path / "file", recipe(tmp_path / "file"))
    with pytest.raises(RunFolderError, match="cannot be written"), locked(tmp_path / "file" / "below"):
        pytest.fail("held")


def test_a_plan_comes_back_from_the_folder(folder: Path) -> None:
    cluster = local_cluster(MachineFacts(cpus=2, host_memory_bytes=2**34))
    made = plan(recipe(folder), preset("decoder-2m"), cluster)
    path = run_folder.write_plan(folder, made)
    assert Plan.from_json(path.read_bytes()) == made


def test_only_failures_of_this_start_are_read(folder: Path) -> None:
    (folder / "events").mkdir(parents=True)
    for rank, time in ((0, 10.0), (1, 20.0)):
        failed = Failed(time=time, rank=rank, step=1, phase="forward", error="e", traceback="t")
        (folder / "events" / f"failed-attempt-001-rank-{rank}.json").write_bytes(to_line(failed))
    assert [failed.rank for failed in run_folder.failures(folder, since=15.0)] == [1]
    assert len(run_folder.failures(folder, since=0.0)) == 2


def test_each_start_gets_logs_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = run_folder.new_logs_folder(tmp_path, "attempt-001")
        path.mkdir()
        names.append(path.name)
    assert names == ["attempt-001", "attempt-001.2", "attempt-001.3"]


def test_a_nonce_is_seen_where_the_folder_is_shared(tmp_path: Path) -> None:
    run_folder.leave_nonce(tmp_path / "a", "n1")
    assert run_folder.sees_nonce(tmp_path / "a", "n1")
    assert not run_folder.sees_nonce(tmp_path / "b", "n1")
    assert not run_folder.sees_nonce(tmp_path / "a", "n2")


def test_changes_are_values_that_come_back_from_json(folder: Path) -> None:
    with held(folder, recipe(folder)):
        pass
    for change in open_run(folder, recipe(folder, "train.steps=11")).changes:
        assert msgspec.json.decode(msgspec.json.encode(change), type=type(change)) == change


def test_a_command_holds_the_run_from_before_its_ranks_start(tmp_path: Path) -> None:
    with locked(tmp_path / "run", COMMAND):
        with pytest.raises(RunFolderError, match="in use"), locked(tmp_path / "run", COMMAND):
            pass
        with pytest.raises(RunFolderError, match="in use"):
            require_free(tmp_path / "run")
        with locked(tmp_path / "run"):
            pass
    require_free(tmp_path / "run")
