"""What follows an exit: laws of budgets and causes first, then the cases that an operator meets."""

import itertools
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REQUEUE
from shardwise.inputs.recipe import Restarts
from shardwise.launch.outcome import Cause
from shardwise.launch.supervise import (
    LASTING_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Device,
    Exit,
    Restart,
    Span,
    Stop,
    decide,
    left_out,
    pause_seconds,
    shapes,
    still_counted,
    too_few,
    world_of,
)

BUDGETS = Restarts()
CODES = {"done": 0, "preempted": 75, "interrupted": 130, "bad_input": 2}
COUNTED: tuple[Cause, ...] = ("crash", "lost", "hang")


def exits(*causes: Cause, gained: float = 0.0) -> list[Exit]:
    """Exits that differ in step and error, so that only their causes count."""
    return [
        Exit(
            attempt=number, cause=cause, code=CODES.get(cause, 1), step=10 * number, error=f"Error{'x' * number}: why",
            gained_seconds=gained,
        )
        for number, cause in enumerate(causes, start=1)
    ]  # fmt: skip


def test_every_cause_has_an_answer_and_an_answer_to_stop_keeps_its_code() -> None:
    for cause in get_args(Cause):
        answer = decide(exits(cause), BUDGETS)
        assert isinstance(answer, Restart) == (cause in COUNTED)
        if isinstance(answer, Stop):
            assert answer.code == CODES.get(cause, EXIT_FAILED)


@pytest.mark.parametrize("budgets", [Restarts(), Restarts(0, 0), Restarts(1, 4)])
def test_a_run_that_gets_no_further_ends_after_exactly_its_budget(budgets: Restarts) -> None:
    for cause, limit in (("crash", budgets.crashes), ("lost", budgets.crashes), ("hang", budgets.hangs)):
        answers = [decide(exits(*[cause] * count), budgets) for count in range(1, limit + 2)]  # type: ignore[list-item]
        assert [isinstance(answer, Restart) for answer in answers] == [True] * limit + [False]
        assert isinstance(answers[-1], Stop) and "train.restarts" in answers[-1].why


def test_whatever_the_order_no_more_restarts_are_given_than_both_budgets_together() -> None:
    most = BUDGETS.crashes + BUDGETS.hangs
    for causes in itertools.product(COUNTED, repeat=most + 1):
        history = exits(*causes)
        assert any(isinstance(decide(history[: n + 1], BUDGETS), Stop) for n in range(len(history)))


def test_crashes_and_hangs_do_not_use_up_each_others_budget() -> None:
    assert isinstance(decide(exits("hang", "hang", "crash", "crash", "crash"), BUDGETS), Restart)
    assert isinstance(decide(exits("crash", "crash", "crash", "hang", "hang"), BUDGETS), Restart)
    assert isinstance(decide(exits("crash", "lost", "crash", "lost"), BUDGETS), Stop)


def test_lasting_progress_forgives_and_less_does_not() -> None:
    assert isinstance(decide(exits(*["crash"] * 50, gained=LASTING_SECONDS), BUDGETS), Restart)  # type: ignore[list-item]
    assert isinstance(decide(exits(*["crash"] * 50, gained=LASTING_SECONDS / 100), BUDGETS), Stop)  # type: ignore[list-item]
    history = exits("crash", "crash", "crash")
    assert still_counted(history) == history
    # What was trained before a failure says nothing of it; what was trained after it does.
    first = msgspec.structs.replace(history[0], gained_seconds=LASTING_SECONDS)
    assert still_counted([first, *history[1:]]) == [first, *history[1:]]
    last = msgspec.structs.replace(history[2], gained_seconds=LASTING_SECONDS)
    assert still_counted([*history[:2], last]) == [last]


def test_the_same_error_at_the_same_step_twice_ends_the_run_whatever_numbers_it_names() -> None:
    first = Exit(1, "crash", 1, step=7, error="ValueError: row 3 of /data/a.txt at 0x7f00 is 1.5")
    again = Exit(2, "crash", 1, step=7, error="ValueError: row 9 of /data/b.txt at 0x7e11 is 2")
    answer = decide([first, again], BUDGETS)
    assert isinstance(answer, Stop) and "step 7" in answer.why
    between = decide([first, Exit(2, "lost", 1, step=6), msgspec.structs.replace(again, attempt=3)], BUDGETS)
    assert isinstance(between, Stop)
    assert isinstance(decide([first, msgspec.structs.replace(again, step=8)], BUDGETS), Restart)
    assert isinstance(decide([first, msgspec.structs.replace(again, error="KeyError: 'row'")], BUDGETS), Restart)


def test_two_kills_at_one_step_are_not_known_to_be_the_same() -> None:
    killed = Exit(1, "lost", 1, step=7, error="its process was ended by SIGKILL")
    assert isinstance(decide([killed, msgspec.structs.replace(killed, attempt=2)], BUDGETS), Restart)


def test_what_memory_or_input_or_numbers_ended_is_never_tried_again_as_it_is() -> None:
    fix = "batch.micro_batch = 2"
    memory = decide([Exit(1, "out_of_memory", 1, step=3, fix=fix)], BUDGETS)
    assert isinstance(memory, Stop) and memory.code == EXIT_FAILED and fix in memory.why
    bad = decide([Exit(1, "bad_input", 2)], BUDGETS)
    assert isinstance(bad, Stop) and bad.code == EXIT_BAD_INPUT
    assert isinstance(decide([Exit(1, "diverged", 1, step=90)], BUDGETS), Stop)


