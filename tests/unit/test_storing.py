"""Where a run's checkpoints lie: whose they are on any machine, and which of them is not tried again."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardwise.checkpoint import marks
from shardwise.checkpoint.lineage import lineage_of
from shardwise.checkpoint.manifest import MANIFEST, seal
from shardwise.checkpoint.retention import folder_name, look, retain
from shardwise.checkpoint.store import LocalStore
from shardwise.errors import CheckpointError, RecipeError
from shardwise.events.values import AnyEvent, Failed, Resumed, RunStarted, Saved, to_line
from shardwise.inputs.recipe import CheckpointPolicy, History, Recipe, from_keys
from shardwise.launch import run_folder
from shardwise.launch.run_folder import RunState
from shardwise.train import storing
from tests.unit.test_checkpoint_format import manifest

KEYS: dict[str, Any] = {
    "run": "runs/mine", "model": {"preset": "decoder-2m"}, "data": {"text": ["a.txt"]},
    "batch": {"global_batch": 8}, "train": {"steps": 10},
}  # fmt: skip


def recipe(**tables: Any) -> Recipe:
    return from_keys({**KEYS, **tables})


def test_a_run_has_one_lineage_whatever_it_may_change_on_the_way() -> None:
    first = lineage_of(recipe())
    for tables in (
        {"train": {"steps": 99, "plan": {"zero": 2}, "devices": 2}},
        {"optimizer": {"lr": 1e-5}},
        {"checkpoint": {"keep": 9, "store": "s3://bucket/x"}},
        {"seed": 0},  # What is at its default may as well not be given.
    ):
        assert lineage_of(recipe(**tables)) == first
    for tables in ({"run": "runs/other"}, {"seed": 1}, {"model": {"preset": "decoder-124m"}}):
        assert lineage_of(recipe(**tables)) != first


def test_a_run_folder_cannot_be_a_url_and_the_fix_is_accepted() -> None:
    with pytest.raises(RecipeError, match="is a URL") as caught:
        recipe(run="s3://bucket/prefix/mine")
    assert 'run = "runs/mine"' in caught.value.fix
    assert 'checkpoint.store = "s3://bucket/prefix/mine"' in caught.value.fix
    assert recipe(run="runs/mine", checkpoint={"store": "s3://bucket/prefix/mine"})
    with pytest.raises(RecipeError, match="password") as caught:
        recipe(checkpoint={"store": "s3://me:hunter2@bucket/prefix"})
    assert "hunter2" not in str(caught.value)


def test_what_retention_keeps_is_read_strictly() -> None:
    table = {"history": {"hourly": 24, "daily": 7}, "best": 1, "best_by": "highest accuracy"}
    policy = recipe(checkpoint=table).checkpoint
    assert policy.history == History(hourly=24, daily=7)
    assert msgspec.json.decode(msgspec.json.encode(policy), type=CheckpointPolicy) == policy
    with pytest.raises(RecipeError, match="best_by"):
        recipe(checkpoint={"best_by": "accuracy"})


# ---------------------------------------------------------------- a checkpoint that every attempt fails from


def attempt(at: float, path: str, *, saved: bool = False) -> list[AnyEvent]:
    started = RunStarted(time=at, run="r", attempt=1, world=1, pids=(1,), device="cpu", plan="", step=0)
    events: list[AnyEvent] = [started, Resumed(time=at, step=5, path=path)]
    return [*events, Saved(time=at + 5, step=6, path="p/new", bytes=1, seconds=1.0, why="x")] if saved else events


def failure(at: float) -> Failed:
    return Failed(time=at, rank=0, step=6, phase="forward", error="NonFinite", traceback="")


def test_only_failures_in_a_row_from_one_checkpoint_count() -> None:
    failures = [failure(15), failure(25), failure(26), failure(45)]
    assert storing.fruitless([], []) == ("", 0)
    tried = [attempt(at, "p/a") for at in (10.0, 20.0, 30.0, 40.0)]
    # The third was killed or preempted: nobody raised.
    assert storing.fruitless(tried, failures) == ("p/a", 3)
    assert storing.fruitless([*tried[:3], attempt(40.0, "p/b")], failures) == ("p/b", 1)
    assert storing.fruitless([tried[0], attempt(20.0, "p/a", saved=True), *tried[2:]], failures) == ("p/a", 1)
    assert storing.fruitless([*tried, attempt(50.0, "p/a", saved=True)], failures) == ("p/a", 0)


def commit(store: LocalStore, step: int, lineage: str = "") -> str:
    folder = folder_name(step, lineage, "0" * 8, 0)
    made = msgspec.structs.replace(manifest(step), lineage=lineage, created=float(step))
    store.create(f"{folder}/{MANIFEST}", seal(made))
    return folder


def run_with(folder: Path, attempts: list[list[AnyEvent]], failures: list[Failed]) -> RunState:
    for number, events in enumerate(attempts, start=1):
        path = run_folder.events_path(folder, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(to_line, events)))
    for number, failed in enumerate(failures):
        (folder / "events" / f"failed-{number}.json").write_bytes(to_line(failed))
    return RunState(folder, attempt=len(attempts) + 1, resume=True, finished=False)


@pytest.mark.parametrize(("older", "passed"), [(True, True), (False, False)])
def test_a_checkpoint_that_three_attempts_failed_from_is_passed_over_where_there_is_an_older_one(
    tmp_path: Path, older: bool, passed: bool
) -> None:
    store = LocalStore(tmp_path / "checkpoints")
    if older:
        commit(store, 3)
    newest = commit(store, 5)
    attempts = [attempt(at, f"{store}/{newest}") for at in (10.0, 20.0, 30.0)]
    opened = run_with(tmp_path, attempts, [failure(11), failure(21), failure(31)])
    storing.pass_over_fruitless(storing.Kept(store, ""), opened)
    assert (newest in marks.passed_over(store)) is passed


ATTEMPTS = """
import os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shardwise as sw
x = torch.arange(64.0).reshape(16, 4) / 64
def attempt(number, fails_at):
    trainer = sw.Trainer(
        model=lambda: nn.Linear(4, 1), loss=lambda o, b: sw.Loss((o - b[1]).square().sum(), len(b[1])),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), global_batch=8, run="run",
        data=sw.Batches(TensorDataset(x, x.sum(1, True)), workers=0),
        checkpoint=sw.CheckpointPolicy(every_steps=2, asynchronous=False, store=sys.argv[1]))
    first = 0
    for step in trainer.run(steps=6):
        first = first or step.number
        if number == 0 and step.number == 5:
            return first
        if step.number == fails_at:
            raise ValueError("a bad machine, or a bad checkpoint")
    return first
