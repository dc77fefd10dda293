"""Stores by URL, against a real S3 server with faults in between: never torn, tried again, told; no secret is kept."""

import errno
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.checkpoint.object_store import ObjectStore, require_create, store_at
from shardwise.checkpoint.retries import Retries, passes
from shardwise.checkpoint.store import LocalStore
from shardwise.checkpoint.store_errors import StoreError
from shardwise.errors import CheckpointError, RecipeError
from tests import s3_server
from tests.s3_server import PASSING, FaultyProxy, cut_short, held_until, status, truncated

# The laws of every Store, for the stores of this module's fixture.
from tests.unit.test_checkpoint_store import (  # noqa: F401
    test_a_key_is_created_once_and_keeps_its_first_value,
    test_a_second_write_replaces_the_first,
    test_an_empty_store_lists_nothing,
    test_list_gives_the_keys_with_a_prefix_in_order,
    test_what_is_deleted_is_absent_and_may_be_deleted_again,
    test_what_is_written_is_read_back_whole_and_in_ranges,
)

PART = 5 * 2**20  # The smallest that S3 takes, but for the last.


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server.s3_server() as port:
        yield port


@pytest.fixture
def bucket(server: int, request: Any, monkeypatch: Any) -> str:
    for name, value in s3_server.KEYS.items():
        monkeypatch.setenv(name, value)
    name = f"b-{abs(hash(request.node.nodeid)):x}"
    s3_server.client(server).create_bucket(Bucket=name)
    return name


@pytest.fixture
def proxy(server: int, monkeypatch: Any) -> Iterator[FaultyProxy]:
    with s3_server.faulty_proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


class Told(list[str]):
    def __call__(self, what: str, why: str) -> None:
        self.append(f"{what}: {why}")


