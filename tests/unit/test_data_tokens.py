"""Text to token files to sequences, with real files and processes."""

import itertools
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data import tokenize
from shardwise.data.files import TextFile, find
from shardwise.data.from_recipe import prepare_recipe
from shardwise.data.token_file import TokenFile, open_token_file, prepare, split_samples
from shardwise.data.tokenize import Coding, Work, encode_all, units
from shardwise.data.tokens import IGNORED, TokenData, as_batch
from shardwise.errors import DataError
from shardwise.inputs.recipe import DataSpec


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def documents(token_file: TokenFile) -> list[bytes]:
    """What the token file holds, taken apart at its separators."""
    tokens = np.fromfile(token_file.path, dtype=token_file.header.dtype)
    assert tokens[-1] == 256
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes() for part in parts]


def names(files: tuple[TextFile, ...]) -> list[str]:
    return [file.key for file in files]


def test_tokens_give_back_the_bytes_of_every_file(tmp_path: Path) -> None:
    content = {
        "a.txt": b"plain",
        "b/c.md": bytes(range(256)) * 3,
        "b/d.py": b"\xff\xfe no utf-8",
        "b/empty.txt": b"",
    }
    made = prepare(str(write(tmp_path / "text", content)))
    assert sorted(documents(made)) == sorted(text for text in content.values() if text)
    assert made.header.documents == 3 and made.header.vocab_size == 257 and made.header.dtype == "uint16"
    assert made.header.source_bytes == sum(map(len, content.values()))


def test_small_units_and_several_processes_change_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {at} " + "é" * (at % 7)}) for at in range(200)]
    write(tmp_path, {"a.txt": b"x" * 5000, "b.txt": b"y" * 100, "c.jsonl": "\n\n".join(lines).encode()})
    files = find(["*.txt", "c.jsonl"])
    for unit_bytes in (64, 1000, 10**6):
        work = Work(Coding(), "text", tuple(units(files, unit_bytes)))
        here, there = list(encode_all(work, 1)), list(encode_all(work, 3))
        assert [unit.tokens.tolist() for unit in here] == [unit.tokens.tolist() for unit in there]
        assert [unit[1:] for unit in here] == [unit[1:] for unit in there]
        assert sum(unit.documents for unit in here) == 202
        joined = np.concatenate([unit.tokens for unit in here])
        texts = [bytes(part[part < 256].astype(np.uint8)) for part in np.split(joined, np.flatnonzero(joined == 256))]
        assert sorted(texts)[1:] == sorted(
            [b"x" * 5000, b"y" * 100, *(json.loads(line)["text"].encode() for line in lines)]
        )
        assert max(piece.stop - piece.start for unit in work.units for piece in unit) <= unit_bytes


