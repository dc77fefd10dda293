"""A resume proof: where it begins, what counts as recorded, and that no difference passes."""

import math

import pytest
from msgspec.structs import replace

from shardwise.checkpoint.proof import Proof, Span, Told, choose, compare, recorded
from shardwise.checkpoint.retention import Committed
from shardwise.errors import RecipeError
from shardwise.events.values import Step
from tests.unit.test_checkpoint_format import manifest


def saved(step: int, root: str = "", **changes: object) -> Committed:
    return Committed(f"step-{step}", replace(manifest(step), root=root, **changes))


def told(*steps: int) -> dict[int, Told]:
    return {step: Told(step, step / 7, step / 3) for step in steps}


def stepped(step: int, loss: float) -> Step:
    return Step(step=step, steps=9, loss=loss, grad_norm=1.0, lr=1.0, samples=step, tokens=None, step_seconds=0.1)


def test_of_a_step_that_was_made_again_the_last_word_counts() -> None:
    found = recorded([[stepped(1, 5.0), stepped(2, 4.0)], [stepped(2, 4.5), stepped(3, 3.0)]])
    assert {step: one.loss for step, one in found.items()} == {1: 5.0, 2: 4.5, 3: 3.0}


def test_by_default_it_goes_from_the_last_but_one_to_the_newest() -> None:
    items = [saved(30), saved(20), saved(10)]
    span = choose(items, told(*range(1, 31)), begin=None, steps=None)
    assert (span.first.manifest.step, span.until, span.last) == (20, 30, items[0])
    fewer = choose(items, told(*range(1, 31)), begin=10, steps=4)
    assert (fewer.first.manifest.step, fewer.until, fewer.last) == (10, 14, None)


def test_without_anything_to_compare_with_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="no checkpoint of step 11"):
        choose([saved(10)], told(11), begin=11, steps=None)
    with pytest.raises(RecipeError, match="no checkpoint of the run"):
        choose([saved(10)], told(9, 10), begin=None, steps=None)


SPAN = Span(saved(1, "a"), 4, saved(4, "b"))


def proof_of(replayed: dict[int, Told], root: str = "b") -> Proof:
    return compare(SPAN, told(1, 2, 3, 4), replayed, replace(manifest(4), root=root))


def test_the_same_to_the_bit_is_a_proof() -> None:
    found = proof_of(told(2, 3, 4))
    assert found.same and (found.steps, found.roots) == (3, ("b", "b"))


@pytest.mark.parametrize(
    ("step", "changes", "word"),
    [
        (3, {"loss": math.nextafter(3 / 7, 1)}, "loss"),
        (2, {"grad_norm": math.nextafter(2 / 3, 1)}, "norm"),
        (4, {"loss": math.nan}, "loss"),
    ],
)
def test_one_bit_of_a_loss_or_a_norm_is_a_difference(step: int, changes: dict[str, float], word: str) -> None:
    replayed = told(2, 3, 4)
    replayed[step] = replace(replayed[step], **changes)
    found = proof_of(replayed)
    assert not found.same and found.step == step and word in found.what


def test_a_step_too_few_and_another_root_are_differences() -> None:
    assert proof_of(told(2, 3)).step == 4
    other = proof_of(told(2, 3, 4), root="c")
    assert not other.same and "root" in other.what and other.roots == ("b", "c")
