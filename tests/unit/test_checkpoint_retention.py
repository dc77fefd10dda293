"""Retention: whatever was saved, failed and damaged, what stays can be resumed from."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.checkpoint import marks
from shardwise.checkpoint.manifest import MANIFEST, Damaged, FileEntry, digest_of, seal
from shardwise.checkpoint.retention import (
    Committed,
    best_of,
    delete_folder,
    folder_name,
    kept,
    look,
    retain,
    surplus,
    verify_commit,
)
from shardwise.inputs.recipe import CheckpointPolicy, History
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


# ---------------------------------------------------------------- a thinning history, the best, pins


def at_hours(*hours: float) -> list[Committed]:
    """Checkpoints of steps 1, 2, ... that were made at these hours."""
    return [
        Committed(folder_name(step, "run", "0" * 8, 0), replace(manifest(step), created=hour * 3600))
        for step, hour in enumerate(hours, start=1)
    ]


def steps_of(folders: Any) -> list[int]:
    return sorted(int(folder[5:13]) for folder in folders)


def test_the_last_of_each_hour_and_of_each_day_stays() -> None:
    items = at_hours(0.1, 0.9, 1.5, 23.5, 24.5, 30.2, 30.8, 48.1, 48.9)
    stay = kept(items, keep=1, history=History(hourly=3, daily=2))
    assert stay[items[8].folder] == ("newest", "hourly", "daily")
    assert steps_of(folder for folder, why in stay.items() if "hourly" in why) == [5, 7, 9]
    assert steps_of(folder for folder, why in stay.items() if "daily" in why) == [7, 9]
    assert surplus(items, keep=1, current=items[8].folder, history=History(hourly=3, daily=2)) == [
        items[at].folder for at in (0, 1, 2, 3, 5, 7)
    ]


@given(st.lists(st.floats(-3, 40), min_size=1, max_size=25), st.integers(1, 3), st.integers(0, 4), st.integers(0, 3))
def test_thinning_after_every_save_leaves_what_thinning_at_the_end_would(
    waits: list[float], keep: int, hourly: int, daily: int
) -> None:
    """Whatever the clock did meanwhile: what is deleted early is never missed later."""
    items = at_hours(*[1000 + sum(waits[: at + 1]) for at in range(len(waits))])
    history = History(hourly=hourly, daily=daily)
    left: list[Committed] = []
    for item in items:
        left.append(item)
        gone = surplus(left, keep=keep, current=item.folder, history=history)
        left = [one for one in left if one.folder not in gone]
    at_once = surplus(items, keep=keep, current=items[-1].folder, history=history)
    assert {one.folder for one in left} == {item.folder for item in items} - set(at_once)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3).map(float)), st.integers(0, 4))
def test_the_best_are_no_worse_than_the_others_and_of_equals_the_newest(scored: dict[str, float], count: int) -> None:
    best = best_of(scored, count)
    others = scored.keys() - set(best)
    assert len(best) == min(count, len(scored))
    assert all((scored[a], a < b) <= (scored[b], True) for a in best for b in others)
    negated = {folder: -score for folder, score in scored.items()}
    assert best_of(negated, count, highest=True) == best


def store_of(steps: int, **policy: Any) -> tuple[MemoryStore, list[str], CheckpointPolicy]:
    """Steps 1 to `steps`, each with one file."""
    store, folders = MemoryStore(), [folder_name(step, "run", "0" * 8, step) for step in range(1, steps + 1)]
    for step, folder in enumerate(folders, start=1):
        made = replace(manifest(step), files=(FileEntry("rank-00000", 9, digest_of(bytes(9))),))
        store.values[f"{folder}/rank-00000"] = bytes(9)
        store.values[f"{folder}/{MANIFEST}"] = seal(made)
    return store, folders, CheckpointPolicy(**policy)


def test_what_is_pinned_and_the_best_stay_and_what_was_said_of_the_others_goes_with_them() -> None:
    store, folders, policy = store_of(6, keep=1, best=1)
    marks.pin(store, folders[1], "paper")
    for folder, loss in zip(folders, (3.0, 2.0, 1.0, 1.5, 2.5, 9.0), strict=True):
        marks.evaluated(store, folder, {"loss": loss})
    done = retain(store, "run", policy, folders[5])
    assert steps_of(done.deleted) == [1, 4, 5]
    assert done.notes == ()
    assert steps_of(marks.scores(store)) == [2, 3, 6]
    assert marks.pinned(store)[folders[1]].why == "paper"
    marks.unpin(store, folders[1])
    assert steps_of(retain(store, "run", policy, folders[5]).deleted) == [2]


def test_the_best_by_the_highest_of_a_metric_stays() -> None:
    store, folders, policy = store_of(3, keep=1, best=1, best_by="highest accuracy")
    for folder, accuracy in zip(folders, (0.9, 0.5, 0.4), strict=True):
        marks.evaluated(store, folder, {"loss": accuracy, "accuracy": accuracy, "broken": float("nan")})
    assert steps_of(retain(store, "run", policy, folders[2]).deleted) == [2]


def test_a_pin_comes_too_late_for_what_is_gone_and_says_so() -> None:
    store, folders, policy = store_of(2, keep=1)
    retain(store, "run", policy, folders[1])
    assert not marks.pin(store, folders[0])
    assert marks.pinned(store) == {}


@pytest.mark.parametrize("harm", ["cut", "longer", "gone", "manifest"])
def test_nothing_is_deleted_where_the_newest_cannot_be_read_back(harm: str) -> None:
    store, folders, policy = store_of(5, keep=1)
    key = f"{folders[4]}/rank-00000"
    if harm == "gone":
        del store.values[key]
    elif harm == "manifest":
        store.values[f"{folders[4]}/{MANIFEST}"] = b"{}"
    else:
        store.values[key] = store.values[key] + b"x" if harm == "longer" else store.values[key][:-1]
    with pytest.raises(Damaged):
        verify_commit(store, folders[4])
    before = dict(store.values)
    done = retain(store, "run", policy, folders[4])
    assert done.deleted == ()
    assert "no old checkpoint was deleted" in done.notes[0]
    assert store.values.items() > before.items()
    # It takes nobody's place among the newest.
    assert list(marks.passed_over(store)) == [folders[4]]


def test_one_that_cannot_be_deleted_keeps_no_other_from_it() -> None:
    store, folders, policy = store_of(4, keep=1)
    really = store.delete

    def refusing(key: str) -> None:
        if key.startswith(folders[1]):
            raise PermissionError(13, "Permission denied")
        really(key)

    store.delete = refusing  # type: ignore[method-assign]
    done = retain(store, "run", policy, folders[3])
    assert steps_of(done.deleted) == [1, 3]
    assert [note.split()[0] for note in done.notes] == [folders[1]]


def test_manifests_are_read_once() -> None:
    store, folders, policy = store_of(4, keep=3)
    known: dict[str, Committed] = {}
    retain(store, "run", policy, folders[3], known=known)
    assert set(known) == set(folders[1:])
    read: list[str] = []
    really = store.read

    def noting(key: str, start: int = 0, length: int | None = None) -> bytes:
        read.append(key)
        return really(key, start, length)

    store.read = noting  # type: ignore[method-assign]
    look(store, "run", known)
    assert read == []
