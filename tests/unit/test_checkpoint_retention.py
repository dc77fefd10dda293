"""Retention: whatever was saved, failed and damaged, what stays can be resumed from."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.checkpoint.manifest import MANIFEST, seal
from shardwise.checkpoint.retention import Committed, delete_folder, folder_name, look, surplus
from tests.unit.test_checkpoint_format import manifest
from tests.unit.test_checkpoint_store import MemoryStore


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Committed], set[str]]:
    steps = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    items = [
        Committed(folder_name(step, "run", "0" * 8, at), replace(manifest(step), created=float(at)))
        for at, step in enumerate(steps)
    ]
    bad = {item.folder for item in items[:-1] if draw(st.booleans())}
    return items, bad


@given(histories(), st.integers(0, 4))
def test_the_newest_whole_ones_and_the_current_one_always_stay(history: Any, keep: int) -> None:
    items, bad = history
    current = items[-1].folder
    gone = set(surplus(items, keep=keep, current=current, bad=bad))
    stay = [item for item in items if item.folder not in gone]
    whole = sorted((item for item in items if item.folder not in bad), key=lambda item: item.order)
    assert current not in gone
    assert {item.folder for item in whole[-max(keep, 1) :]} <= {item.folder for item in stay}
    assert len([item for item in stay if item.folder not in bad]) <= max(keep, 1) + 1


@given(histories(), st.integers(1, 4))
def test_deleting_twice_deletes_nothing_more(history: Any, keep: int) -> None:
    items, bad = history
    current = items[-1].folder
    gone = set(surplus(items, keep=keep, current=current, bad=bad))
    left = [item for item in items if item.folder not in gone]
    assert surplus(left, keep=keep, current=current, bad=bad) == []


def test_order_is_by_step_in_the_manifest_and_not_by_name() -> None:
    names = [folder_name(step, "run", "0" * 8, at) for at, step in enumerate((99_999_999, 100_000_000))]
    items = [Committed(name, manifest(step)) for name, step in zip(names, (99_999_999, 100_000_000), strict=True)]
    assert surplus(items, keep=1, current=names[1]) == [names[0]]


def store_with(*folders: tuple[str, str]) -> MemoryStore:
    store = MemoryStore()
    for folder, kind in folders:
        store.values[f"{folder}/.rank-00001.safetensors.0a0a0a0a.tmp"] = b"torn"
        store.values[f"{folder}/rank-00000.safetensors"] = b"x"
        if kind != "torn":
            store.values[f"{folder}/{MANIFEST}"] = seal(manifest()) if kind == "whole" else b"{}"
    return store


def test_a_store_is_read_by_lineage_and_what_is_foreign_is_never_opened() -> None:
    mine = [folder_name(step, "run", "0" * 8, 0) for step in range(3)]
    other = folder_name(9, "another run", "0" * 8, 0)
    store = store_with((mine[0], "whole"), (mine[1], "torn"), (mine[2], "damaged"), (other, "damaged"), ("x", "whole"))
    found = look(store, "run")
    assert [item.folder for item in found.committed] == [mine[0]]
    assert found.torn == [mine[1]]
    assert [item.folder for item in found.broken] == [mine[2]]
    assert found.foreign == [other]


@pytest.mark.parametrize("died_after", range(4))
def test_a_deletion_that_dies_leaves_a_folder_that_is_torn_and_not_whole(died_after: int) -> None:
    folder = folder_name(1, "run", "0" * 8, 0)
    store = store_with((folder, "whole"))
    order: list[str] = []
    really = store.delete

    def dying(key: str) -> None:
        if len(order) == died_after:
            raise OSError("killed")
        order.append(key)
        really(key)

    store.delete = dying  # type: ignore[method-assign]
    if died_after < 3:
        with pytest.raises(OSError, match="killed"):
            delete_folder(store, folder)
    else:
        delete_folder(store, folder)
    found = look(store, "run")
    left = (len(found.committed), len(found.torn), len(found.broken))
    assert left == [(1, 0, 0), (0, 1, 0), (0, 1, 0), (0, 0, 0)][died_after]