def children() -> set[int]:
    """The processes that this one started: other tests have some too."""
    return {int(child) for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_closing_early_ends_the_processes(tmp_path: Path) -> None:
    write(tmp_path, {f"{at}.txt": b"z" * 300_000 for at in range(8)})
    others = children()
    encoding = encode_all(Work(Coding(), "text", tuple(units(find("*.txt"), 300_000))), 2)
    next(encoding)
    assert len(children() - others) == 2
    encoding.close()
    assert children() <= others


def test_a_lost_process_is_an_error_that_says_how_it_ended(tmp_path: Path) -> None:
    write(tmp_path, {f"{at}.txt": b"z" * 300_000 for at in range(8)})
    others = children()
    encoding = encode_all(Work(Coding(), "text", tuple(units(find("*.txt"), 300_000))), 2)
    next(encoding)
    for child in children() - others:
        os.kill(child, signal.SIGKILL)
    with pytest.raises(DataError, match="was lost") as caught:
        list(encoding)
    assert "SIGKILL" in caught.value.why


def test_folders_globs_and_files_are_found_in_one_order(tmp_path: Path) -> None:
    write(tmp_path / "t", {"b.txt": b"b", "a.md": b"a", "x/c.jsonl": b"{}", "x/d.csv": b"d", ".git/e.txt": b"e"})
    assert names(find("t")) == ["a.md", "b.txt", "x/c.jsonl"]
    assert names(find("t/**/*.txt")) == ["b.txt"]
    assert names(find(["t/x/d.csv", "t"])) == ["d.csv", "a.md", "b.txt", "x/c.jsonl"]
    assert names(find(["t/b.txt", "t"])) == ["b.txt", "a.md", "x/c.jsonl"], "no file twice"
    assert [file.kind for file in find("t")] == ["text", "text", "json_lines"]


def test_the_library_of_this_python_is_found_without_installed_packages_and_tests() -> None:
    found = names(find("stdlib:**/*.py"))
    assert "json/decoder.py" in found and len(found) > 300
    assert not [key for key in found if {"site-packages", "test", "tests"} & set(key.split("/"))]
    assert names(find("stdlib:json/*.py")) == [key for key in found if key.startswith("json/") and key.count("/") == 1]


@pytest.mark.parametrize("text", ["missing.txt", "missing/**/*.txt", "stdlib:missing/*.py", "~/no such folder"])
def test_a_path_that_matches_nothing_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(DataError) as caught:
        find(text)
    assert text in caught.value.what


def test_a_folder_without_text_no_text_and_empty_text_are_errors(tmp_path: Path) -> None:
    write(tmp_path, {"t/x.bin": b"x", "empty.txt": b""})
    with pytest.raises(DataError, match="matches no file"):
        find("t")
    with pytest.raises(DataError, match="text is empty"):
        find([])
    with pytest.raises(DataError, match="The text is empty"):
        prepare("empty.txt")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"body": "x"}', "its keys: body"),
        (b"[1]", "holds a list"),
        (b"{oops", "not JSON"),
        (b'{"text": 3}', "is a int"),
        (b'{"text": "\xff"}', "not JSON"),
    ],
)
def test_a_json_line_without_text_is_an_error_that_names_file_and_line(tmp_path: Path, line: bytes, why: str) -> None:
    write(tmp_path, {"a.jsonl": b'{"text": "fine"}\n\n{"text": "fine"}\n' + line + b"\n"})
    for unit_bytes in (8, 10**6):
        with pytest.raises(DataError, match=r"a\.jsonl, line 4 has no text") as caught:
            list(encode_all(Work(Coding(), "text", tuple(units(find("a.jsonl"), unit_bytes))), 2))
        assert why in caught.value.why


def test_another_text_key_is_taken(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b'{"body": "one"}\n{"body": "two"}'})
    assert sorted(documents(prepare("a.jsonl", text_key="body"))) == [b"one", b"two"]


def test_a_token_file_is_found_again_and_named_by_its_content(tmp_path: Path) -> None:
    write(tmp_path / "t", {"a.txt": b"one", "b.txt": b"two"})
    calls: list[tuple[int, int]] = []
    made = prepare("t", progress=lambda *done: calls.append(done))
    assert calls[-1] == (12, 12) and [done for done, _ in calls] == sorted(done for done, _ in calls)
    calls.clear()
    assert prepare("t", progress=lambda *done: calls.append(done)) == made
    assert calls == [], "found by paths, sizes and times"
    assert prepare(str(write(tmp_path / "copy", {"a.txt": b"one", "b.txt": b"two"}))) == made
    write(tmp_path / "t", {"b.txt": b"new"})
    assert prepare("t").header.digest != made.header.digest


def test_a_token_file_that_is_not_whole_is_refused_and_made_again(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"some text"})
    made = prepare("a.txt")
    os.truncate(made.path, 4)
    with pytest.raises(DataError, match="not whole"):
        open_token_file(Path(made.path).parent)
    assert documents(prepare("a.txt")) == [b"some text"]


