"""Guards without ranks: fingerprints of bits, families of what is shared, and the fault that is named first."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.plan.mesh import MeshShape
from shardwise.resilience.guards import (
    Guards,
    Seen,
    difference,
    differing,
    families,
    fault_of,
    fingerprints,
    hashed,
    parts_of,
    summed_bits,
    ties_of,
    untied_names,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex128]
BOTH = pytest.mark.parametrize("of", [hashed, lambda t: int(summed_bits(t))], ids=["hashed", "summed"])


def numbers(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits, NaN and infinity among them."""
    width = torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (size * width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097, 3 * 4096 + 11])
def test_a_fingerprint_is_of_the_bits(of: Any, dtype: torch.dtype, size: int) -> None:
    tensor = numbers(size, dtype)
    before = of(tensor)
    assert -(2**63) <= before < 2**63
    assert of(tensor.clone()) == before
    raw = tensor.view(torch.uint8)
    for at in {0, len(raw) // 2, len(raw) - 1}:
        raw[at] ^= 1
        assert of(tensor) != before, f"byte {at}"
        raw[at] ^= 1
    assert of(tensor) == before


@BOTH
def test_a_fingerprint_knows_the_order(of: Any) -> None:
    tensor = numbers(3 * 4096, torch.float32)
    for left, right in [(0, 1), (0, 4096), (5, 2 * 4096 + 5), (4095, 4096)]:
        swapped = tensor.clone()
        swapped[left], swapped[right] = tensor[right], tensor[left]
        assert of(swapped) != of(tensor)


@given(st.integers(0, 2 * 4096 + 9), st.integers(0, 31))
def test_any_flipped_bit_changes_the_sum(place: int, bit: int) -> None:
    integers = torch.zeros(2 * 4096 + 10, dtype=torch.int32)
    before = int(summed_bits(integers))
    integers[place] = 1 << bit if bit < 31 else -(2**31)
    assert int(summed_bits(integers)) != before


@BOTH
def test_a_zero_and_its_negative_differ_and_a_view_is_its_values(of: Any) -> None:
    assert of(torch.zeros(3)) != of(-torch.zeros(3))
    wide = torch.randn(6, 8)
    assert of(wide[:, ::2]) == of(wide[:, ::2].contiguous())


def test_parts_carry_their_region_and_a_tie_stands_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    assert list(parts_of(module)) == ["0.weight [0:3, 0:3]", "0.bias [0:3]"]
    assert list(parts_of(module[1], {"weight": "0.weight"})) == ["0.weight [0:3, 0:3]"]
    assert fingerprints(parts_of(module[1], {"weight": "0.weight"})).items() <= fingerprints(parts_of(module)).items()


def test_families_are_what_the_same_ranks_share() -> None:
    held = [["a", "norm", "tie"], ["b", "norm"], ["tie", "c"], ["c"]]
    found = [families(parts, held) for parts in held]
    assert [sorted(each.values()) for each in found] == [[["norm"], ["tie"]], [["norm"]], [["c"], ["tie"]], [["c"]]]
    assert len({name for each in found for name in each}) == 3
    assert families(["z", "a"], [["z", "a"], ["a", "z"]]) == families(["a", "z"], [["z", "a"], ["a", "z"]])


def test_an_untied_weight_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    ties = ties_of(module)
    assert ties == [["0.weight", "2.weight"]] and untied_names(ties, module) == []
    module[2].weight = nn.Parameter(module[0].weight.detach().clone())
    assert untied_names(ties, module) == ["0.weight", "2.weight"]


MESH = MeshShape(dp_replicate=2, tp=2)
GOOD = Seen(
    bits={"f": 7}, counted={"loss": 6.0}, divided={"loss": 12.0}, alike={"gradient norm": 0.5, "loss": float("nan")}
)


def test_what_agrees_is_no_fault() -> None:
    assert fault_of([GOOD] * 4, MESH) is None and differing([GOOD] * 4) == set()
    # A pipeline: the first stage counts nothing, and divides all the same.
    first = Seen(divided={"loss": 6.0})
    last = Seen(counted={"loss": 6.0}, divided={"loss": 6.0})
    assert fault_of([first, last], MeshShape(pp=2)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"untied": ["a", "b"]}, "b is no longer tied to a on rank 2"),
        ({"gone": "a [0:2]"}, r"rank 2 no longer holds a [0:2]"),
        ({"counted": {"loss": 7.0}}, "rank 3 counted 6 for 'loss', and rank 2 7 of the same samples"),
        ({"divided": {"loss": 18.0}}, "counts 12 for 'loss', and rank 2 divided by 18"),
        ({"divided": {}}, "counts 12 for 'loss', and rank 2 divided by nan"),
        ({"alike": {"gradient norm": 0.5000001, "loss": float("nan")}}, "gradient norm is 0.5000001 on rank 2 and 0.5"),
    ],
)
def test_each_fault_is_named(change: dict[str, Any], words: str) -> None:
    from msgspec.structs import replace

    fault = fault_of([GOOD, GOOD, replace(GOOD, **change), GOOD], MESH)
    assert fault is not None and words in fault.what and fault.why and fault.fix


def test_a_count_that_tensor_parallel_ranks_add_twice_is_found() -> None:
    """All divide by the same wrong number: only what each read tells."""
    twice = Seen(counted={"loss": 6.0}, divided={"loss": 24.0})
    fault = fault_of([twice] * 4, MESH)
    assert fault is not None and "counts 12 for 'loss', and rank 0 divided by 24" in fault.what


def test_the_first_differing_tensor_its_ranks_and_the_cause_are_named() -> None:
    good = {"a [0:2]": 1, "b [0:2]": 2, "c [0:2]": 3}
    assert difference([good] * 4, MESH) is None
    one = difference([good, good, good, {**good, "b [0:2]": 9}], MESH)
    assert one is not None
    assert one.what == "b [0:2] has other bits on rank 3 (dp_replicate 1, tp 1) than on ranks 0, 1, 2."
    assert "flipped" in one.why
    all_of_them = difference([good, dict.fromkeys(good, 9), {}, {}], MESH)
    assert all_of_them is not None and "than on rank 0" in all_of_them.what
    assert "3 of the 3" in all_of_them.why and "not summed over the ranks along tp," in all_of_them.why


def test_one_process_passes_and_is_not_asked_more_often_than_it_wants() -> None:
    module = nn.Linear(2, 2)
    guards = Guards(module, MeshShape(), every_steps=3)
    assert [step for step in range(1, 10) if guards.due(step)] == [3, 6, 9]
    assert not Guards(module, MeshShape(), every_steps=0).due(3)
    guards.check(3, counted={"loss": 2.0}, divided={"loss": 2.0}, alike={"gradient norm": 1.0})
    assert guards.passed == 3
