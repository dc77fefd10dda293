"""The format: values and tensors round-trip bit for bit, every flipped bit is seen, nothing is pickled."""

import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise.checkpoint
from shardwise.checkpoint.files import Content, write_file
from shardwise.checkpoint.manifest import Damaged, Machine, Manifest, read_chunk, seal, unseal, verify_file
from shardwise.checkpoint.packing import pack, references, unpack
from shardwise.checkpoint.regions import DTYPES, from_bytes, to_bytes
from shardwise.errors import CheckpointError
from shardwise.regions import whole
from tests.unit.test_checkpoint_store import MemoryStore

KEYS = st.text(max_size=4) | st.sampled_from(["$tuple", "$tensor", "$dict", "a/b"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.integers() | st.booleans() | st.tuples(st.integers()), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


def exact(value: Any) -> Any:
    """A value in which floats are compared by their bits (all NaNs count as one) and types by name."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("d", value))
    if isinstance(value, dict):
        return (type(value).__name__, [(exact(key), exact(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [exact(item) for item in value])
    return (type(value).__name__, value)


def through_json(packed: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(packed))


@given(VALUES)
def test_every_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    packed = through_json(pack(value, "v", {}))
    assert exact(unpack(packed, {}.__getitem__)) == exact(value)


def test_tensors_are_named_by_where_they_stand_and_not_copied() -> None:
    first, second = torch.ones(2), torch.zeros(())
    tensors: dict[str, torch.Tensor] = {}
    packed = through_json(pack({"a": [first, 1], "b": {"c": (second,)}}, "state/ema", tensors))
    assert tensors == {"state/ema/a/0": first, "state/ema/b/c/0": second}
    assert {reference.name for reference in references(packed)} == set(tensors)
    back = unpack(packed, tensors.__getitem__)
    assert back["a"][0] is first
    assert back["b"]["c"][0] is second


def test_a_counter_stays_a_counter() -> None:
    assert type(unpack(through_json(pack(Counter([3, 3]), "v", {})), {}.__getitem__)) is Counter


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", np.zeros(2), torch.float32, lambda: 0, 1j])
def test_anything_else_is_an_error_that_names_the_key(value: Any) -> None:
    with pytest.raises(CheckpointError, match="state/ema/deep/1"):
        pack({"deep": [0, value]}, "state/ema", {})


def test_two_tensors_of_one_name_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="a/b"):
        pack({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "x", {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_round_trips_bit_for_bit_and_other_readers_agree(dtype: str) -> None:
    raw = torch.arange(3 * 4 * 8, dtype=torch.uint8)
    tensor = (raw % 2).bool().view(4, 24) if dtype == "BOOL" else raw.view(DTYPES[dtype]).view(4, -1)
    awkward = tensor.t()
    store = MemoryStore()
    content = Content("t", dtype, tuple(awkward.shape), whole(awkward.shape), lambda: to_bytes(awkward))
    written = write_file(store, "step", "f", [content])
    (entry,) = written.tensors
    (chunk,) = entry.chunks
    back = from_bytes(read_chunk(store, "step", chunk), dtype, chunk.shape)
    theirs = safetensors.torch.load(store.values["step/f"])["t"]
    for other in (back, theirs):
        assert other.dtype == awkward.dtype
        assert torch.equal(other.contiguous().view(torch.uint8), awkward.contiguous().view(torch.uint8))


@given(st.dictionaries(st.text(max_size=6), st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_a_file_holds_each_tensor_where_the_manifest_says(shapes: dict[str, list[int]]) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    store = MemoryStore()
    contents = [
        Content(name, "F32", tuple(tensor.shape), whole(tensor.shape), lambda tensor=tensor: to_bytes(tensor))
        for name, tensor in tensors.items()
    ]
    written = write_file(store, "s", "f", contents)
    verify_file(store, "s", written.file)
    assert written.file.bytes == len(store.values["s/f"])
    assert sorted(entry.name for entry in written.tensors) == sorted(tensors)
    for entry in written.tensors:
        data = read_chunk(store, "s", entry.chunks[0])
        assert torch.equal(from_bytes(data, "F32", entry.shape), tensors[entry.name])


def manifest(step: int = 3) -> Manifest:
    return Manifest(
        step=step, created=1.5, why="test", world=1, lineage="run", plan_digest="", decision={"zero": 0},
        samples=7,
        machine=Machine({"torch": "2"}, 1, "AVX2"), files=(), tensors=(), aliases={"model/b": "model/a"},
        state={"data": {"position": 3}}, state_by_rank={"rng": ({"x": 1.5}, None)},
    )  # fmt: skip


def test_a_manifest_comes_back_from_its_seal() -> None:
    assert unseal(seal(manifest()), "m") == manifest()


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_refused() -> None:
    raw = seal(manifest())
    for position in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            with pytest.raises(Damaged):
                unseal(bytes(flipped), "m")
        with pytest.raises(Damaged):
            unseal(raw[:position], "m")


def test_every_flipped_byte_and_every_cut_of_a_file_is_refused() -> None:
    tensor = torch.arange(6.0)
    store = MemoryStore()
    content = Content("t", "F32", (6,), whole((6,)), lambda: to_bytes(tensor))
    written = write_file(store, "s", "f", [content])
    whole_file = store.values["s/f"]
    for position in range(len(whole_file)):
        flipped = bytearray(whole_file)
        flipped[position] ^= 1
        store.values["s/f"] = bytes(flipped)
        with pytest.raises(Damaged):
            verify_file(store, "s", written.file)
        for damaged in (whole_file[:position], whole_file + whole_file[: position + 1]):
            store.values["s/f"] = damaged
            with pytest.raises(Damaged):
                verify_file(store, "s", written.file)
    del store.values["s/f"]
    with pytest.raises(Damaged, match="not there"):
        verify_file(store, "s", written.file)


def test_a_chunk_is_checked_again_by_the_rank_that_uses_it() -> None:
    tensor = torch.arange(6.0)
    store = MemoryStore()
    content = Content("t", "F32", (6,), whole((6,)), lambda: to_bytes(tensor))
    (chunk,) = write_file(store, "s", "f", [content]).tensors[0].chunks
    for position in range(chunk.start, chunk.start + chunk.bytes):
        flipped = bytearray(store.values["s/f"])
        flipped[position] ^= 0x80
        other = MemoryStore()
        other.values["s/f"] = bytes(flipped)
        with pytest.raises(Damaged):
            read_chunk(other, "s", chunk)


def test_nothing_here_reads_or_writes_a_pickle() -> None:
    banned = (
        "pickle",
        "torch.load",
        "torch.save",
        "gather_object",
        "object_list",
        "marshal",
        "shelve",
        "dill",
        "eval(",
    )
    for path in Path(shardwise.checkpoint.__file__).parent.glob("*.py"):
        lines = path.read_text().splitlines()
        code = [line for line in lines if "never a pickle" not in line and "nothing is pickled" not in line]
        found = [(path.name, line) for line in code for word in banned if word in line.replace("without pickle", "")]
        assert found == []
