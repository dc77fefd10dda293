"""A fork begins at the newest whole checkpoint of another run, in whatever stores the two keep theirs."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpointer, marks
from shardwise.checkpoint.audit import audit
from shardwise.checkpoint.fork import begin, beginnings, renamed
from shardwise.checkpoint.lineage import kept_at, lineage_of
from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.checkpoint.retention import look
from shardwise.checkpoint.store import LocalStore, Store
from shardwise.cli import fork
from shardwise.cli.run import _goes_on
from shardwise.errors import CheckpointError, RunFolderError
from shardwise.inputs.recipe import CheckpointPolicy, Recipe
from shardwise.launch.run_folder import held, open_run, read_record
from tests import s3_server
from tests.unit.test_checkpoint_store import FaultyStore, MemoryStore
from tests.unit.test_launch_run_folder import recipe

WAYS = [
    ("own folder", "own folder"), ("own folder", "a folder"), ("a folder", "a folder"), ("a folder", "own folder"),
    ("s3", "s3"), ("s3", "own folder"), ("own folder", "s3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server.s3_server() as port:
        s3_server.client(port).create_bucket(Bucket="runs")
        yield port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def place(kind: str, request: Any, monkeypatch: Any, name: str) -> list[str]:
    """The override that has a run keep its checkpoints there."""
    if kind == "own folder":
        return []
    if kind == "a folder":
        return [f"checkpoint.store={request.getfixturevalue('tmp_path') / name}"]
    port = request.getfixturevalue("server")
    for key, value in {**s3_server.KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(key, value)
    return [f"checkpoint.store=s3://runs/{abs(hash(request.node.nodeid)):x}-{name}"]


def trained(folder: Path, asked: Recipe, steps: tuple[int, ...] = (5, 10)) -> tuple[Store, str]:
    """A run that was begun in this folder, with checkpoints after these steps; its store and lineage."""
    with held(folder, asked):
        store, lineage = kept_at(folder, asked)
        checkpointer_of(store, lineage, 1.0, steps)
    return store, lineage


def checkpointer_of(store: Store, lineage: str, filled: float, steps: tuple[int, ...] = ()) -> Checkpointer:
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, filled)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    policy = CheckpointPolicy(every_steps=0, keep=1)
    made = Checkpointer("unused", module, optimizer, store=store, lineage=lineage, policy=policy)
    for step in steps:
        made.save(step)
        marks.pin(store, look(store, lineage).committed[0].folder)
    return made


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_fork_goes_on_from_the_newest_wherever_the_two_keep_theirs(
    folder: Path, request: Any, monkeypatch: Any, before: str, after: str
) -> None:
    store, lineage = trained(folder, recipe(folder, *place(before, request, monkeypatch, "kept")))
    there = {key: store.read(key) for key in store.list("step-")}
    shared = "kept" if before == after else "other"
    asked = recipe(folder, "seed=7", *place(after, request, monkeypatch, shared))
    planned = fork.planned(str(folder), "other", asked)
    assert not (folder.parent / "other").exists(), "a dry run makes nothing"
    fork.make(planned)
    assert planned.recipe.run == str(folder.parent / "other")
    own, its = kept_at(planned.recipe.run, planned.recipe)
    (begun,) = look(own, its).committed
    newest = look(store, lineage).committed[0]
    assert audit(own, begun.folder).faults == ()
    assert (begun.manifest.root, begun.manifest.step) == (newest.manifest.root, 10)
    goes_on = checkpointer_of(own, its, 2.0)
    assert goes_on.resume() == 10
    # What the fork saves, and its retention deletes, is its own: nothing of the run that it began from is touched.
    goes_on.save(11)
    assert {key: store.read(key) for key in there} == there
    state = open_run(planned.recipe.run, planned.recipe)
    assert (state.attempt, state.resume, state.changes) == (1, True, ())
    # The same again goes on with what is there.
    again = fork.planned(str(folder), "other", asked)
    assert (again.recipe, again.store) == (planned.recipe, None)
    fork.make(again)
    assert [item.manifest.step for item in look(own, its).committed] == [11]


def test_a_fork_begins_at_no_checkpoint_that_the_run_passes_over_and_at_none_that_is_damaged(
    folder: Path, capsys: Any
) -> None:
    store, lineage = trained(folder, recipe(folder), steps=(1, 2, 3))
    third, second, first = (item.folder for item in look(store, lineage).committed)
    marks.pass_over(store, third, "a spike")
    planned = fork.planned(str(folder), "other", recipe(folder))
    assert [item.folder for item in planned.found] == [second, first]
    os.truncate(folder / "checkpoints" / second / "rank-00000.safetensors", 100)
    fork.make(planned)
    assert f"{second} was passed over" in capsys.readouterr().err
    assert [item.manifest.step for item in look(*kept_at(planned.recipe.run, planned.recipe)).committed] == [1]


def test_where_a_copy_is_made_a_flipped_bit_is_found_and_where_nothing_is_whole_it_is_told() -> None:
    source, target = MemoryStore(), MemoryStore()
    checkpointer_of(source, "", 1.0, (1,))
    (found,) = beginnings(source, "")
    key = f"{found.folder}/rank-00000.safetensors"
    source.values[key] = source.values[key][:-1] + bytes([source.values[key][-1] ^ 1])
    told: list[str] = []
    with pytest.raises(CheckpointError, match="None of the 1 checkpoints"):
        begin(source, [found], target, "mine", lambda what, why: told.append(why))
    assert look(target, "mine").committed == [] and "digest" in told[0]


def test_a_fork_that_dies_at_any_operation_has_nothing_and_the_same_again_ends_it() -> None:
    source = MemoryStore()
    checkpointer_of(source, "", 1.0, (1,))
    found = beginnings(source, "")

    def die(operation: str) -> None:
        raise OSError(errno.EIO, operation)

    operations = 0
    while True:
        target, operations = MemoryStore(), operations + 1
        faulty = FaultyStore(target, operations, die)
        try:
            begin(source, found, faulty, "mine", print)
        except OSError:
            assert look(target, "mine").committed == []
        assert begin(source, found, target, "mine", print) == renamed(found[0].folder, "mine")
        assert read_manifest(target, look(target, "mine").committed[0].folder).lineage == "mine"
        if len(faulty.operations) < operations:
            break
    assert operations > 4


def test_a_fork_does_not_go_on_with_checkpoints_of_a_run_of_its_name() -> None:
    source, target = MemoryStore(), MemoryStore()
    checkpointer_of(source, "", 1.0, (1,))
    checkpointer_of(target, "mine", 1.0, (9,))
    before = dict(target.values)
    with pytest.raises(RunFolderError, match="of a run of this name"):
        begin(source, beginnings(source, ""), target, "mine", print)
    assert target.values == before


def test_a_fork_of_nothing_or_onto_another_run_is_refused(folder: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run"):
        fork.planned(str(folder), "other", recipe(folder))
    with held(folder, recipe(folder)):
        pass
    with pytest.raises(RunFolderError, match="no committed checkpoint"):
        fork.planned(str(folder), "other", recipe(folder))
    trained(folder, recipe(folder), steps=(1,))
    other = folder.parent / "other"
    with held(other, recipe(other)):
        pass
    with pytest.raises(RunFolderError, match="another run already"):
        fork.planned(str(folder), "other", recipe(folder))
    with pytest.raises(RunFolderError, match="is not a name"):
        fork.planned(str(folder), "../other", recipe(folder))


def test_files_of_one_file_system_are_linked_and_the_manifest_is_the_forks_own(folder: Path) -> None:
    store, lineage = trained(folder, recipe(folder), steps=(1,))
    planned = fork.planned(str(folder), "other", recipe(folder))
    fork.make(planned)
    name = look(store, lineage).committed[0].folder
    one, other = (path / "checkpoints" / name for path in (folder, folder.parent / "other"))
    assert (one / "rank-00000.safetensors").samefile(other / "rank-00000.safetensors")
    assert not (one / MANIFEST).samefile(other / MANIFEST)
    record = read_record(planned.recipe.run)
    assert record is not None and record.forked_from == str(folder)


def test_a_link_is_given_once_and_copies_are_made_where_there_can_be_none(tmp_path: Path) -> None:
    store, source = LocalStore(tmp_path / "store"), tmp_path / "file"
    source.write_bytes(b"x")
    assert store.link("a/b", source) and store.link("a/b", source) and store.read("a/b") == b"x"
    store.write("a/c", [b"another"])
    assert not store.link("a/c", source) and store.read("a/c") == b"another"
    assert not store.link("a/d", tmp_path / "absent")


@pytest.mark.parametrize("kind", ["own folder", "a folder"])
def test_a_script_is_started_again_where_its_store_holds_something_of_it(
    folder: Path, request: Any, monkeypatch: Any, kind: str
) -> None:
    assert not _goes_on(None) and not _goes_on(folder)
    asked = recipe(folder, *place(kind, request, monkeypatch, "kept"))
    with held(folder, asked):
        pass
    assert not _goes_on(folder)
    trained(folder, asked, steps=(1,))
    assert _goes_on(folder)
    assert kept_at(folder, asked)[1] == ("" if kind == "own folder" else lineage_of(asked))
