"""The object store of a scratch run: a Store's laws hold, and what is done while it is bad is whole or absent."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.checkpoint.object_store import ObjectStore
from shardwise.checkpoint.retries import Retries
from shardwise.checkpoint.store import LocalStore
from shardwise.checkpoint.store_errors import StoreError
from shardwise.verify.chaos_store import URL, WAYS, BadStore

# The laws of every Store, for the one of this module's fixture.
from tests.unit.test_checkpoint_store import (  # noqa: F401
    test_a_key_is_created_once_and_keeps_its_first_value,
    test_a_second_write_replaces_the_first,
    test_an_empty_store_lists_nothing,
    test_list_gives_the_keys_with_a_prefix_in_order,
    test_what_is_deleted_is_absent_and_may_be_deleted_again,
    test_what_is_written_is_read_back_whole_and_in_ranges,
)

PART = 2**16
SILENT_SECONDS = 0.2


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadStore]:
    with BadStore(tmp_path / "run") as made:
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        made.silent_seconds = SILENT_SECONDS
        monkeypatch.setenv("SHARDWISE_FAULT_STORE_SECONDS", str(SILENT_SECONDS / 2))
        yield made


def connected(tries: int = 8) -> ObjectStore:
    retries = Retries(tries=tries, first_seconds=0.0)
    return ObjectStore(URL, retries=retries, part_bytes=PART, tell=lambda what, why: None)


@pytest.fixture
def store(server: BadStore) -> ObjectStore:
    return connected()


def test_its_objects_are_files_of_the_runs_folder(store: ObjectStore, tmp_path: Path) -> None:
    small, large = b"one", bytes(range(256)) * 800  # of three parts and a rest
    store.write("step-1/manifest.json", [small])
    store.write("step-1/rank-0", [large])
    beside = LocalStore(tmp_path / "run" / "checkpoints")
    assert beside.list() == store.list() == ["step-1/manifest.json", "step-1/rank-0"]
    assert beside.read("step-1/rank-0") == store.read("step-1/rank-0") == large
    assert store.read("step-1/rank-0", PART - 5, 10) == large[PART - 5 : PART + 5]


@pytest.mark.parametrize("seed", range(2))
def test_whatever_it_does_meanwhile_a_value_is_whole_or_absent(server: BadStore, tmp_path: Path, seed: int) -> None:
    """Three in four requests fail, so of two tries some fail for good: of those, the value is there or it is not."""
    store, beside = connected(tries=2), LocalStore(tmp_path / "run" / "checkpoints")
    users = random.getstate()
    values = {f"key-{number}": bytes([number]) * size for number, size in enumerate((1, 1000, PART, 3 * PART + 7))}
    server.harm(600.0, seed / 7)
    done = set[str]()
    for key, value in values.items():
        try:
            store.write(key, [value])
            assert store.read(key) == value
            done.add(key)
        except StoreError as error:
            assert "tries" in error.why
    server.harm(0.0, 0.0)
    there = set(beside.list())
    assert done <= there <= set(values) and server.harmed > len(WAYS)
    assert all(connected().read(key) == values[key] for key in there)
    for key, value in values.items():
        connected().create(key, value)  # what is there equals it
    # An upload that nobody completed is listed under a name of its own, and costs nobody a key.
    assert (
        random.getstate() == users
    )  # its position is kept in checkpoints, and decides what a script of the user's draws
    assert [key for key in connected().list() if not key.startswith(".")] == sorted(values)