def on_a_machine_of_its_own(number, fails_at):
    os.makedirs(f"machine-{number}")
    if os.fork() == 0:
        os.chdir(f"machine-{number}")
        try:
            print("began at", attempt(number, fails_at), flush=True)
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        os._exit(0)
    os.wait()
for number, fails_at in enumerate((0, 6, 6, 6, 0)):
    on_a_machine_of_its_own(number, fails_at)
"""


def test_a_store_tells_the_next_machine_how_often_a_checkpoint_was_failed_from(tmp_path: Path) -> None:
    """Each attempt in a run folder that knows nothing of the others: left after step 5, thrice failed, then well."""
    store = LocalStore(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(store)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr.count("a bad machine, or a bad checkpoint") >= 3, done.stderr
    # The last begins from the checkpoint of step 4, though that of step 5 is whole.
    assert done.stdout.split("began at")[1:] == [" 1\n", " 5\n"], done.stdout + done.stderr
    over = {folder: said.why for folder, said in marks.passed_over(store).items()}
    assert [(folder[:13], why) for folder, why in over.items()] == [
        ("step-00000005", "3 attempts failed from it and committed nothing")
    ]


def test_a_failure_counts_once_an_attempt_and_goes_with_its_checkpoint(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "checkpoints")
    folder = commit(store, 5)
    for attempt_name in ("a", "b", "a"):
        marks.failed(store, folder, attempt_name)
    assert marks.failures(store) == {folder: 2}
    commit(store, 6)
    newest = commit(store, 7)
    retain(store, "", CheckpointPolicy(keep=1), newest)
    assert marks.failures(store) == {} and [item.manifest.step for item in look(store, "").committed] == [7]


# ---------------------------------------------------------------- no silent start


def fresh_start(tmp_path: Path, opened: RunState | None = None) -> None:
    kept = storing.Kept(LocalStore(tmp_path / "checkpoints"), "")
    storing.refuse_silent_start(kept, opened or RunState(tmp_path, attempt=1, resume=False, finished=False))


@pytest.mark.parametrize("name", ["global_step500", "checkpoint-500", "step_00500", "iter_0000500"])
def test_a_run_does_not_begin_anew_beside_checkpoints_of_another_kind(tmp_path: Path, name: str) -> None:
    LocalStore(tmp_path / "checkpoints").write(f"{name}/.metadata", [b"x"])
    with pytest.raises(CheckpointError, match=name):
        fresh_start(tmp_path)


def test_a_run_does_not_begin_anew_beside_another_runs_checkpoints(tmp_path: Path) -> None:
    folder = commit(LocalStore(tmp_path / "checkpoints"), 5, "another")
    with pytest.raises(CheckpointError, match=folder):
        fresh_start(tmp_path)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path) -> None:
    opened = run_with(tmp_path, [attempt(10.0, "", saved=True)], [])
    with pytest.raises(CheckpointError, match="1 were committed"):
        fresh_start(tmp_path, opened)
    commit(LocalStore(tmp_path / "checkpoints"), 6)
    fresh_start(tmp_path, opened)


def test_foreign_files_and_a_first_save_that_was_killed_stand_in_nobodys_way(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "checkpoints")
    fresh_start(tmp_path)
    for key in (".gitignore", "README", "notes/a.txt", f"{folder_name(5, '', '0' * 8, 0)}/.rank-0.tmp"):
        store.write(key, [b"x"])
    fresh_start(tmp_path)
    assert store.read(".gitignore") == b"x"
    assert look(store, "").unknown == []


def test_a_store_that_refuses_is_an_error_that_every_rank_can_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with contextlib.ExitStack() as held, pytest.raises(CheckpointError, match="a file stands where"):
        opened = RunState(tmp_path, attempt=1, resume=False, finished=False)
        storing.open_store(held, recipe(checkpoint={"store": str(tmp_path / "file")}), opened, fresh=False)
