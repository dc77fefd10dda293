"""Conversations into tokens: what is learned, what is refused, and how rows are made of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import conversations
from shardwise.data.chat import SEPARATOR, Rows
from shardwise.data.chat import tokenizer as chat_tokenizer
from shardwise.data.chat_data import ChatData
from shardwise.data.coder import BadRow
from shardwise.data.token_file import TokenFile, prepare, prepare_as
from shardwise.data.tokenize import Coding
from shardwise.data.tokens import IGNORED
from shardwise.errors import DataError, RecipeError
from shardwise.inputs.recipe import from_keys
from tests import chats

LENGTH = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    root = tmp_path_factory.mktemp("chat")
    path = chats.write_rows(root / "chat.jsonl")
    return prepare_as(Coding(str(folder), chat=True), str(path), "messages", cache=root / "cache")


def in_words(coder: Rows, tokens: np.ndarray) -> list[str]:
    """The learned tokens of each stretch, as text."""
    counted = np.flatnonzero(np.diff(np.r_[0, tokens & 1, 0]))
    return [coder.loaded().decode(tokens[a:b] >> 1) for a, b in zip(counted[::2], counted[1::2], strict=True)]


def test_the_assistants_turns_are_learned_by_marks_and_by_prefixes_alike(folder: Path) -> None:
    by_prefixes = Rows(str(folder), chats.PLAIN, "messages")
    by_marks = Rows(str(folder), chats.MARKED, "messages")
    assert by_marks.marks and not by_prefixes.marks
    for row in chats.rows()[:12]:
        tokens = by_prefixes(row)
        np.testing.assert_array_equal(by_marks(row), tokens)
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert in_words(by_prefixes, tokens) == [f"{one}<|end|>" for one in said]


class Table:
    """As a `datasets` object is read: by number, rows as mappings."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, object]:
        return self.rows[at]


def test_rows_in_memory_are_those_of_a_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"line {at}"} for at in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [prepare(source, tokenizer=str(folder)) for source in (str(tmp_path / "a.jsonl"), rows, Table(rows))]
    assert made[1] == made[2] and made[0].header.tokens == made[1].header.tokens
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 1
    with pytest.raises(DataError, match="Row 1 is no row of JSON") as caught:
        prepare([rows[0], {"image": object()}], tokenizer=str(folder))
    assert "leave other columns out" in caught.value.fix


BAD = [
    ('{"text": "no chat"}', "messages_key = 'messages' is missing; its keys: text"),
    ('{"messages": []}', "is empty"),
    ('{"messages": "hello"}', "is a str"),
    ('{"messages": [{"content": "?"}]}', "message 1 has no role"),
    ('{"messages": [{"role": "user"}]}', "message 1 (user) has no content"),
    ('{"messages": [{"role": "user", "content": "?"}]}', "nothing to learn"),
    ('{"messages": [{"role": "assistant", "content": "!"}]}', "begins with the assistant"),
]


def test_a_row_that_is_no_conversation_is_named_with_its_file_and_line(folder: Path, tmp_path: Path) -> None:
    good, (bad, said) = json.dumps(chats.rows()[0]), BAD[0]
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{bad}\n{good}\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3 has no conversation") as caught:
        prepare_as(Coding(str(folder), chat=True), str(tmp_path / "a.jsonl"), "messages", cache=tmp_path / "cache")
    assert said in caught.value.why and "data.messages_key" in caught.value.fix
    (tmp_path / "b.txt").write_text(good)
    with pytest.raises(DataError, match=r"b\.txt is no file of JSON lines"):
        prepare_as(Coding(str(folder), chat=True), str(tmp_path / "b.txt"), "messages", cache=tmp_path / "cache")


@pytest.mark.parametrize(("line", "said"), BAD)
def test_what_is_no_conversation_is_said(folder: Path, line: str, said: str) -> None:
    with pytest.raises(BadRow) as caught:
        Rows(str(folder), chats.PLAIN, "messages")(json.loads(line))
    assert said in caught.value.why and caught.value.fix


def test_a_template_whose_earlier_turns_change_is_refused(folder: Path) -> None:
    """As templates do that leave earlier reasoning out once an answer follows."""
    forgets = "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else '' }}<|end|>{% endfor %}"
    with pytest.raises(BadRow, match="otherwise once more follows"):
        Rows(str(folder), forgets, "messages")(chats.rows()[0])


def test_what_a_template_refuses_is_a_rows_fault(folder: Path) -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRow, match="roles must alternate"):
        Rows(str(folder), strict, "messages")(chats.rows()[0])


def test_a_template_that_is_absent_is_an_error_whose_fix_is_a_file(folder: Path, tmp_path: Path) -> None:
    bare = chats.write_tokenizer(tmp_path / "bare", None)
    with pytest.raises(DataError, match="no chat template") as caught:
        chat_tokenizer(str(bare), "", "messages")
    assert "data.chat_template" in caught.value.fix
    (tmp_path / "template.jinja").write_text(chats.PLAIN)
    given = chat_tokenizer(str(bare), str(tmp_path / "template.jinja"), "messages")
    assert given.name == chat_tokenizer(str(folder), "", "messages").name
    with pytest.raises(DataError, match="own tokenizer"):
        chat_tokenizer("bytes", "", "messages")


