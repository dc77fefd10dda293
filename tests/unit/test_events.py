"""Events: what is written comes back, whatever the floats, the crashes and the sinks."""

import contextlib
import math
import os
import resource
import threading
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import TrainingFailed
from shardwise.events import (
    AnyEvent,
    Events,
    EventWriter,
    Fallback,
    NonFiniteLoss,
    Resumed,
    Saved,
    Step,
    Stopped,
    Tail,
    from_line,
    read,
    to_line,
)

KINDS = get_args(AnyEvent)
TEXT = st.text(max_size=8) | st.sampled_from(["nan", "inf", "-inf", "null", "true", "1", "\r\n", "é"])
FLOAT = st.floats(allow_nan=True, allow_infinity=True)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, the awkward ones among them."""
    plain = {
        str: TEXT,
        float: FLOAT,
        int: st.integers(-(2**63), 2**63 - 1),
        bool: st.booleans(),
        type(None): st.none(),
    }
    if kind in plain:
        return plain[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*(values(one) for one in inner))
    if origin is tuple:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
    return st.one_of(*[values(option) for option in inner])


def events() -> st.SearchStrategy[Any]:
    return st.one_of(*[build(kind) for kind in KINDS])


def build(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})


def same(left: Any, right: Any) -> bool:
    """Equal, with NaN equal to NaN."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and left == right


@given(events())
def test_every_event_comes_back_from_its_line_as_it_was(event: Any) -> None:
    line = to_line(event)
    back = from_line(line)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert type(back) is type(event)
    assert same(msgspec.to_builtins(back), msgspec.to_builtins(event))


def test_a_non_finite_float_survives_json() -> None:
    back = from_line(to_line(NonFiniteLoss(step=3, loss=math.nan, grad_norm=-math.inf, in_a_row=1)))
    assert isinstance(back, NonFiniteLoss)
    assert math.isnan(back.loss)
    assert back.grad_norm == -math.inf


@pytest.mark.parametrize(
    "line",
    [b'{"event":"resumed","step":1,"path":"x","extra":1}', b'{"event":"other"}', b"[]", b'{"event":"step"}'],
)
def test_an_unknown_key_or_kind_is_an_error(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_line(line)


def test_what_the_writer_appends_the_reader_returns_in_order(tmp_path: Any) -> None:
    path = tmp_path / "events" / "attempt-000.jsonl"
    sent = [Resumed(time=1.0, step=number, path="p") for number in range(5)]
    for part in (sent[:2], sent[2:]):
        with EventWriter(path) as writer:
            for event in part:
                writer.emit(event)
    assert read(path) == sent


def test_lines_of_many_threads_never_mix(tmp_path: Any) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:

        def send(rank: int) -> None:
            for number in range(50):
                writer.emit(Saved(step=number, path=str(rank) * 300, bytes=rank, seconds=0.0, why=""))

        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    back = read(path)
    assert len(back) == 200
    for rank in range(4):
        assert [event.step for event in back if isinstance(event, Saved) and event.bytes == rank] == list(range(50))


def test_only_a_torn_last_line_is_left_out(tmp_path: Any) -> None:
    path = tmp_path / "events.jsonl"
    first, second = (to_line(Resumed(step=number, path="")) for number in (1, 2))
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        assert [event.step for event in read(path) if isinstance(event, Resumed)] == [1]
    path.write_bytes(first[:-3] + b"\n" + second)
    with pytest.raises(TrainingFailed, match="line 1"):
        read(path)


def test_a_tail_gives_each_event_once_and_waits_for_the_whole_line(tmp_path: Any) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    sent = [Resumed(time=1.0, step=number, path="é" * number) for number in range(4)]
    raw = b"".join(map(to_line, sent))
    seen = []
    with path.open("ab", buffering=0) as file:
        for byte in range(len(raw)):
            file.write(raw[byte : byte + 1])
            seen.extend(tail.new())
    assert seen == sent
    assert tail.new() == []


@contextlib.contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """A real refusal: the kernel writes up to the limit, half a line too, and then says EFBIG as a full disk ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saved(step: int) -> Saved:
    return Saved(time=1.0, step=step, path="p", bytes=1, seconds=0.0, why="policy")


def test_what_a_full_disk_refuses_is_written_later_in_order_and_said_once(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.emit(saved(1))
        with files_of_at_most(path.stat().st_size + 20):
            for step in range(2, 6):
                writer.emit(saved(step))
            assert writer.delayed == 4
        assert read(path) == [saved(1)]
        writer.emit(saved(6))
        assert writer.delayed == 0
    assert read(path) == [saved(step) for step in range(1, 7)]
    assert capsys.readouterr().err.count("kept in memory") == 1


def test_memory_is_bounded_while_nothing_can_be_written(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, most_lines=3)
    writer.emit(saved(1))
    with files_of_at_most(path.stat().st_size + 20):
        for step in range(2, 9):
            writer.emit(saved(step))
        assert writer.delayed == 3
    writer.emit(saved(9))
    assert [event.step for event in read(path)] == [1, 2, 7, 8, 9]
    writer.close()
    full = EventWriter(tmp_path / "other.jsonl")
    with files_of_at_most(10):
        full.emit(saved(1))
        full.close()
    assert "1 events are lost" in capsys.readouterr().err


def test_a_closed_writer_says_so(tmp_path: Any) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(OSError, match="closed"):
        writer.emit(Resumed(step=1, path=""))


class Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def emit(self, event: Any) -> None:
        self.events.append(event)


class Full:
    """A sink on a disk that takes `room` events."""

    def __init__(self, room: int) -> None:
        self.room = room

    def emit(self, event: Any) -> None:
        if self.room == 0:
            raise OSError(28, os.strerror(28))
        self.room -= 1


def test_events_are_stamped_once_and_reach_every_sink() -> None:
    first, second = Kept(), Kept()
    ticks = iter([10.0, 20.0])
    fan = Events([first, second], clock=lambda: next(ticks))
    fan.emit(Resumed(step=1, path=""))
    fan.emit(Resumed(time=5.0, step=2, path=""))
    fan.emit(Resumed(step=3, path=""))
    assert [event.time for event in first.events] == [10.0, 5.0, 20.0]
    assert first.events == second.events


def test_a_sink_that_raises_is_dropped_and_said_once() -> None:
    kept, full = Kept(), Full(room=1)
    fan = Events([full, kept], clock=lambda: 1.0)
    for step in range(4):
        fan.emit(Stopped(step=step, reason="user", exit_code=0))
    assert fan.sinks == (kept,)
    said = [event for event in kept.events if isinstance(event, Fallback)]
    assert len(said) == 1
    assert "Full" in said[0].what
    assert "No space left" in said[0].why
    assert [event.step for event in kept.events if isinstance(event, Stopped)] == [0, 1, 2, 3]


def test_when_every_sink_raises_training_goes_on() -> None:
    fan = Events([Full(room=0), Full(room=0)], clock=lambda: 1.0)
    fan.emit(Step(step=1, steps=2, loss=1.0, grad_norm=None, lr=0.1, samples=1, tokens=None, step_seconds=1.0))
    assert fan.sinks == ()