class Waits(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def s3(bucket: str, **given: Any) -> ObjectStore:
    given = {"part_bytes": PART, "sleep": Waits(), "tell": Told(), "timeouts": (5, 20), **given}
    return ObjectStore(f"s3://{bucket}/runs/mine", **given)


@pytest.fixture(params=["s3", "memory"])
def store(request: Any, monkeypatch: Any) -> ObjectStore:
    if request.param == "s3":
        name, proxy = request.getfixturevalue("bucket"), request.getfixturevalue("proxy")
        assert isinstance(proxy, FaultyProxy)
        return s3(name)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return ObjectStore("memory://runs/mine", part_bytes=PART)


def pieces(size: int) -> list[bytes]:
    """Pieces of no length in particular, with no two parts alike."""
    return [bytes([at % 251]) * length for at in range(size // 900_001) for length in (900_001,)] + [b"end"]


def test_an_object_of_several_parts_is_read_back_in_any_range(store: ObjectStore) -> None:
    sent = pieces(3 * PART)
    store.write("a/b", sent)
    whole = b"".join(sent)
    assert len(whole) > 2 * PART
    assert store.read("a/b") == whole
    for start, length in ((0, 10), (PART - 5, 10), (len(whole) - 3, 10), (len(whole), 10), (7, None)):
        assert store.read("a/b", start, length) == whole[start : None if length is None else start + length]
    assert store.list() == ["a/b"]


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART + 1])
def test_the_edges_of_a_part_lose_nothing(bucket: str, proxy: FaultyProxy, size: int) -> None:
    store, whole = s3(bucket), bytes(range(256)) * (size // 256) + bytes(size % 256)
    store.write("k", [whole[: size // 3], whole[size // 3 :]])
    assert store.read("k") == whole


def test_a_piece_may_be_overwritten_once_the_next_is_asked_for(store: ObjectStore) -> None:
    buffer = bytearray(PART // 2)

    def reused() -> Iterable[memoryview]:
        for number in range(5):
            buffer[:] = bytes([number]) * len(buffer)
            yield memoryview(buffer)

    store.write("k", reused())
    assert store.read("k") == b"".join(bytes([number]) * len(buffer) for number in range(5))


def test_a_write_that_fails_leaves_the_old_value_and_no_upload(bucket: str, proxy: FaultyProxy) -> None:
    store = s3(bucket)
    store.write("a/b", [b"old"])

    def broken() -> Iterable[bytes]:
        yield from pieces(3 * PART)
        raise RuntimeError("the tensor is gone")

    with pytest.raises(RuntimeError, match="the tensor is gone"):
        store.write("a/b", broken())
    assert store.read("a/b") == b"old"
    assert store.list() == ["a/b"]


def test_what_a_dead_writer_left_is_listed_and_can_be_deleted(server: int, bucket: str, proxy: FaultyProxy) -> None:
    outside, store = s3_server.client(server), s3(bucket)
    for key in ("runs/mine/step-1/rank-0", "runs/mine/step-2/rank-0", "runs/yours/rank-0"):
        outside.create_multipart_upload(Bucket=bucket, Key=key)
    assert [key.split("~")[0] for key in store.list()] == ["step-1/.rank-0", "step-2/.rank-0"]
    (left,) = store.list("step-1/")
    assert not store.exists("step-1/rank-0")
    store.delete(left)
    store.delete(left)
    still = [item["Key"] for item in outside.list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert still == ["runs/mine/step-2/rank-0", "runs/yours/rank-0"]


# ---------------------------------------------------------------- faults on the way


@pytest.mark.parametrize("request_line", ["PUT .*partNumber=2", "POST .*uploads", "POST .*uploadId", "PUT .*/b$"])
def test_what_fails_on_the_way_there_is_sent_again_and_told(bucket: str, proxy: FaultyProxy, request_line: str) -> None:
    store, sent = s3(bucket), [b"short"] if request_line.endswith("$") else pieces(3 * PART)
    proxy.on(request_line, *PASSING.values())
    store.write("a/b", sent)
    assert not proxy.faults
    assert store.read("a/b") == b"".join(sent)
    # A client may send once more by itself where a connection that it kept was closed.
    assert 3 <= len(store.tell) == len(store._sleep) <= 5
    assert all("runs/mine/a/b was not written at try" in line for line in store.tell)
    assert store._sleep[0] < store._sleep[2]


def test_what_fails_on_the_way_back_is_read_again_and_never_torn(bucket: str, proxy: FaultyProxy) -> None:
    store, whole = s3(bucket), bytes(range(256)) * 4000
    store.write("k", [whole])
    proxy.on("GET .*/k", *PASSING.values(), cut_short)
    assert store.read("k", 1000, 500_000) == whole[1000:501_000]
    assert not proxy.faults
    assert 4 <= len(store.tell) <= 6


def test_an_answer_that_ends_early_and_says_so_of_itself_is_not_taken_for_the_end(
    bucket: str, proxy: FaultyProxy
) -> None:
    store, whole = s3(bucket), bytes(range(256)) * 40
    store.write("k", [whole])
    proxy.on("GET .*/k", truncated, truncated)
    assert store.read("k") == whole
    assert store.read("k", 10, 9_000) == whole[10:9_010]
    assert len(store.tell) == 2


def test_a_server_that_does_not_answer_is_given_up_on_in_time_and_asked_again(bucket: str, proxy: FaultyProxy) -> None:
    store, silence = s3(bucket, timeouts=(5, 0.2)), threading.Event()
    store.write("k", [b"x" * 1000])
    proxy.on("GET .*/k", held_until(silence))
    try:
        assert store.read("k", 0, 1000) == b"x" * 1000
    finally:
        silence.set()
    assert len(store.tell) == 1


def test_an_outage_ends_in_an_error_after_so_many_tries_and_nothing_is_to_be_seen(
    server: int, bucket: str, proxy: FaultyProxy
) -> None:
    store = s3(bucket, retries=Retries(tries=4))
    proxy.on("PUT .*partNumber=2", *[status(503, "SlowDown")] * 4)
    with pytest.raises(StoreError, match="the same at 4 tries") as caught:
        store.write("a/b", pieces(3 * PART))
    assert caught.value.errno == errno.ETIMEDOUT
    assert "AWS_ENDPOINT_URL" in caught.value.fix
    assert len(store.tell) == 3
    assert store.list() == []
    assert "Uploads" not in s3_server.client(server).list_multipart_uploads(Bucket=bucket)


def test_what_cannot_pass_is_not_tried_again(bucket: str, proxy: FaultyProxy) -> None:
    store = s3(bucket)
    proxy.on("PUT ", status(403, "AccessDenied"))
    with pytest.raises(StoreError, match="these credentials may not") as caught:
        store.write("k", [b"x"])
    assert caught.value.errno == errno.EACCES
    assert "s3:PutObject" in caught.value.fix
    assert store.tell == []


def test_a_bucket_that_is_not_there_is_told_and_not_taken_for_a_missing_key(bucket: str, proxy: FaultyProxy) -> None:
    with pytest.raises(StoreError, match="no such bucket"):
        s3("no-such-bucket").write("k", [b"x"])
    with pytest.raises(StoreError, match="no such bucket"):
        s3("no-such-bucket").read("k")


def test_a_creation_whose_answer_is_lost_is_known_for_ones_own(bucket: str, proxy: FaultyProxy) -> None:
    mine, yours = s3(bucket), s3(bucket)
    for name, fault in PASSING.items():
        proxy.on("PUT ", fault)
        mine.create(name, b"mine")
        proxy.on("PUT ", fault)
        with pytest.raises(FileExistsError):
            yours.create(name, b"yours")
        assert mine.read(name) == b"mine"
    assert not proxy.faults


def test_a_store_that_lets_a_second_writer_win_is_refused(bucket: str, proxy: FaultyProxy) -> None:
    require_create(s3(bucket))
    assert s3(bucket).list() == []
    proxy.on("PUT ", *[s3_server.without_conditions] * 2)
    with pytest.raises(CheckpointError, match="If-None-Match"):
        require_create(s3(bucket))
    assert s3(bucket).list() == []


def test_without_credentials_the_error_names_the_way_to_give_them(
    bucket: str, proxy: FaultyProxy, monkeypatch: Any, tmp_path: Any
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="AWS_PROFILE"):
        s3(bucket).write("k", [b"x"])


# ---------------------------------------------------------------- URLs

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url", [f"s3://me:{SECRET}@bucket/run", f"s3://bucket/run?X-Amz-Signature={SECRET}", f"gs://b/r#{SECRET}"]
)
def test_a_secret_in_a_url_is_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(RecipeError, match="user, a password or a query") as caught:
        ObjectStore(url)
    assert SECRET not in str(caught.value)
    fixed = caught.value.fix.split('"')[1]
    assert fixed in ("s3://bucket/run", "gs://b/r")


@pytest.mark.parametrize("url", ["s3://", "simplecache::s3://bucket/run", "nothing-speaks-this://host/run"])
def test_a_url_that_cannot_be_a_store_is_refused(url: str) -> None:
    with pytest.raises(RecipeError):
        store_at(url)


def test_a_folder_and_a_file_url_are_folders(tmp_path: Any) -> None:
    for location in (str(tmp_path), f"file://{tmp_path}"):
        store = store_at(location)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path


def test_no_key_leaves_the_store(store: ObjectStore) -> None:
    for key in ("../outside", "/etc/passwd", "a/../../b", "", "."):
        with pytest.raises(CheckpointError, match="not a key"):
            store.read(key)


# ---------------------------------------------------------------- how long to wait, and for what


def test_waits_grow_to_a_bound_and_ranks_do_not_come_back_in_step() -> None:
    retries = Retries(tries=10, first_seconds=1.0, most_seconds=20.0)
    assert list(retries.waits(lambda: 1.0)) == [1, 2, 4, 8, 16, 20, 20, 20, 20]
    assert list(retries.waits(lambda: 0.0)) == [0.5, 1, 2, 4, 8, 10, 10, 10, 10]


def test_what_passes_is_a_timeout_a_broken_connection_or_the_servers_own_trouble() -> None:
    assert passes(TimeoutError()) and passes(ConnectionResetError()) and passes(OSError(errno.EBUSY, "slow down"))
    assert not passes(ValueError()) and not passes(PermissionError()) and not passes(OSError(errno.ENOSPC, "full"))
    wrapped = RuntimeError("while it wrote")
    wrapped.__cause__ = TimeoutError()
    assert passes(wrapped)