def test_an_error_before_anything_was_trained_is_not_tried_again_unless_its_kind_passes() -> None:
    assert isinstance(decide([Exit(1, "crash", 1, error="ImportError: no module")], BUDGETS), Stop)
    assert isinstance(decide([Exit(1, "crash", 1, error="DistNetworkError: refused")], BUDGETS), Restart)
    assert isinstance(decide([Exit(1, "crash", 1, error="its process was ended by SIGSEGV")], BUDGETS), Restart)
    assert isinstance(decide([Exit(1, "crash", 1, step=1, error="ValueError: late")], BUDGETS), Restart)


def test_a_load_that_fails_is_tried_again_within_the_budget_since_another_checkpoint_is_taken_in_time() -> None:
    failed = Exit(attempt=1, cause="crash", code=1, error="LoadFailed: step-00000008 could not be loaded: rank 0: why")
    answers = [decide([failed] * count, BUDGETS) for count in range(1, BUDGETS.crashes + 2)]
    assert [isinstance(answer, Restart) for answer in answers] == [True] * BUDGETS.crashes + [False]


def test_told_to_stop_ends_it_here_and_elsewhere_costs_nothing() -> None:
    for cause, code in (("preempted", EXIT_REQUEUE), ("interrupted", EXIT_INTERRUPTED), ("done", EXIT_DONE)):
        assert decide(exits(cause), BUDGETS) == Stop(code)  # type: ignore[arg-type]
    away = [msgspec.structs.replace(one, elsewhere=True) for one in exits(*["preempted", "lost"] * 40)]  # type: ignore[list-item]
    assert isinstance(decide(away, BUDGETS), Restart)
    # And they use up nothing of a crash that follows.
    assert isinstance(decide([*away, *exits("crash", "crash", "crash")], BUDGETS), Restart)


def test_the_first_failure_is_not_waited_for_and_later_ones_ever_longer() -> None:
    pauses = [pause_seconds(count) for count in range(1, 30)]
    assert pauses[0] == 0.0 and pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE_SECONDS


def test_a_device_is_left_out_when_its_rank_is_lost_a_second_time() -> None:
    def lost(device: int, gained: float = 0.0) -> Exit:
        return Exit(1, "lost", 1, step=device, device=device, node="a", gained_seconds=gained)

    assert left_out([lost(2), lost(1)]) == frozenset()
    assert left_out([lost(2), lost(1), lost(2)]) == {Device("a", 2)}
    elsewhere = msgspec.structs.replace(lost(2), node="b")
    assert left_out([lost(2), elsewhere]) == frozenset()
    assert left_out([lost(2), lost(2, LASTING_SECONDS)]) == frozenset()
    crashed = msgspec.structs.replace(lost(0), cause="crash")
    assert left_out([crashed, crashed]) == frozenset()


@pytest.mark.parametrize(
    ("span", "here", "gone", "world"),
    [
        (Span(2, 4), None, 0, 4),
        (Span(2, 4), None, 1, 3),
        (Span(2, 4), None, 3, None),
        (Span(4, 4), None, 1, None),
        (Span(2, 4), 8, 1, 4),
        (Span(2, 4), 3, 0, 3),
        (Span(2, 4), 3, 2, None),
    ],
)
def test_as_many_ranks_as_are_left_between_the_least_and_the_most(
    span: Span, here: int | None, gone: int, world: int | None
) -> None:
    assert world_of(span, here, gone) == world


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.data())
def test_nodes_make_the_largest_mesh_that_all_who_take_part_can_give(free: list[int], data: st.DataObject) -> None:
    least, most = sorted(data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6))))
    low, high = sorted(data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8))))
    found = shapes(free, Span(least, most), Span(low, high))
    for shape in found:
        assert least <= shape.nodes <= most and low <= shape.ranks <= high
        assert free[0] >= shape.ranks and sum(one >= shape.ranks for one in free) >= shape.nodes
    assert [shape.world for shape in found] == sorted((shape.world for shape in found), reverse=True)
    able = [
        nodes * ranks
        for nodes in range(least, min(most, len(free)) + 1)
        for ranks in range(low, high + 1)
        if free[0] >= ranks and sum(one >= ranks for one in free) >= nodes
    ]
    assert max(able, default=0) == max((shape.world for shape in found), default=0)


def test_a_node_with_a_bad_device_is_left_out_where_the_others_are_more_without_it() -> None:
    nodes, ranks = Span(1, 16), Span(1, 8)
    assert shapes([8, 7], nodes, ranks)[0] == (2, 7)
    assert shapes([8] * 15 + [7], nodes, ranks)[0] == (15, 8)
    assert shapes([7, 8], nodes, ranks)[0] == (2, 7)  # the first holds the meeting
    assert shapes([8] * 7 + [7], nodes, ranks)[0] == (7, 8)  # of equals the fewer: one stays in reserve


def test_too_few_devices_go_back_into_the_queue() -> None:
    answer = too_few(Span(2, 4), 1)
    assert answer.code == EXIT_REQUEUE and "at least 2" in answer.why
