"""A model's own tokenizer: whole documents, its end-of-text token between them, and token files that know it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data import tokenize, tokenizer_json
from shardwise.data.coder import require_rows
from shardwise.data.files import find
from shardwise.data.from_recipe import require_tokenizer
from shardwise.data.token_file import prepare
from shardwise.data.tokenize import Coding, Work, encode_all, source_of, units
from shardwise.data.tokens import TokenData
from shardwise.errors import DataError
from shardwise.inputs.recipe import DataSpec
from tests import chats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = chats.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (made / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": chats.VOCABULARY}))
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))


TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.integers(1, 200))
def test_documents_have_the_tokens_of_the_whole_wherever_work_is_cut(
    folder: Path, tmp_path: Path, texts: list[str], unit_bytes: int
) -> None:
    shutil.rmtree(tmp_path / "t", ignore_errors=True)
    (tmp_path / "t").mkdir()
    for at, text in enumerate(texts):
        (tmp_path / "t" / f"{at}.txt").write_text(text, newline="")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "t" / "all.jsonl").write_text(lines)
    coder = tokenizer_json.of_folder(str(folder))
    work = units(find(str(tmp_path / "t")), unit_bytes, cuts_anywhere=coder.cuts_anywhere)
    tokens = np.concatenate([one.tokens for one in encode_all(Work(Coding(str(folder)), "text", tuple(work)), 1)])
    found = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == coder.separator) + 1)[:-1]]
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    filled = [text for text in texts if text]  # a file without a byte is no document
    wanted = [[*own.encode(text).ids, coder.separator] for text in (*texts, *filled)]
    assert sorted(found) == sorted(wanted)


def test_a_token_file_is_known_by_its_tokenizers_content(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    first = prepare(str(tmp_path / "a.txt"), tokenizer=str(folder))
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert prepare(str(tmp_path / "a.txt"), tokenizer=str(moved)).header.digest == first.header.digest
    changed = json.loads((moved / "tokenizer.json").read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:5]
    (moved / "tokenizer.json").write_text(json.dumps(changed))
    other = prepare(str(tmp_path / "a.txt"), tokenizer=str(moved))
    assert other.header.digest != first.header.digest and other.header.tokens > first.header.tokens
    assert first.header.vocab_size == chats.VOCABULARY
    assert TokenData(str(tmp_path / "a.txt"), tokenizer=str(folder), sequence_length=2)[0]["tokens"].shape == (2,)


def test_auto_is_the_models_own_and_bytes_without_one(folder: Path) -> None:
    assert source_of("auto", None) == "bytes" and source_of("auto", f"hf:{folder}") == str(folder)
    assert source_of("bytes", str(folder)) == "bytes"


def test_an_id_that_the_model_does_not_embed_is_an_error_before_any_text_is_read(folder: Path) -> None:
    spec = DataSpec(text=("no-such-file.txt",))
    require_tokenizer(spec, str(folder), chats.VOCABULARY, "tiny")
    with pytest.raises(
        DataError, match=f"embeds 300 token ids, and the tokenizer has ids up to {chats.VOCABULARY - 1}"
    ):
        require_tokenizer(spec, str(folder), 300, "tiny")
    require_rows(tokenize.named(Coding()), None, "not known")


def test_what_is_wrong_with_a_tokenizer_is_said(folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))

    def said() -> str:
        with pytest.raises(DataError) as caught:
            tokenizer_json.of_folder(str(bad))
        assert caught.value.fix
        return str(caught.value)

    config = json.loads((bad / "tokenizer_config.json").read_text())
    (bad / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<unknown>"}))
    assert "texts end with '<unknown>'" in said()
    (bad / "tokenizer_config.json").write_text("{}")
    assert "says how a text ends" in said()
    (bad / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in said()
    (bad / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in said()
    (bad / "tokenizer.model").write_text("")
    assert "tokenizer.model alone" in said()


def test_a_text_that_is_no_utf8_and_one_that_is_too_large_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is no text in UTF-8"):
        prepare(str(tmp_path / "latin.txt"), tokenizer=str(folder))
    with open(tmp_path / "large.txt", "wb") as file:
        file.truncate(tokenize.LARGEST_DOCUMENT + 1)
    with pytest.raises(DataError, match=r"large\.txt is one document") as caught:
        prepare(str(tmp_path / "large.txt"), tokenizer=str(folder))
    assert "JSON lines" in caught.value.fix
