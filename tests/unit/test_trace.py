"""Reading traces: either spelling, packed or not, cut off anywhere, and with what cannot be."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import BadInput
from shardwise.profiling.breakdown import broken_down, steps_of
from shardwise.profiling.trace import Kind, Trace, read


def event(cat: str, name: str, ts: Any, dur: Any, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


STEP = [
    event("user_annotation", "ProfilerStep#3", 100, 50.5),
    event("cpu_op", "aten::mm", 110.25, 5, args={"External id": 1}),
    event("cuda_runtime", "cudaLaunchKernel", 111, 2, args={"correlation": 9}),
    event("kernel", "sgemm", 130, 40.125, pid=0, tid="stream 7", args={"device": 0, "correlation": 9}),
    event("cuda_sync", "Stream Sync", 100, 90, args={"correlation": 9}),
]


def written(path: Path, events: list[Any], **more: Any) -> Path:
    path.write_text(json.dumps({**more, "traceEvents": events}))
    return path


def test_columns_are_what_the_events_say_in_nanoseconds(tmp_path: Path) -> None:
    info = {"distributedInfo": {"rank": 3, "world_size": 8}, "deviceProperties": [{"id": 0, "name": "A GPU"}]}
    trace = read(written(tmp_path / "a.json", STEP, **info))
    assert (trace.rank, trace.world, trace.devices) == (3, 8, ("A GPU",))
    assert trace.events.start.tolist() == [100_000, 110_250, 111_000, 130_000]
    assert trace.events.end.tolist() == [150_500, 115_250, 113_000, 170_125]
    assert trace.events.kind.tolist() == [Kind.ANNOTATION, Kind.OPERATOR, Kind.RUNTIME, Kind.KERNEL]
    assert trace.events.device.tolist() == [-1, -1, -1, 0] and trace.events.correlation.tolist() == [0, 0, 9, 9]
    assert [trace.names[at] for at in trace.events.name] == ["ProfilerStep#3", "aten::mm", "cudaLaunchKernel", "sgemm"]


def test_the_spelling_of_2021_a_bare_list_and_gzip_are_the_same(tmp_path: Path) -> None:
    expected = read(written(tmp_path / "a.json", STEP)).events
    old = {"user_annotation": "Operator", "cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
    spelled = [{**one, "cat": old.get(one["cat"], one["cat"])} for one in STEP]
    (tmp_path / "list.json").write_text(json.dumps(STEP))
    (tmp_path / "packed").write_bytes(gzip.compress(json.dumps({"traceEvents": STEP}).encode()))
    for path in (tmp_path / "list.json", tmp_path / "packed", written(tmp_path / "old.json", spelled)):
        found = read(path).events
        assert found.start.tolist() == expected.start.tolist() and found.end.tolist() == expected.end.tolist()


def test_what_cannot_be_is_left_out_and_counted(tmp_path: Path) -> None:
    wrong = [
        event("kernel", "centuries", 120, 7.4e15),
        event("kernel", "negative", 120, -1),
        event("kernel", "zero", -(10**15), 0),
        event("kernel", "beyond", 1e300, 1),
        event("kernel", "untimed", None, 1),
        event("kernel", "text", "noon", 1),
        {"ph": "X", "cat": "kernel", "name": "endless", "ts": 120},
        event("kernel", "listed", 120, 1, args=[1]),
        event("kernel", "text of a number", "121", "1", args="x"),
        {"ph": 3}, {"ph": "X", "cat": None}, {},
    ]  # fmt: skip
    trace = read(written(tmp_path / "a.json", STEP + wrong))
    assert trace.doubts.malformed == 3 and trace.doubts.absurd == 4 and not trace.doubts.truncated
    assert [trace.names[at] for at in trace.events.name[4:]] == ["listed", "text of a number"]


def test_numbers_that_json_does_not_know_and_bytes_that_are_no_text_are_read(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": STEP}).replace('"External id": 1', '"bandwidth": NaN').encode()
    (tmp_path / "a.json").write_bytes(text.replace(b"sgemm", b"sg\xffemm"))
    assert len(read(tmp_path / "a.json").events.start) == 4


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_is_cut_off_is_read_up_to_there_and_says_so(tmp_path: Path, packed: bool) -> None:
    events = [event("cpu_op", f"aten::mm {n}", n, 1, args={"nested": {"n": n}, "text": "} , {"}) for n in range(500)]
    whole = json.dumps({"traceEvents": events, "more": {}}).encode()
    if packed:
        whole = gzip.compress(whole)
    path, counts = tmp_path / "cut.json", []
    for part in (0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(len(whole) * part)])
        trace = read(path)
        assert trace.doubts.truncated
        count = len(trace.events.start)
        assert trace.events.start.tolist() == [1000 * n for n in range(count)]
        counts.append(count)
    assert 0 < counts[0] < counts[1] < counts[2] < 500


def test_what_unpacks_to_more_than_a_trace_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.profiling.trace.MOST_BYTES", 2**20)
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(2**26)))
    with pytest.raises(BadInput, match="holds more than"):
        read(tmp_path / "bomb")


def test_a_file_of_two_packed_members_is_read_whole(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": STEP}).encode()
    (tmp_path / "two").write_bytes(gzip.compress(text[:99]) + gzip.compress(text[99:]))
    trace = read(tmp_path / "two")
    assert len(trace.events.start) == 4 and not trace.doubts.truncated


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"text", b"\x1f\x8b", b'{"traceEvents": 3}', b"PK\x03\x04"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no").write_bytes(content)
    with pytest.raises(BadInput, match="is no trace"):
        read(tmp_path / "no")
    with pytest.raises(BadInput, match="cannot be read"):
        read(tmp_path / "absent")


def test_no_fuzz_of_a_trace_breaks_the_sum_of_a_step(tmp_path: Path) -> None:
    """Shuffled, doubled, with fields gone or swapped and bytes changed: refused, or each step's shares sum to it."""
    draw, read_in = random.Random(7), 0
    for number in range(300):
        events = [dict(one) for one in draw.choices(STEP, k=12)]
        for one in events:
            for _ in range(draw.randrange(3)):
                one[draw.choice(list(one))] = draw.choice([None, -1, 0, 1e18, "x", [], {}, True, 2**70, -0.5])
        raw = bytearray(json.dumps({"traceEvents": events}).encode())
        for _ in range(draw.randrange(3)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        path = tmp_path / f"{number}.json"
        path.write_bytes(raw[: draw.choice([len(raw), draw.randrange(len(raw))])])
        try:
            trace = read(path)
        except BadInput:
            continue
        read_in += 1
        assert sums(trace)
    assert read_in > 100


def sums(trace: Trace) -> bool:
    steps = steps_of(trace)
    found = broken_down(trace, steps)
    return bool((found.spent >= 0).all() and (found.spent.sum(1) == steps.ends - steps.begins).all())
