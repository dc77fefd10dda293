"""The pipeline on real ranks: every schedule and kind of module gives one process's gradients in fp64."""

from typing import Any

import pytest

from tests.distributed.pool import Pool


def nightly(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.nightly)


# (schedule, ranks, stages a rank, micro-batches); blocks make uneven stages: five, or one more than stages.
SCHEDULES = [
    ("gpipe", 2, 1, 4), ("gpipe", 3, 1, 2), ("1f1b", 2, 1, 4), ("1f1b", 3, 1, 5), ("1f1b", 4, 1, 3), ("1f1b", 4, 1, 7),
    ("interleaved-1f1b", 2, 2, 4), ("interleaved-1f1b", 3, 2, 3), ("interleaved-1f1b", 4, 2, 8),
    ("interleaved-zb", 2, 1, 4), ("interleaved-zb", 3, 2, 3), ("interleaved-zb", 4, 1, 8),
    ("zbv", 2, 2, 4), ("zbv", 3, 2, 6), ("zbv", 4, 2, 2),
    ("dualpipev", 2, 2, 5), nightly("dualpipev", 3, 2, 6), nightly("dualpipev", 4, 2, 9),
]  # fmt: skip


def run(pool: Pool, world: int, **arguments: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.run(world, "tests.distributed.pipeline_work:parity", **arguments)
    return found


def worst(found: list[dict[str, Any]]) -> float:
    return max(value for result in found for value in result["differences"].values())


def untied_and_tied() -> list[Any]:
    """Every case both ways; by day the first of each schedule is tied too."""
    seen, cases = set[str](), []
    for case in SCHEDULES:
        schedule, *more = getattr(case, "values", case)
        by_night = getattr(case, "marks", ())
        label = "-".join(map(str, (schedule, *more)))
        cases.append(pytest.param(schedule, *more, False, id=f"{label}-untied", marks=by_night))
        marks = pytest.mark.nightly if schedule in seen else by_night
        cases.append(pytest.param(schedule, *more, True, id=f"{label}-tied", marks=marks))
        seen.add(schedule)
    return cases


@pytest.mark.parametrize(("schedule", "world", "stages", "micros", "tied"), untied_and_tied())
def test_every_schedule_gives_one_process_s_gradients(
    pool: Pool, schedule: str, world: int, stages: int, micros: int, tied: bool
) -> None:
    """fp64 logic tier: 1e-10 leaves rounding a factor of 1e5."""
    blocks = world * stages + 1 if stages > 1 else 5
    arguments = {"schedule": schedule, "stages_per_rank": stages, "micros": micros, "blocks": blocks, "tied": tied}
    found = run(pool, world, kind="decoder", **arguments)
    assert worst(found) < 1e-10
    assert all(result["same_bits"] for result in found), "the same step twice gives the same bits"
    assert all(result["alive"] == 0 for result in found), "nothing is held after a step"
    for key in ("loss", "evaluated"):
        values = [result[key] for result in found if result[key] is not None]
        assert values == [pytest.approx(1.0, rel=1e-12)]
    held = [name for result in found for name in result["names"]]
    assert len(held) == len(set(held)), "every name lies on one rank"
    for result in found:
        lasts = [stage for stage, last in result["announced"] if last]
        assert len(result["announced"]) == micros * stages
        assert len(lasts) == len(set(lasts)) >= 1


@pytest.mark.parametrize("kind", ["mlp", "positions", "split"])
@pytest.mark.parametrize(
    ("schedule", "world", "stages", "micros", "blocks"),
    [
        ("1f1b", 3, 1, 4, 5), ("interleaved-1f1b", 2, 2, 4, 5), ("zbv", 2, 2, 4, 5),
        nightly("dualpipev", 2, 2, 4, 5),
    ],
)  # fmt: skip
def test_every_kind_of_module_is_staged(
    pool: Pool, kind: str, schedule: str, world: int, stages: int, micros: int, blocks: int
) -> None:
    """Keyword arguments from the batch, two embeddings, blocks that give a tuple, sw.Split; tied where it can be."""
    found = run(pool, world, kind=kind, schedule=schedule, stages_per_rank=stages, micros=micros, blocks=blocks,
                tied=kind != "split")  # fmt: skip
    assert worst(found) < 1e-10
    assert all(result["same_bits"] and result["alive"] == 0 for result in found)
    values = [result["evaluated"] for result in found if result["evaluated"] is not None]
    assert values == [pytest.approx(1.0, rel=1e-12)]


@pytest.mark.parametrize("signature", [True, False])
def test_stages_of_given_sizes_and_shapes_with_every_tensor(pool: Pool, signature: bool) -> None:
    found = run(pool, 3, kind="decoder", schedule="1f1b", blocks=5, sizes=[1, 1, 3], signature=signature, tied=True)
    assert worst(found) < 1e-10
    held = [sorted({name.split(".")[1] for name in r["names"] if name.startswith("blocks.")}) for r in found]
    assert held == [["0"], ["1"], ["2", "3", "4"]]


def test_the_first_owner_of_a_tie_counts(pool: Pool) -> None:
    found = run(pool, 3, kind="decoder", schedule="1f1b", tied=True)
    assert [r["alias"] for r in found] == [{}, {}, {"lm_head.weight": "embed_tokens.weight"}]


def test_under_zbv_both_ends_of_a_tie_are_one_parameter(pool: Pool) -> None:
    first, second = run(pool, 2, kind="decoder", schedule="zbv", stages_per_rank=2, tied=True)
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(first["names"])
    assert first["alias"] == second["alias"] == {}


@pytest.mark.parametrize("fault", ["swap", "drop", "untie"])
def test_a_planted_fault_is_seen(pool: Pool, fault: str) -> None:
    found = run(pool, 2, kind="decoder", schedule="gpipe", micros=4, tied=True, fault=fault)
    assert worst(found) > 1e-6


def test_a_sharded_stage_is_refused_under_a_split_backward(pool: Pool) -> None:
    """torch's classes give wrong gradients here, without a word."""
    found = pool.run(2, "tests.distributed.pipeline_work:sharded_under_zero_bubble")
    assert all("schedule" in text and "fix:" in text for text in found)
