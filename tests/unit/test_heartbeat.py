"""The record of a heartbeat: what is written is read, never half of it, and only of the process that owns it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.launch.heartbeat import ENDED, RING, Heart, last_collectives, read, record_path


@pytest.fixture
def heart(tmp_path: Path) -> Iterator[Heart]:
    made = Heart()
    made.open(record_path(tmp_path, 3), rank=3, world=8)
    yield made
    made.close()


def test_what_is_written_is_read(tmp_path: Path, heart: Heart) -> None:
    heart.attempt(2)
    heart.step(7)
    heart.at("backward", micro=4)
    heart.enter("sum of gradient bucket 1")
    beat = read(record_path(tmp_path, 3))
    assert beat is not None and beat.waits
    assert (beat.pid, beat.rank, beat.world, beat.attempt) == (os.getpid(), 3, 8, 2)
    assert (beat.step, beat.micro, beat.phase, beat.steps) == (7, 4, "backward", 1)
    assert (beat.entered, beat.left, beat.collective) == (1, 0, "sum of gradient bucket 1")
    heart.leave()
    after = read(record_path(tmp_path, 3))
    assert after is not None and not after.waits and after.sequence == beat.sequence + 1


def test_every_call_is_progress_and_a_new_step_has_no_micro_batch(tmp_path: Path, heart: Heart) -> None:
    seen = []
    for call in (heart.beat, lambda: heart.at("forward", 5), lambda: heart.step(1), lambda: heart.phase("save")):
        call()
        beat = read(record_path(tmp_path, 3))
        assert beat is not None
        seen.append(beat)
    assert [b.sequence for b in seen] == list(range(seen[0].sequence, seen[0].sequence + 4))
    assert [b.at_ns for b in seen] == sorted(b.at_ns for b in seen)
    assert [b.micro for b in seen] == [0, 5, 0, 0]


def test_a_phase_over_another_is_seen_and_gives_it_back(tmp_path: Path, heart: Heart) -> None:
    assert heart.phase("forward") == "setup"
    phases = []
    for over in ("compile", ""):
        heart.within(over)
        phases.append(getattr(read(record_path(tmp_path, 3)), "phase", None))
    assert phases == ["compile", "forward"]


def test_the_last_collectives_are_kept_newest_first(tmp_path: Path, heart: Heart) -> None:
    for number in range(RING + 5):
        heart.enter(f"call {number}")
        heart.leave()
    heart.enter("the last")
    past = last_collectives(record_path(tmp_path, 3))
    assert [one.number for one in past] == list(range(RING + 6, 6, -1))
    assert past[0].name == "the last" and past[0].left_ns == 0
    assert all(one.left_ns >= one.entered_ns > 0 for one in past[1:])


def test_no_reader_sees_half_a_beat(tmp_path: Path) -> None:
    """A process writes without pause; in each of its beats all numbers are the same."""
    path = record_path(tmp_path, 0)
    child = os.fork()
    if child == 0:
        own = Heart()
        own.open(path, rank=0, world=1)
        for number in range(1, 200_000):
            own._step = own._micro = own._steps = own._entered = own._left = number
            own.beat()
        os._exit(0)
    seen = set()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        beat = read(path)
        if beat is not None:
            assert len({beat.step, beat.micro, beat.steps, beat.entered, beat.left}) == 1
            seen.add(beat.step)
    assert len(seen) > 10  # it was read while it was written


@pytest.mark.parametrize("byte", [32, 40, 56, 100, 150, 155])
def test_a_beat_with_a_byte_of_another_is_not_read(tmp_path: Path, heart: Heart, byte: int) -> None:
    heart.enter("sum of gradient bucket 1")
    path = record_path(tmp_path, 3)
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1
    (tmp_path / "torn").write_bytes(raw)
    assert read(path) is not None and read(tmp_path / "torn") is None


def test_a_forked_child_does_not_speak_for_its_parent(tmp_path: Path) -> None:
    from shardwise.launch.heartbeat import HEART

    path = record_path(tmp_path, 0)
    HEART.open(path, rank=0, world=1)
    before = read(path)
    child = os.fork()
    if child == 0:
        HEART.phase("the child's")
        os._exit(0)
    os.waitpid(child, 0)
    assert read(path) == before
    HEART.close()
    assert getattr(read(path), "phase", "") == ENDED


def test_what_is_no_record_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / "nothing") is None
    (tmp_path / "short").write_bytes(b"SHWBEAT1")
    (tmp_path / "other").write_bytes(bytes(5000))
    assert read(tmp_path / "short") is None and read(tmp_path / "other") is None
    assert last_collectives(tmp_path / "other") == []


def test_a_heart_that_is_not_open_does_nothing() -> None:
    heart = Heart()
    heart.enter("x")
    heart.leave()
    heart.step(1)
    assert not heart.is_open
