"""The root: the same under every split of a state, and another for any other state."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.checkpoint import root
from shardwise.checkpoint.manifest import TensorEntry
from shardwise.data.ledger import KEPT_AS
from shardwise.regions import Region, inside, whole

ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Rows of one tile, of several, of several dims, and of none; the last dim alone, or with the ones before it.
SHAPES = st.one_of(
    st.lists(st.integers(1, 7), max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1000, 3100)),
    st.tuples(st.integers(1, 3), st.integers(500, 520), st.integers(1, 3)),
    st.tuples(st.integers(1000, 70_000)),
)


@st.composite
def tensors(draw: st.DrawFn, fewest: int = 1) -> np.ndarray:
    shape = tuple(draw(SHAPES))
    assume(math.prod(shape) >= fewest)
    item = draw(st.sampled_from(sorted(ITEMS)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Whole numbers of few values are as likely as bits of any kind: zeros are what is lost most easily.
    most = draw(st.sampled_from([2, 256, 2 ** (8 * item)]))
    return random.integers(0, most, size=shape, dtype=ITEMS[item], endpoint=False)


def of(values: np.ndarray, region: Region | None = None) -> str:
    region = region or whole(values.shape)
    held = np.ascontiguousarray(values[inside(region, whole(values.shape))])
    return root.region_sum(held.tobytes(), values.itemsize, values.shape, region)


def partition(draw: st.DrawFn, region: Region) -> list[Region]:
    """Rectangles that make up a region, by cutting again and again."""
    dims = [dim for dim, size in enumerate(region.shape) if size > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        return [region]
    dim = draw(st.sampled_from(dims))
    size = draw(st.integers(0, region.shape[dim]))  # a part may be empty
    left, right = list(region.shape), list(region.shape)
    left[dim], right[dim] = size, region.shape[dim] - size
    start = list(region.offsets)
    start[dim] += size
    parts = [Region(region.offsets, tuple(left)), Region(tuple(start), tuple(right))]
    return [one for part in parts for one in (partition(draw, part) if part.numel else [part])]


@given(st.data(), tensors())
@settings(max_examples=150, deadline=None)
def test_the_sums_of_any_rectangles_that_make_up_a_tensor_add_up_to_its_own(data: Any, values: np.ndarray) -> None:
    parts = partition(data.draw, whole(values.shape)) if values.ndim else [whole(())]
    assert root.added(of(values, part) for part in data.draw(st.permutations(parts))) == of(values)


@given(st.data(), tensors())
@settings(max_examples=150, deadline=None)
def test_one_flipped_bit_changes_both_lanes(data: Any, values: np.ndarray) -> None:
    before = root.lanes_of(of(values))
    flat = values.reshape(-1)
    at = data.draw(st.integers(0, flat.size - 1))
    flat[at] ^= flat.dtype.type(1 << data.draw(st.integers(0, 8 * values.itemsize - 1)))
    after = root.lanes_of(of(flat.reshape(values.shape)))
    assert all(old != new for old, new in zip(before, after, strict=True))


@given(st.data(), tensors(fewest=2))
@settings(max_examples=150, deadline=None)
def test_two_elements_that_change_places_change_the_sum(data: Any, values: np.ndarray) -> None:
    before = of(values)
    flat = values.reshape(-1)
    one, other = data.draw(st.lists(st.integers(0, flat.size - 1), min_size=2, max_size=2, unique=True))
    # Signs that change places are the hardest: they differ in the highest bit alone.
    flat[other] = flat[one] ^ flat.dtype.type(1 << data.draw(st.integers(0, 8 * values.itemsize - 1)))
    before = of(flat.reshape(values.shape))
    flat[[one, other]] = flat[[other, one]]
    assert of(flat.reshape(values.shape)) != before


@pytest.mark.parametrize("shape", [(8, 8), (4, 2048), (64, 3, 3), (9000,)])
def test_blocks_that_change_places_change_the_sum(shape: tuple[int, ...]) -> None:
    """Whole rows and columns, a turn by one, an exchange in two rows that keeps every row's and column's own sum."""
    values = np.random.default_rng(0).integers(0, 2**32, size=shape, dtype=np.uint32)
    others = [np.roll(values, 1), np.roll(values.reshape(-1), 1024).reshape(shape), values[::-1].copy()]
    others += [np.roll(values, 1, axis=dim) for dim in range(len(shape))]
    crossed = values.copy().reshape(-1, shape[-1])
    if len(crossed) > 1:
        crossed[0, 0], crossed[0, 1], crossed[1, 0], crossed[1, 1] = 5, 9, 9, 5
        others.append(crossed.reshape(shape))
        turned = crossed.copy()
        turned[0, 0], turned[0, 1], turned[1, 0], turned[1, 1] = 9, 5, 5, 9
        others.append(turned.reshape(shape))
    different = {other.tobytes(): other for other in (values, *others)}
    assert len(different) > 3
    assert len({of(other) for other in different.values()}) == len(different)


def test_the_sum_is_the_one_that_is_written_down() -> None:
    """Word by word in Python's whole numbers; and a value, so that roots of old checkpoints stay comparable."""
    values = (np.arange(3 * 1500, dtype=np.uint64) ** 3).astype(np.uint32).reshape(3, 1500)
    weights = root._tile_weights().astype(int).tolist()
    assert {len(set(lane)) for lane in zip(*weights, strict=True)} == {1024}
    assert all(weight % 2 and weight < 2**12 for pair in weights for weight in pair)
    expected = [0, 0]
    for row, words in enumerate(values.view(np.int32).tolist()):
        for column, word in enumerate(words):
            for lane in range(2):
                odd = mixed((row * 2 + column // 1024) * root._GOLDEN + int(root._LANE_SEEDS[lane])) | 1
                expected[lane] += word * weights[column % 1024][lane] * odd
    assert root.lanes_of(of(values)) == tuple(lane % 2**64 for lane in expected)
    assert of(values) == GOLDEN


GOLDEN = "bc20b41ca7cef1f47c2fc63c27a23eac"


def mixed(number: int) -> int:
    number %= 2**64
    number = (number ^ (number >> 30)) * root._FIRST % 2**64
    number = (number ^ (number >> 27)) * root._SECOND % 2**64
    return number ^ (number >> 31)


@given(st.lists(st.integers(0, 2**128 - 1), max_size=5), st.integers(0, 9))
def test_sums_are_spelled_added_and_taken_several_times(values: list[int], times: int) -> None:
    spelled = [f"{value:032x}" for value in values]
    assert [root.spelled(root.lanes_of(value)) for value in spelled] == spelled
    for value in spelled:
        assert root.scaled(value, times) == root.added([value] * times)


# ---------------------------------------------------------------- the digest over all of them


def entry(name: str, sum_: str = "ab" * 16, **more: Any) -> TensorEntry:
    return TensorEntry(**{"name": name, "dtype": "F32", "shape": (2, 3), "chunks": (), "sum": sum_, **more})


TENSORS = [entry("model/a"), entry("model/b", "cd" * 16), entry("optimizer/state/a/exp_avg")]
STATE = {
    "optimizer": {
        "kind": "AdamW",
        "groups": [{"params": ["a", "b"], "settings": {"lr": 0.1}}],
        "state": {"a": {"exp_avg": {"$tensor": "optimizer/state/a/exp_avg", "device": "cpu"}}},
    },
    "data": {"position": 48},
    KEPT_AS: {"segments": [[1, 1, 2, 0, 8, 4, ""]]},
}


def test_what_a_split_changes_is_not_in_the_root() -> None:
    expected = root.root_of(3, TENSORS, STATE)
    assert len(expected) == 32
    optimizer = {
        "state": {"a": {"exp_avg": {"device": "cuda", "$tensor": "optimizer/state/a/exp_avg"}}},
        "groups": [{"settings": {"lr": 0.1}, "params": ["b", "a"]}],
        "kind": "AdamW",
    }
    others = {"rng": {"torch": 1}, KEPT_AS: {"segments": []}, "data": {"position": 48}}
    own = [entry("rng/rank-00000/torch"), entry("own/rank-00001/model/mean")]
    assert root.root_of(3, [*own, *reversed(TENSORS)], {**others, "optimizer": optimizer}) == expected


def test_anything_else_is() -> None:
    roots = [
        root.root_of(3, TENSORS, STATE),
        root.root_of(4, TENSORS, STATE),
        root.root_of(3, TENSORS[1:], STATE),
        root.root_of(3, TENSORS, {**STATE, "data": {"position": 49}}),
        root.root_of(3, TENSORS, {**STATE, "state/best": 1.5}),
    ]
    changes: list[dict[str, Any]] = [{"sum": "0" * 32}, {"dtype": "I32"}, {"shape": (3, 2)}, {"name": "model/c"}]
    roots += [root.root_of(3, [replace(TENSORS[0], **change), *TENSORS[1:]], STATE) for change in changes]
    assert len(set(roots)) == len(roots)


def test_without_every_sum_there_is_no_root() -> None:
    assert root.root_of(3, [*TENSORS, entry("model/c", "")], STATE) == ""