MAKE = """
import os, sys
from pathlib import Path
from shardwise.data.token_file import prepare
def progress(done, total):
    print("made", done, flush=True)
    if sys.argv[1] == "kill" and done > total // 2:
        os.kill(os.getpid(), 9)
made = prepare(sys.argv[2], progress=progress, processes=2)
assert "torch" not in sys.modules
print(made.path)
"""


def maker(what: str, text: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", MAKE, what, text], stdout=subprocess.PIPE, text=True)


def test_two_runs_that_start_at_once_make_one_file_and_only_one_makes_it(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "t", {f"{at}.txt": bytes([at]) * 700_000 for at in range(16)})
    with maker("make", "t") as one, maker("make", "t") as two:
        outputs = [process.communicate(timeout=60)[0].splitlines() for process in (one, two)]
    assert outputs[0][-1] == outputs[1][-1]
    assert sorted(len(lines) > 1 for lines in outputs) == [False, True]
    folders = [entry.name for entry in (cache / "tokens").iterdir() if entry.is_dir()]
    assert sorted(folders) == sorted(["index", Path(outputs[0][-1]).parent.name])


def test_a_maker_that_is_killed_leaves_nothing_that_counts(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "t", {f"{at}.txt": bytes([at]) * 700_000 for at in range(16)})
    with maker("kill", "t") as process:
        output = process.communicate(timeout=60)[0]
    assert process.returncode == -signal.SIGKILL and "tokens.bin" not in output
    left = [entry.name for entry in (cache / "tokens").iterdir() if entry.is_dir() and entry.name != "index"]
    assert len(left) == 1 and left[0].startswith(".making-")
    assert len(documents(prepare("t"))) == 16
    assert not (cache / "tokens" / left[0]).exists()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "t", {"a.txt": b"x" * 100_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(DataError, match="cannot be written") as caught:
            prepare("t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "SHARDWISE_CACHE" in caught.value.fix and "195.3 KiB" in caught.value.why
    assert [entry.name for entry in (cache / "tokens").iterdir() if entry.is_dir()] == ["index"]


def test_a_cache_that_cannot_be_a_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.txt": b"text", "cache_is_a_file": b""})
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache_is_a_file"))
    with pytest.raises(DataError) as caught:
        prepare("a.txt")
    assert "SHARDWISE_CACHE" in caught.value.fix


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, {"a.txt": b"text"})
    with pytest.raises(DataError, match=r"a\.txt changed while it was read"):
        prepare("a.txt", progress=lambda done, total: write(tmp_path, {"a.txt": b"longer text"}) and None)
    assert [entry.name for entry in (cache / "tokens").iterdir() if entry.is_dir()] == ["index"]


def test_another_tokenizer_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(DataError) as caught:
        TokenData("x", tokenizer="gpt2")
    assert "neither" in caught.value.what and '"bytes"' in caught.value.fix


def test_a_sample_is_a_window_and_its_labels_are_one_later(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": bytes(range(100))})
    data = TokenData("a.txt", sequence_length=8, valid_fraction=0.0)
    assert len(data) == 12 and data.tokens_per_sample == 8 and data.vocab_size == 257
    assert data[3]["tokens"].tolist() == list(range(24, 32))
    assert data[3]["labels"].tolist() == list(range(25, 33))
    batch = data.fetch(np.array([0, 11]), (), 0)
    assert batch["labels"].shape == (2, 8) and batch["labels"].dtype == torch.int64
    assert batch["labels"][1].tolist() == list(range(89, 97))
    with pytest.raises(IndexError):
        data[12]
    assert not data.has_valid
    with pytest.raises(DataError, match="held out"):
        _ = data.valid


def test_no_token_is_in_both_parts_and_the_tail_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": bytes(range(250))})
    data = TokenData("a.txt", sequence_length=10, valid_fraction=0.3)
    train, valid = (
        {int(token) for at in range(len(part)) for token in [*part[at]["tokens"], *part[at]["labels"]]}
        for part in (data.train, data.valid)
    )
    assert not train & valid and max(train) < min(valid)
    assert len(data.valid) == round(0.3 * 24) and len(data.train) + len(data.valid) == 24


def test_text_too_short_for_a_sequence_or_a_batch_is_an_error_whose_fix_works(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x" * 100})
    with pytest.raises(DataError, match="101 tokens; sequence_length = 64 needs 130"):
        TokenData("a.txt", sequence_length=64)
    with pytest.raises(DataError, match="needs 130"):
        prepare_recipe(DataSpec(text=("a.txt",), sequence_length=64))
    data = TokenData("a.txt", sequence_length=32, valid_fraction=0)
    with pytest.raises(DataError, match="3 samples, fewer than one global batch of 4"):
        data.loader(seed=0, global_batch=4, micro_batches=1)
    assert next(data.loader(seed=0, global_batch=3, micro_batches=1)).samples == 3
    assert split_samples(130, 64, 0.01) == (1, 1)


def read(data: TokenData, ranks: int, micro_batches: int, **options: Any) -> list[list[list[int]]]:
    loaders = [
        data.loader(seed=2, global_batch=8, rank=rank, ranks=ranks, micro_batches=micro_batches, **options)
        for rank in range(ranks)
    ]
    return [
        [row for micros in own for micro in micros if micro.weight for row in micro.batch["tokens"].tolist()]
        for own in itertools.islice(zip(*loaders, strict=True), 12)
    ]


def test_any_ranks_read_the_same_sequences_and_a_batch_wraps_over_the_epoch(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": bytes(np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8))})
    data = TokenData("a.txt", sequence_length=16, valid_fraction=0.0)
    steps = read(data, 1, 1)
    assert len(data) == 62 and len(steps) == 12
    assert read(data, 4, 2) == steps and read(data, 3, 1) == steps
    assert read(data, 2, 1, start=8 * 7)[:5] == steps[7:]
    assert sorted(row for step in steps for row in step[:])[:1]
    flat = [tuple(row) for step in steps for row in step]
    assert len(set(flat[:62])) == 62 and {len(step) for step in steps} == {8}


def test_a_padded_text_batch_keeps_its_shape_and_its_repeats_have_no_label(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x" * 100})
    data = TokenData("a.txt", sequence_length=10, valid_fraction=0.0, last="pad")
    steps = list(data.loader(seed=0, global_batch=8, micro_batches=2, epochs=1))
    assert [len(micro.batch["tokens"]) for micros in steps for micro in micros] == [4, 4, 4, 4]
    assert sum(int((micro.batch["labels"] != IGNORED).sum()) for micro in steps[1]) == 2 * 10


def test_evaluation_reads_every_held_out_sequence_once_whatever_the_batch(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": bytes(range(250))})
    valid = TokenData("a.txt", sequence_length=10, valid_fraction=0.3).valid
    loader = valid.loader(seed=0, global_batch=100, micro_batches=1, epochs=1, shuffle=False)
    starts = [row[0] for micros in loader for micro in micros for row in micro.batch["tokens"].tolist()]
    assert starts == [valid[at]["tokens"][0] for at in range(len(valid))]


def test_a_copy_for_another_process_carries_no_tokens(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"x" * 100_000})
    data = TokenData("a.txt", sequence_length=10)
    before = data[5]["tokens"].tolist()
    copied = pickle.dumps(data)
    assert len(copied) < 2000 and pickle.loads(copied)[5]["tokens"].tolist() == before


def test_making_tokens_imports_no_torch() -> None:
    code = "import sys, shardwise.data.token_file, shardwise.data.micros; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert tokenize.named(Coding()).dtype == "uint16"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_labels_that_do_not_count_leave_the_tokens_alone(rows: int) -> None:
    made = np.arange(rows * 5).reshape(rows, 5).astype(np.int64)
    batch = as_batch(made.copy(), extra=1)
    assert batch["tokens"].tolist() == made[:, :-1].tolist()
    assert batch["labels"][:-1].tolist() == made[:-1, 1:].tolist()
    assert set(batch["labels"][-1].tolist()) == {-100}
