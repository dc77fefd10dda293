"""Regions: parts tile the tensor as torch cuts it, overlaps are intersections, and writers share the load."""

import math
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from shardwise.checkpoint.layout import alike, disagreeing, shares, spread
from shardwise.regions import Region, Split, doubled, inside, is_grid, missing, overlap, part, whole

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


def points(region: Region) -> set[tuple[int, ...]]:
    spans = [range(begin, begin + size) for begin, size in zip(region.offsets, region.shape, strict=True)]
    return set(product(*spans))


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Region(offsets, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)))


@given(st.data(), SHAPES, st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_the_parts_of_a_mesh_tile_the_tensor_once(data: st.DataObject, shape: tuple[int, ...], mesh: list[int]) -> None:
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in mesh]
    seen: list[tuple[int, ...]] = []
    for coordinate in product(*map(range, mesh)):
        splits = [Split(*each) for each in zip(dims, mesh, coordinate, strict=True)]
        region = part(shape, splits)
        assert region.numel == len(points(region))
        seen += points(region)
    assert len(seen) == len(set(seen)) == math.prod(shape)


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_dim_is_cut_as_torch_cuts_it(size: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))
    for which, chunk in enumerate(chunks):
        region = part((size,), [Split(0, parts, which)])
        assert [point for (point,) in sorted(points(region))] == chunk
        local, offset = Shard.local_shard_size_and_offset(size, parts, which)
        assert region.shape == (local,)
        assert local == 0 or region.offsets == (offset,)


@given(st.data(), SHAPES)
def test_an_overlap_is_the_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    left, right = data.draw(regions(shape)), data.draw(regions(shape))
    shared = overlap(left, right)
    assert (points(shared) if shared else set()) == points(left) & points(right)
    if shared:
        tensor = torch.arange(math.prod(shape)).reshape(shape)
        held = tensor[inside(right, whole(shape))]
        assert torch.equal(held[inside(shared, right)], tensor[inside(shared, whole(shape))])


def test_a_scalar_overlaps_itself() -> None:
    assert overlap(whole(()), whole(())) == Region((), ())
    assert whole(()).numel == 1


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 5))
def test_writers_differ_by_no_more_than_the_largest_item(sizes: list[int], writers: int) -> None:
    owners = spread(sizes, writers)
    load = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == w) for w in range(writers)]
    assert len(owners) == len(sizes)
    assert max(load) - min(load) <= max(sizes, default=0)


@given(st.data(), SHAPES, st.lists(st.integers(1, 4), min_size=1, max_size=2))
def test_parts_are_known_to_cover_once_and_a_lost_or_doubled_one_is_named(
    data: st.DataObject, shape: tuple[int, ...], mesh: list[int]
) -> None:
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in mesh]
    coordinates = product(*map(range, mesh))
    parts = [part(shape, [Split(*each) for each in zip(dims, mesh, at, strict=True)]) for at in coordinates]
    assert doubled(parts) is None and missing(shape, parts) is None
    assert is_grid(shape, parts) or 0 in shape
    full = [region for region in parts if region.numel]
    if full:
        one = data.draw(st.sampled_from(full))
        assert missing(shape, [region for region in parts if region != one]) == one
        assert doubled([*parts, one]) == one
        assert not is_grid(shape, [*parts, one])
        assert not is_grid(shape, [region for region in parts if region != one])


@given(st.data(), SHAPES, st.integers(0, 5))
def test_doubled_and_missing_are_what_counting_points_gives(
    data: st.DataObject, shape: tuple[int, ...], count: int
) -> None:
    boxes = [data.draw(regions(shape)) for _ in range(count)]
    seen = [point for box in boxes for point in points(box)]
    twice, nowhere = doubled(boxes), missing(shape, boxes)
    assert not is_grid(shape, boxes) or (twice is None and nowhere is None)
    assert (twice is None) == (len(seen) == len(set(seen)))
    assert twice is None or all(sum(point in points(box) for box in boxes) > 1 for point in points(twice))
    assert (nowhere is None) == (points(whole(shape)) <= set(seen))
    assert nowhere is None or (points(nowhere) and not points(nowhere) & set(seen))


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 99), max_size=12), st.data())
def test_each_key_has_one_writer_among_its_holders(sizes: dict[str, int], data: st.DataObject) -> None:
    holders = {key: tuple(sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))) for key in sizes}
    held = [{key: size for key, size in sizes.items() if rank in holders[key]} for rank in range(4)]
    # A rank knows what it holds itself, and nothing else.
    known = [{key: holders[key] for key in mine} for mine in held]
    written = [shares(held[rank], known[rank], rank) for rank in range(4)]
    assert all(written[rank] <= held[rank].keys() for rank in range(4))
    assert sorted(key for mine in written for key in mine) == sorted(sizes)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_ranks_that_do_not_hold_what_others_count_on_are_named(names: dict[str, int], data: st.DataObject) -> None:
    everyone = (0, 1, 2)
    regions = {name: Region((offset,), (1,)) for name, offset in names.items()}
    told = [alike(regions, dict.fromkeys(regions, everyone)) for _ in everyone]
    assert disagreeing(told) is None
    odd, name = data.draw(st.sampled_from(everyone)), data.draw(st.sampled_from(sorted(names)))
    change = data.draw(st.sampled_from(["lost", "moved", "alone"]))
    mine = {n: region for n, region in regions.items() if n != name or change != "lost"}
    if change == "moved":
        mine[name] = Region((names[name] + 1,), (1,))
    holders = {n: (odd,) if n == name and change == "alone" else everyone for n in mine}
    told[odd] = alike(mine, holders)
    pair = disagreeing(told)
    assert pair is not None and odd in pair
