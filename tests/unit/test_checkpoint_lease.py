"""Two jobs on one store: one holds it, the other is told who; a dead one is succeeded, a woken one changes nothing."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from shardwise.checkpoint.lease import Held, Lease, Leased, Lost, machine_here
from shardwise.checkpoint.store import LocalStore, Piece, Store
from shardwise.errors import RunFolderError
from tests.unit.test_checkpoint_store import MemoryStore

TERM = 600.0  # No thread writes within a test; time is what the test says.


class Time:
    """A clock that goes on by being waited for; `meanwhile` happens at each wait."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now, self.meanwhile = 0.0, meanwhile

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def lease(store: Store, run: str = "a", time: Time | None = None, lineage: str = "run") -> Lease:
    time = time or Time()
    return Lease(store, lineage, run, term_seconds=TERM, wait=time.wait, clock=time.clock)


def elsewhere(store: MemoryStore) -> None:
    """The lease that is there becomes one of another machine, of whose processes nothing is known."""
    for key in store.list(".lease"):
        held = msgspec.json.decode(store.values[key], type=Held)
        store.values[key] = msgspec.json.encode(msgspec.structs.replace(held, machine="another", host="far"))


def test_a_second_job_is_refused_and_told_who_holds_the_store() -> None:
    store = MemoryStore()
    with lease(store, "runs/first") as first:
        time = Time(first.beat)
        with pytest.raises(RunFolderError, match="run runs/first") as caught, lease(store, "runs/second", time):
            pass
        assert time.now <= TERM / 4
        assert any(key in caught.value.fix for key in store.list(".lease"))
        first.require()


def test_a_store_that_was_left_in_order_is_free_at_once() -> None:
    store, time = MemoryStore(), Time()
    for _ in range(3):
        with lease(store, time=time) as held:
            held.require()
    assert time.now == 0
    assert len(store.list(".lease")) == 1


def test_other_lineages_in_one_store_do_not_meet() -> None:
    store = MemoryStore()
    with lease(store, lineage="one"), lease(store, lineage="two") as other:
        other.require()


def test_a_job_that_died_elsewhere_is_succeeded_after_its_term_whatever_its_clock_said() -> None:
    store, time = MemoryStore(), Time()
    dead = lease(store)
    dead._take()
    elsewhere(store)
    (key,) = store.list(".lease")
    ahead = msgspec.json.decode(store.values[key], type=Held)
    store.values[key] = msgspec.json.encode(msgspec.structs.replace(ahead, written=ahead.written + 1e6))
    with lease(store, time=time) as successor:
        assert TERM <= time.now < 1.5 * TERM
        successor.require()


DIES = """
import os, signal, sys
from shardwise.checkpoint.lease import Lease
from shardwise.checkpoint.store import LocalStore
with Lease(LocalStore(sys.argv[1]), "run", "runs/dead"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_was_killed_on_this_machine_is_succeeded_at_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, tmp_path])
    assert done.returncode == -signal.SIGKILL
    time = Time()
    with lease(LocalStore(tmp_path), time=time) as successor:
        successor.require()
    assert time.now == 0


def test_a_job_that_wakes_after_it_was_succeeded_commits_and_deletes_nothing() -> None:
    store, asleep = MemoryStore(), Time()
    store.write("old", [b"x"])
    with lease(store, "runs/asleep", asleep) as first:
        elsewhere(store)
        with lease(store, "runs/successor") as second:
            asleep.now += TERM
            leased = Leased(store, first)
            for act in (lambda: leased.create("manifest", b"mine"), lambda: leased.delete("old")):
                with pytest.raises(Lost, match="runs/successor"):
                    act()
            assert store.list("old") == ["old"]
            assert not store.exists("manifest")
            Leased(store, second).create("manifest", b"theirs")
    assert store.read("manifest") == b"theirs"


def test_a_job_that_could_not_write_its_lease_writes_it_before_it_commits() -> None:
    store, time = MemoryStore(), Time()
    with lease(store, time=time) as held:
        (key,) = store.list(".lease")
        before = store.values[key]
        held.require()
        assert store.values[key] == before
        time.now += 0.75 * TERM
        Leased(store, held).create("k", b"x")
        assert store.values[key] != before


def test_of_many_that_come_at_once_one_holds_the_store(tmp_path: Path) -> None:
    """None of them writes its lease anew: whoever comes second would wait, and by then the first is released."""

    def attempt(number: int) -> int | None:
        held = lease(LocalStore(tmp_path), f"runs/{number}", Time())
        try:
            return held._take()
        except RunFolderError:
            return None

    with ThreadPoolExecutor(8) as pool:
        generations = [found for found in pool.map(attempt, range(16)) if found is not None]
    assert sorted(generations) == list(range(len(generations)))


class Seen(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.writes = threading.Semaphore(0)

    def write(self, key: str, pieces: Iterable[Piece]) -> None:
        super().write(key, pieces)
        self.writes.release()


def test_a_thread_writes_the_lease_anew_until_the_end() -> None:
    store = Seen()
    with Lease(store, "run", "a", term_seconds=0.05):
        assert all(store.writes.acquire(timeout=60) for _ in range(3))
    (key,) = store.list(".lease")
    held = msgspec.json.decode(store.values[key], type=Held)
    assert held.beat >= 3
    assert held.released


def test_a_pid_means_something_only_within_its_machine() -> None:
    assert machine_here() == machine_here()
    assert "pid:[" in machine_here()
