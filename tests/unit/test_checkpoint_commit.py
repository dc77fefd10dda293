"""What a commit checks: each logical element written once, one optimizer out of the ranks', equal copies."""

from typing import Any

import pytest
from msgspec.structs import replace

from shardwise.checkpoint.assembly import Copy, check_copies, check_whole, union_of
from shardwise.checkpoint.manifest import Chunk, Manifest, TensorEntry
from shardwise.errors import CheckpointError
from tests.unit.test_checkpoint_format import manifest


def entry(name: str, shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorEntry:
    held = (Chunk(f"rank-{at}", 0, 0, offsets, size, f"d{at}") for at, (offsets, size) in enumerate(chunks))
    return TensorEntry(name, "F32", shape, tuple(held))


def of(*entries: TensorEntry, **more: Any) -> Manifest:
    return replace(manifest(), tensors=entries, **{"aliases": {}, "state": {}, "state_by_rank": {}, **more})


def test_tensors_that_are_written_once_and_whole_may_be_committed() -> None:
    check_whole(of(entry("a", (4, 2), ((0, 0), (3, 2)), ((3, 0), (1, 2))), entry("s", (), ((), ()))))
    check_whole(of(entry("empty", (0, 3), ((0, 0), (0, 3)), ((0, 0), (0, 3)))))


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([((0, 0), (3, 2))], r"'a': \[3:4, 0:2\] of \[4, 2\] was written by no rank"),
        ([((0, 0), (3, 2)), ((2, 0), (2, 2))], r"'a': \[2:3, 0:2\] .* more than once, in rank-0, rank-1"),
        ([((0, 0), (4, 2)), ((0, 0), (4, 2))], r"'a': \[0:4, 0:2\] .* more than once, in rank-0, rank-1"),
        # As many values as the tensor has, and still neither once nor whole.
        ([((0, 0), (2, 2)), ((1, 0), (2, 2))], r"'a': \[1:2, 0:2\] .* more than once"),
        ([((0, 0), (4, 1)), ((1, 1), (4, 1))], r"'a': \[1:5, 1:2\] was written, which is outside its shape \[4, 2\]"),
    ],
)
def test_a_region_that_is_lost_or_doubled_is_named_with_its_tensor(chunks: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_whole(of(entry("good", (1,), ((0,), (1,))), entry("a", (4, 2), *chunks)))


def test_a_tensor_that_nobody_wrote_is_missed_by_who_names_it() -> None:
    named = {"$tensor": "optimizer/state/a/m", "device": "cpu"}
    for more in (
        {"aliases": {"model/b": "model/a"}},
        {"state": {"x": [named]}},
        {"state_by_rank": {"x": (None, named)}},
    ):
        with pytest.raises(CheckpointError, match=r"(model/a|state/a/m)'?: it was written by no rank"):
            check_whole(of(entry("good", (1,), ((0,), (1,))), **more))


def optimizer(*groups: list[str], lr: float = 0.1, step: int = 3) -> dict[str, Any]:
    named = [name for group in groups for name in group]
    settings = [{"params": group, "settings": {"lr": lr, "index": at}} for at, group in enumerate(groups)]
    return {"kind": "AdamW", "groups": settings, "state": {name: {"step": step} for name in named}}


def test_the_union_of_the_ranks_optimizers_is_the_one_of_one_process() -> None:
    whole = optimizer(["a", "b"], ["c"])
    assert union_of([whole]) == union_of([whole, whole]) == whole
    assert union_of([optimizer(["a"], ["c"]), optimizer(["b"], [])]) == {**whole, "state": union_of([whole])["state"]}


@pytest.mark.parametrize(
    "other",
    [optimizer(["b"], ["c"], ["d"]), optimizer(["b"], ["c"], lr=0.2), optimizer(["a"], [], step=4), None],
    ids=["groups", "settings", "state", "none"],
)
def test_optimizers_that_differ_are_not_put_together(other: Any) -> None:
    assert union_of([optimizer(["a"], ["c"]), other]) is None


def test_a_parameter_in_two_groups_is_not_put_together() -> None:
    assert union_of([optimizer(["a"], ["b"]), optimizer(["b"], ["a"])]) is None


def test_a_copy_with_other_bits_is_an_error_that_names_tensor_region_and_rank() -> None:
    saved = of(entry("model/e", (4,), ((0,), (2,)), ((2,), (2,))))
    check_copies(saved, [(), (Copy("model/e", (0,), (2,), "d0"), Copy("model/e", (2,), (2,), "d1"))])
    with pytest.raises(CheckpointError, match=r"'model/e' differ: \[2:4\] on rank 1"):
        check_copies(saved, [(), (Copy("model/e", (2,), (2,), "d0"),)])
