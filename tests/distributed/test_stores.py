"""Whole runs with their checkpoints in an S3 store: they go on elsewhere, through faults, and one job at a time."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shardwise.checkpoint.lease import Lease
from shardwise.checkpoint.lineage import lineage_of
from shardwise.checkpoint.object_store import ObjectStore
from shardwise.events.reader import read
from shardwise.events.values import Fallback
from shardwise.inputs.recipe import Recipe
from shardwise.launch import run_folder
from tests import s3_server
from tests.distributed.pool import Pool, RankRaised

WORK = "tests.distributed.store_work:train"
BUCKET = "s3://runs/mine"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server.s3_server() as port:
        s3_server.client(port).create_bucket(Bucket="runs")
        yield port


def recipe_of(folder: Path) -> Recipe:
    record = run_folder.read_record(folder)
    assert record is not None
    return record.recipe


def test_a_run_goes_on_from_its_store_on_a_machine_that_never_saw_it_and_through_faults(
    pool: Pool, server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = pool.run(2, WORK, folder=str(tmp_path / "a"), store="s3://runs/unbroken", port=server, steps=6)
    folder = tmp_path / "b"
    pool.run(2, WORK, folder=str(folder), store=BUCKET, port=server, steps=6, pin_at=1, break_at=3)
    recipe = recipe_of(folder)
    folder.rename(tmp_path / "the machine is gone")
    with s3_server.faulty_proxy(server) as proxy:
        proxy.on("GET .*rank-00000", s3_server.PASSING["503"], s3_server.cut_short)
        proxy.on("PUT .*step-00000006.*rank-00001", s3_server.PASSING["500"], s3_server.unheard)
        proxy.on("PUT .*step-00000006.*manifest", s3_server.unanswered)
        proxy.on("GET .*step-00000006.*manifest", s3_server.PASSING["503"])
        again = pool.run(2, WORK, folder=str(folder), store=BUCKET, port=proxy.port, steps=6)
        assert not proxy.faults
    assert again[0]["first"] == 4
    told = [event for event in read(run_folder.events_path(folder, 1)) if isinstance(event, Fallback)]
    # Any rank may have met the faults of the rank's file; a manifest is read by rank 0 alone, which tells it.
    assert len([event for event in told if "manifest.json was not" in event.what and "503" in event.why]) == 1
    assert all(BUCKET in event.what for event in told if "tried again" in event.what)
    assert [one["bits"] for one in again] == [one["bits"] for one in unbroken]
    assert again[0]["kept"] == [6, 4, 1]
    assert [name[:13] for name in again[0]["pinned"]] == ["step-00000001"]
    assert not list((folder / "checkpoints").glob("*"))
    # Nothing is left behind by a commit: no probe, and of leases the last one.
    for name, value in {**s3_server.KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}"}.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore(BUCKET)
    others = [key for key in store.list(".") if not key.startswith(".pinned-")]
    assert len(others) == 1
    refused = pool_refuses(pool, folder=str(folder), store=BUCKET, port=server, steps=6, fresh=True)
    assert refused.kind == "RunFolderError"
    assert "this very run" in str(refused)
    with Lease(store, lineage_of(recipe), "runs/elsewhere", term_seconds=12.0):
        refused = pool_refuses(pool, folder=str(folder), store=BUCKET, port=server, steps=7)
    assert "runs/elsewhere" in str(refused)
    # Another run does not begin beside these.
    refused = pool_refuses(pool, folder=str(tmp_path / "c"), store=BUCKET, port=server, steps=6)
    assert refused.kind == "CheckpointError"
    assert "seldom what was meant" in str(refused)
    assert msgspec.to_builtins(recipe_of(folder).checkpoint)["store"] == BUCKET


def pool_refuses(pool: Pool, **arguments: object) -> RankRaised:
    with pytest.raises(RankRaised) as caught:
        pool.run(2, WORK, **arguments)
    return caught.value
