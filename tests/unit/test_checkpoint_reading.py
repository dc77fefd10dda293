"""A file is read once: every wanted chunk gets its bytes, whatever the pieces, and every flipped byte is seen."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import reading
from shardwise.checkpoint.manifest import Chunk, Damaged, FileEntry, digest_of
from shardwise.checkpoint.reading import Wanted, read_file
from tests.unit.test_checkpoint_store import MemoryStore

CONTENT = bytes(range(97))


def stored(content: bytes = CONTENT) -> MemoryStore:
    store = MemoryStore()
    store.values["s/f"] = content
    return store


def wanted(start: int, size: int, seen: dict[int, bytes], content: bytes = CONTENT) -> Wanted:
    chunk = Chunk("f", start, size, (0,), (size,), digest_of(content[start : start + size]))
    memory = memoryview(bytearray(size))
    return Wanted(chunk, lambda: memory, lambda data: seen.__setitem__(start, bytes(data)))


ENTRY = FileEntry("f", len(CONTENT), digest_of(CONTENT))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 120), st.booleans())
def test_every_wanted_chunk_gets_its_bytes(data: st.DataObject, piece: int, whole: bool) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(CONTENT)), min_size=2, max_size=6)))
    spans = data.draw(st.permutations([(a, b - a) for a, b in pairwise(cuts)]))
    seen: dict[int, bytes] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece)
        read_file(stored(), "s", ENTRY, [wanted(start, size, seen) for start, size in spans], whole=whole)
    assert seen == {start: CONTENT[start : start + size] for start, size in spans}


@pytest.mark.parametrize("piece", [1, 7, 97, 200])
def test_every_flipped_byte_and_every_cut_of_a_whole_file_is_refused(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    for position in range(len(CONTENT)):
        flipped = bytearray(CONTENT)
        flipped[position] ^= 1
        for damaged in (bytes(flipped), CONTENT[:position], CONTENT + CONTENT[: position + 1]):
            with pytest.raises(Damaged):
                read_file(stored(damaged), "s", ENTRY, [], whole=True)


def test_a_chunk_is_held_against_its_own_digest_and_nothing_is_done_with_a_wrong_one() -> None:
    for position in range(10, 20):
        flipped = bytearray(CONTENT)
        flipped[position] ^= 1
        entry = FileEntry("f", len(CONTENT), digest_of(bytes(flipped)))
        for whole in (True, False):
            seen: dict[int, bytes] = {}
            with pytest.raises(Damaged, match="chunk at byte 10"):
                read_file(stored(bytes(flipped)), "s", entry, [wanted(10, 10, seen)], whole=whole)
            assert seen == {}


def test_a_chunk_beyond_the_end_is_refused_and_one_without_bytes_needs_none() -> None:
    seen: dict[int, bytes] = {}
    end = len(CONTENT)
    for whole in (True, False):
        read_file(stored(), "s", ENTRY, [wanted(end, 0, seen), wanted(3, 0, seen)], whole=whole)
        with pytest.raises(Damaged):
            beyond = wanted(end - 2, 2, {})
            read_file(
                stored(), "s", ENTRY, [beyond._replace(chunk=Chunk("f", end + 1, 2, (0,), (2,), ""))], whole=whole
            )
    assert seen == {end: b"", 3: b""}


def test_a_file_that_is_gone_is_damage() -> None:
    for whole in (True, False):
        with pytest.raises(Damaged, match="not there"):
            read_file(MemoryStore(), "s", ENTRY, [wanted(0, 4, {})], whole=whole)
