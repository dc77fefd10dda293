"""Folders that were sealed: whatever happens to a file is found, and the newest whole one is gone on from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.interop.sealed import SEAL, newest_whole, problem, seal


def folder(output: Path, step: int) -> Path:
    made = output / f"checkpoint-{step}"
    (made / "inner").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (made / "inner" / "state.json").write_text("{}")
    return made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda one: flip(one / "model.safetensors"), "model.safetensors is damaged"),
        (lambda one: (one / "model.safetensors").write_bytes(b"short"), "model.safetensors has 5 bytes, and had 5120"),
        (lambda one: (one / "inner" / "state.json").unlink(), "inner/state.json is gone"),
        (lambda one: (one / SEAL).unlink(), "has no seal"),
        (lambda one: (one / SEAL).write_text("{"), "cannot be read"),
        (lambda one: (one / SEAL).write_text('{"step": 1, "files": "x"}'), "cannot be read"),
    ],
)
def test_what_was_done_to_a_file_is_named_and_the_folder_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], harm: Callable[[Path], object], says: str
) -> None:
    for step in (9, 10):
        seal(folder(tmp_path, step), step)
    assert problem(tmp_path / "checkpoint-10") == ""
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-10"), "by number, not by name"
    harm(tmp_path / "checkpoint-10")
    assert says in problem(tmp_path / "checkpoint-10")
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-9")
    assert says in capfd.readouterr().err


def test_a_folder_that_nobody_came_to_seal_is_not_gone_on_from(tmp_path: Path) -> None:
    folder(tmp_path, 4)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_whole(tmp_path) is None and newest_whole(tmp_path / "none") is None


def test_sealed_again_it_holds_what_is_there_then(tmp_path: Path) -> None:
    one = folder(tmp_path, 1)
    seal(one, 1)
    (one / "more.json").write_text("[]")
    assert problem(one) == "", "what somebody adds is no damage"
    assert {file.name for file in seal(one, 1).files} == {"model.safetensors", "inner/state.json", "more.json"}
