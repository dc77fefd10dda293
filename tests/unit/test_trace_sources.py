"""Traces by ranks: of a file, a folder and archives; archives that want to fill the memory or to lead elsewhere."""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import BadInput
from shardwise.profiling.sources import rank_of, traces_of

NAMES = ("worker0_step_12.1694128201545.pt.trace.json", "deep/rank-00001.json.gz", "rank_2.JSON")


def text(rank: int) -> bytes:
    one = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 100 + rank, "dur": 1}
    return json.dumps({"traceEvents": [one]}).encode()


def members() -> dict[str, bytes]:
    texts = {name: text(rank) for rank, name in enumerate(NAMES)}
    return {**texts, NAMES[1]: gzip.compress(texts[NAMES[1]]), "notes.txt": b"no trace", "deep/": b""}


def folder(path: Path) -> Path:
    for name, content in members().items():
        (path / "many" / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (path / "many" / name).write_bytes(content)
    return path / "many"


def tar(path: Path) -> Path:
    with tarfile.open(path / "many.tar.gz", "w:gz") as archive:
        archive.add(folder(path), "../../many")  # names that lead out: nothing is written by them
    return path / "many.tar.gz"


def packed(path: Path) -> Path:
    with zipfile.ZipFile(path / "many.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members().items():
            archive.writestr(f"/etc/{name}", content)
    return path / "many.zip"


@pytest.mark.parametrize("made", [folder, tar, packed])
def test_each_rank_is_read_wherever_it_lies(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    path = made(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = {trace.rank: trace.events.start.tolist() for trace in traces_of(path)}
    assert found == {0: [100_000], 1: [101_000], 2: [102_000]}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_single_file_is_a_job_of_one(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(text(0))
    (only,) = traces_of(tmp_path / "trace.json")
    assert only.rank is None and only.path == str(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("a/rank3.json", 3), ("rank-00012_step-5.json.gz", 12), ("worker2_step_12.169.pt.trace.json", 2),
        ("host_4711.169.pt.trace.json", None), ("rank1_of_rank2.json", None), ("frank3.json", None),
        ("rank3/trace.json", None), ("job_rank_7_3.json", 7),
    ],
)  # fmt: skip
def test_a_rank_is_what_the_files_name_says_alone(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        link = tarfile.TarInfo("rank0.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(BadInput, match="holds no trace"):
        list(traces_of(tmp_path / "links.tar"))


def test_what_unpacks_to_too_much_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.profiling.trace.MOST_BYTES", 2**20)
    monkeypatch.setattr("shardwise.profiling.sources.MOST_BYTES", 2**24)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank0.json", bytes(2**22))
    with pytest.raises(BadInput, match="holds more than"):
        list(traces_of(tmp_path / "bomb.zip"))
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as archive:
        large = tarfile.TarInfo("other.bin")
        large.size = 2**25
        archive.addfile(large, io.BytesIO(bytes(2**25)))
    with pytest.raises(BadInput, match="is too large"):
        list(traces_of(tmp_path / "bomb.tar.gz"))


@pytest.mark.parametrize("made", [tar, packed])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_an_archive_that_is_cut_off_is_refused_or_read_up_to_there(
    tmp_path: Path, made: Callable[[Path], Path], part: float
) -> None:
    path = made(tmp_path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    try:
        found = [trace.rank for trace in traces_of(path)]
    except BadInput:
        return
    assert found and set(found) <= {0, 1, 2}


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no trace"):
        list(traces_of(tmp_path))
    with pytest.raises(BadInput, match="cannot be read"):
        list(traces_of(tmp_path / "absent"))