def counted_of(data: ChatData) -> int:
    return sum(int((data[i]["labels"] != IGNORED).sum()) for i in range(len(data)))


def test_each_learned_token_is_in_one_row_packed_or_not(made: TokenFile) -> None:
    stream = conversations.stream(made)
    learned = int((stream[stream != SEPARATOR] & 1).sum())
    for packing in (True, False):
        data = ChatData.of(made, sequence_length=LENGTH, packing=packing, valid_fraction=0.1)
        assert counted_of(data.train) + counted_of(data.valid) == learned
    assert made.header.documents == len(chats.rows())


def test_a_packed_row_counts_positions_anew_in_each_document_and_a_label_never_crosses(made: TokenFile) -> None:
    data = ChatData.of(made, sequence_length=LENGTH, valid_fraction=0)
    ends = np.flatnonzero(conversations.stream(made) == SEPARATOR)
    end_of_text = int(conversations.stream(made)[ends[0] - 1]) >> 1
    several = 0
    for i in range(len(data)):
        row = {key: value.numpy() for key, value in data[i].items()}
        begins = np.flatnonzero(row["position_ids"] == 0)
        several += len(begins) > 2
        np.testing.assert_array_equal(row["position_ids"], np.arange(LENGTH) - np.maximum.accumulate(
            np.where(row["position_ids"] == 0, np.arange(LENGTH), 0)))  # fmt: skip
        # What comes right before a beginning is answered by its own document's last token, which ends a turn.
        before = row["labels"][begins[1:] - 1]
        assert set(before.tolist()) <= {end_of_text, IGNORED}
    assert several


def test_a_batch_that_is_not_packed_is_as_long_as_its_longest_conversation(made: TokenFile) -> None:
    data = ChatData.of(made, sequence_length=LENGTH, packing=False, valid_fraction=0, group=8)
    widths = []
    for step in range(len(data) // 8):
        samples = data.order(np.arange(step * 8, step * 8 + 8), 3, True)
        lengths = data.documents.lengths[samples]
        batch = data.fetch(samples, (), 2)
        widths.append(batch["tokens"].shape[1])
        assert lengths.max() <= widths[-1] < lengths.max() + 8
        assert (batch["labels"][-2:] == IGNORED).all() and "position_ids" not in batch
    # Groups of a length: less padding than the longest one everywhere.
    assert sum(widths) < 0.7 * len(widths) * max(widths)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_in_groups_reads_each_sample_once_and_neighbours_together(
    n: int, group: int, seed: int, epoch: int
) -> None:
    places = conversations.grouped(np.arange(n), n, group, seed, epoch)
    assert sorted(places.tolist()) == list(range(n))
    for at in range(0, n - n % group, group):
        np.testing.assert_array_equal(np.diff(places[at : at + group]), 1)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 50))
def test_packs_hold_each_document_once_and_none_could_be_joined(lengths: list[int], room: int) -> None:
    packs = conversations.packed(np.array(lengths), room)
    assert sorted(packs.order.tolist()) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in packs.order[a:b]) for a, b in zip(packs.offsets, packs.offsets[1:], strict=False)]
    assert max(sizes) <= room
    smallest = sorted(sizes)[:2]
    assert len(sizes) == 1 or sum(smallest) > room


def test_conversations_that_are_too_long_are_refused_left_out_or_cut_as_asked(made: TokenFile) -> None:
    lengths = conversations.read(made).lengths
    short = int(np.median(lengths))
    with pytest.raises(DataError, match=f"longer than sequence_length = {short}") as caught:
        ChatData.of(made, sequence_length=short)
    longest = int(caught.value.fix.split()[2].rstrip(","))
    whole = ChatData.of(made, sequence_length=longest, valid_fraction=0)
    assert len(whole.documents.starts) == len(lengths)
    left = ChatData.of(made, sequence_length=short, too_long="leave_out", valid_fraction=0)
    assert len(left.documents.starts) == int((lengths <= short).sum())
    cut = ChatData.of(made, sequence_length=short, too_long="cut", valid_fraction=0)
    assert int((lengths <= short).sum()) < len(cut.documents.starts) <= len(lengths)
    assert cut.documents.lengths.max() == short


def test_packing_without_a_model_that_goes_by_positions_is_an_error_whose_fix_is_accepted() -> None:
    keys = {"model": {"preset": "decoder-2m"}, "data": {"chat": ["a.jsonl"]}, "batch": {"global_batch": 2},
            "train": {"steps": 1}}  # fmt: skip
    with pytest.raises(RecipeError, match="packing") as caught:
        from_keys(keys)
    assert caught.value.fix.startswith("data.packing = false")
    assert not from_keys({**keys, "data": {"chat": ["a.jsonl"], "packing": False}}).data.packing
