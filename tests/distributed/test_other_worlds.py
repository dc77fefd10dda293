"""A run goes on with another number of ranks, or another split, where the one before it stopped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.pool import Pool

WORK = "tests.distributed.other_worlds_work"
STEPS, SWITCH = 6, 3
# AdamW in fp64: nothing but rounding may differ, and 1e-10 leaves it a factor of 1e5 (as in test_matrix).
BOUND = 1e-10
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "replicas of 2": (2, {"zero": 0}),
    "replicas of 3": (3, {"zero": 0}),
    "zero 1 of 4": (4, {"zero": 1}),
    "zero 2 of 2": (2, {"zero": 2}),
    "zero 3 of 3": (3, {"zero": 3}),
    "zero 3 of 4": (4, {"zero": 3}),
    "tp 2": (2, {"tp": 2}),
    "pp of 3": (3, {"pp": 3, "schedule": "1f1b"}),
    "tp and zero 3": (4, {"tp": 2, "zero": 3}),
    "pp and tp": (4, {"pp": 2, "tp": 2, "schedule": "1f1b"}),
    "pp and zero 1": (4, {"pp": 2, "zero": 1, "schedule": "1f1b"}),
}
WAYS = [
    ("zero 3 of 4", "zero 2 of 2"),
    ("zero 2 of 2", "zero 3 of 3"),
    ("zero 3 of 3", "pp and tp"),
    ("pp and tp", "one process"),
    ("one process", "tp and zero 3"),
    ("tp and zero 3", "replicas of 3"),
    ("replicas of 3", "pp and zero 1"),
    ("pp and zero 1", "tp 2"),
    ("tp 2", "zero 1 of 4"),
    ("zero 1 of 4", "pp of 3"),
    ("pp of 3", "replicas of 2"),
    ("replicas of 2", "zero 3 of 4"),
    ("zero 3 of 4", "tp and zero 3"),
    ("one process", "zero 3 of 3"),
    ("zero 3 of 3", "one process"),
]


def go(pool: Pool, split: str, folder: Path, **more: Any) -> dict[str, Any]:
    world, plan = SPLITS[split]
    told = pool.run(world, f"{WORK}:run", folder=str(folder), plan=plan, steps=STEPS, **more)
    assert all(rank["losses"] == told[0]["losses"] and rank["drawn"] == told[0]["drawn"] for rank in told)
    return dict(told[0])


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return go(pool, "one process", tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def stopped(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a run that each split left after step SWITCH, made when it is first asked for."""
    made: dict[str, Path] = {}

    def get(split: str) -> Path:
        import shutil

        if split not in made:
            made[split] = tmp_path_factory.mktemp("stopped") / "run"
            go(pool, split, made[split], until=SWITCH)
        return Path(shutil.copytree(made[split], tmp_path_factory.mktemp("goes-on") / "run"))

    return get


@pytest.mark.parametrize(("before", "after"), WAYS, ids=lambda name: name)
def test_a_run_goes_on_elsewhere_with_the_losses_of_one_that_never_moved(
    pool: Pool, undisturbed: dict[str, Any], stopped: Any, before: str, after: str
) -> None:
    went = go(pool, after, stopped(before))
    assert sorted(map(int, went["losses"])) == [4, 5, 6]
    for step, values in went["losses"].items():
        np.testing.assert_allclose(values, undisturbed["losses"][step], rtol=BOUND)
    # The same samples, and what the loop's body draws from the global generators is what it would have drawn.
    assert went["samples"] == undisturbed["samples"]
    assert went["drawn"] == undisturbed["drawn"]
    assert (went["world"], went["plan"]["mesh"]["tp"]) == (SPLITS[after][0], SPLITS[after][1].get("tp", 1))
    (told,) = went["told"]
    ranks_before, ranks_after = SPLITS[before][0], SPLITS[after][0]
    if ranks_before != ranks_after:
        said = f"resumed on {ranks_after} rank{'s' if ranks_after > 1 else ''} what {ranks_before} saved: "
        assert told[0] == said + "the same losses within the bound, not the same bits"
        assert "the global generators stood alike on all ranks, and every rank goes on there" in told[1]
    assert any(line.startswith("the plan was ") for line in told)


def test_a_run_that_goes_on_as_it_was_tells_nothing_and_has_the_bits(
    pool: Pool, undisturbed: dict[str, Any], stopped: Any
) -> None:
    went = go(pool, "one process", stopped("one process"))
    assert [line for line in went["told"][0] if not line.startswith("the code's revision changed")] == []
    assert went["losses"] == {step: undisturbed["losses"][step] for step in ("4", "5", "6")}
    assert went["root"] == undisturbed["root"]


def test_a_stream_goes_on_with_its_own_number_of_ranks_alone_and_says_why(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, f"{WORK}:of_a_stream", folder=str(tmp_path), steps=4) == ["trained on 2"] * 2
    (said, *others) = pool.run(3, f"{WORK}:of_a_stream", folder=str(tmp_path), steps=4)
    assert all(other == said for other in others)
    assert said.startswith("unchanged The Stream cannot go on at the sample where it was stopped.")
    assert "stopped on 2 ranks, it is to go on with 3" in said
    assert pool.run(2, f"{WORK}:of_a_stream", folder=str(tmp_path), steps=4) == ["trained on 2"] * 2


@pytest.mark.parametrize("split", ["zero 3 of 3", "pp and zero 1"])
def test_what_a_trainer_reaches_and_does_not_keep_is_refused_before_it_trains(
    pool: Pool, tmp_path: Path, split: str
) -> None:
    world, plan = SPLITS[split]
    for state, expected in (("none", ["loss.average is a", "loss.teacher is a"]), ("some", ["loss.teacher is a"])):
        (said, *others) = pool.run(world, f"{WORK}:incomplete", folder=str(tmp_path / state), plan=plan, state=state)
        assert all(other == said for other in others)
        assert said.startswith("A checkpoint would not hold all of the state: ") and "sw.not_kept(obj)" in said
        assert [name for name in ("loss.average is a", "loss.teacher is a") if name in said] == expected
    said = pool.run(world, f"{WORK}:incomplete", folder=str(tmp_path / "all"), plan=plan, state="all")
    assert set(said) == {"2 steps, ['data', 'optimizer', 'state/average']"}
