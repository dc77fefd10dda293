"""Laws of the pipeline's tables: every pass once and in order, no deadlock over FIFO channels, known bubbles."""

from collections import Counter, deque

import pytest

from shardwise.plan import schedules
from shardwise.plan.schedules import Action, Message

CASES = [
    pytest.param(schedule, pp, stages, micros, id=f"{schedule}-{pp}x{stages}-{micros}")
    for schedule in schedules.SCHEDULES
    for pp in range(1, 5)
    for stages in range(1, 4)
    for micros in (1, 2, 3, 5, 7, 8, 12)
    if not schedules.requires(schedule, pp, stages, micros)
]
every_case = pytest.mark.parametrize(("schedule", "pp", "stages", "micros"), CASES)


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_each_stage_has_one_rank_and_each_rank_its_stages(schedule: str, pp: int) -> None:
    held = [schedules.stages_of_rank(schedule, rank, pp, 2) for rank in range(pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(2 * pp))
    assert all(len(stages) == 2 for stages in held)


@pytest.mark.parametrize(("blocks", "stages"), [(5, 3), (5, 4), (4, 4), (7, 1), (80, 6)])
def test_blocks_are_split_into_contiguous_stages_the_earlier_ones_longer(blocks: int, stages: int) -> None:
    ranges = schedules.stage_blocks(blocks, stages)
    assert [block for part in ranges for block in part] == list(range(blocks))
    sizes = [len(part) for part in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks"):
        schedules.stage_blocks(3, 4)


@every_case
def test_every_stage_passes_every_micro_batch_once_forward_before_backward(
    schedule: str, pp: int, stages: int, micros: int
) -> None:
    tables = schedules.actions(schedule, pp, stages, micros)
    halves = {"F": "F", "B": "IW", "I": "I", "W": "W"}
    everything = Counter((k, s, m) for k in "FIW" for s in range(pp * stages) for m in range(micros))
    assert Counter((k, a.stage, a.micro) for table in tables for a in table for k in halves[a.kind]) == everything
    kinds = {action.kind for table in tables for action in table}
    assert kinds == set({"interleaved-zb": "FIW", "zbv": "FIW", "dualpipev": "FBIW"}.get(schedule, "FB"))
    for rank, table in enumerate(tables):
        assert {action.stage for action in table} == set(schedules.stages_of_rank(schedule, rank, pp, stages))
        at = {(kind, *a[1:]): index for index, a in enumerate(table) for kind in halves[a.kind]}
        for stage in schedules.stages_of_rank(schedule, rank, pp, stages):
            for micro in range(micros):
                order = [at[kind, stage, micro] for kind in "FIW"]
                assert order == sorted(order)
            for kind in "FIW":
                order = [at[kind, stage, micro] for micro in range(micros)]
                assert order == sorted(order), "micro-batches run in their order: gradients add up in one order"


def walk(tables: tuple[schedules.Table, ...], schedule: str, stages: int) -> None:
    """Run the tables over FIFO channels alone; AssertionError where a rank waits for ever or a channel is left full."""
    ranks = range(len(tables))
    wires: dict[tuple[int, int], deque[Message]] = {(a, b): deque() for a in ranks for b in ranks}
    inbox: list[set[Message]] = [set() for _ in ranks]
    position = [0] * len(tables)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            for wire in (wires[sender, rank] for sender in ranks):
                while wire:
                    inbox[rank].add(wire.popleft())
            if position[rank] == len(tables[rank]):
                continue
            action = tables[rank][position[rank]]
            wanted = schedules.taken_by(action, stages)
            if wanted is not None:
                if wanted not in inbox[rank]:
                    continue
                inbox[rank].remove(wanted)
            made = schedules.sent_by(action, stages)
            if made is not None:
                wires[rank, schedules.rank_of_stage(schedule, made.stage, len(tables))].append(made)
            position[rank] += 1
            moved = True
    assert position == [len(table) for table in tables], "the ranks wait for each other"
    assert not any(inbox) and not any(wires.values()), "something was sent that nobody takes"


@every_case
def test_no_rank_waits_for_ever(schedule: str, pp: int, stages: int, micros: int) -> None:
    walk(schedules.actions(schedule, pp, stages, micros), schedule, pp * stages)
    walk(schedules.forward_actions(schedule, pp, stages, micros), schedule, pp * stages)


@every_case
def test_a_channel_has_the_messages_that_its_receiver_takes(schedule: str, pp: int, stages: int, micros: int) -> None:
    tables = schedules.actions(schedule, pp, stages, micros)
    for (sender, receiver), messages in schedules.channels(tables, schedule, pp * stages).items():
        taken = {schedules.taken_by(action, pp * stages) for action in tables[receiver]}
        assert set(messages) <= taken
        assert sender != receiver
        assert len(set(messages)) == len(messages)


@pytest.mark.parametrize("micros", [1, 5, 23])
def test_an_evaluation_takes_any_number_of_micro_batches(micros: int) -> None:
    tables = schedules.forward_actions("interleaved-1f1b", 4, 2, micros)
    assert sorted(a for table in tables for a in table) == [Action("F", s, m) for s in range(8) for m in range(micros)]


@pytest.mark.parametrize("pp", [2, 3, 4, 5])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_the_bubble_is_the_published_one(pp: int, rounds: int) -> None:
    """A forward costs 1, a backward 2; m micro-batches, v stages a rank: 3 v m of work, and the wait."""
    m = pp * rounds
    work = {"gpipe": 3 * m, "1f1b": 3 * m, "interleaved-1f1b": 6 * m, "zbv": 6 * m, "dualpipev": 6 * m}
    plain, in_a_v = 3 * (pp - 1), pp - 1
    wait = {"gpipe": plain, "1f1b": plain, "interleaved-1f1b": plain, "zbv": in_a_v, "dualpipev": in_a_v}
    for schedule, busy in work.items():
        stages = 1 if busy == 3 * m else 2
        tables = schedules.actions(schedule, pp, stages, m)
        ends = [span.end for span in schedules.timeline(tables, pp * stages).values()]
        assert max(ends) == busy + wait[schedule]
        expected = wait[schedule] / (busy + wait[schedule])
        assert schedules.idle_fraction(tables, pp * stages) == pytest.approx(expected)
    for stages in (1, 2):
        tables = schedules.actions("interleaved-zb", pp, stages, m)
        ends = [span.end for span in schedules.timeline(tables, pp * stages).values()]
        assert max(ends) == 3 * stages * m + pp - 1


@every_case
def test_what_is_in_flight_is_bounded(schedule: str, pp: int, stages: int, micros: int) -> None:
    for rank, table in enumerate(schedules.actions(schedule, pp, stages, micros)):
        found = schedules.most_in_flight(table)
        if schedule == "gpipe":
            assert found == micros
        elif schedule == "1f1b":
            assert found == min(micros, pp - rank)
        elif schedule == "zbv":
            assert found <= min(2 * micros, 2 * pp)
        elif schedule == "dualpipev":
            assert found == 2 * pp + 1
        else:
            per_round = micros // max(1, micros // pp)
            hops = (2 if schedule == "interleaved-1f1b" else 1) * (pp - 1 - rank)
            late = rank if schedule == "interleaved-zb" else 0
            assert found <= min(stages * micros, (stages - 1) * per_round + hops + late + 1)


@pytest.mark.parametrize(
    ("schedule", "pp", "stages", "micros", "says"),
    [
        ("dualpipe", 2, 1, 4, "no schedule"), ("1f1b", 2, 2, 4, "stages_per_rank = 1"), ("gpipe", 2, 1, 0, "at least"),
        ("interleaved-1f1b", 2, 1, 4, "at least 2"), ("interleaved-1f1b", 2, 2, 5, "multiple of 2"),
        ("zbv", 2, 3, 4, "stages_per_rank = 2"), ("dualpipev", 2, 1, 4, "stages_per_rank = 2"),
        ("dualpipev", 3, 2, 5, "at least 6 micro-batches"),
    ],
)  # fmt: skip
def test_what_a_schedule_needs_is_said(schedule: str, pp: int, stages: int, micros: int, says: str) -> None:
    assert says in schedules.requires(schedule, pp, stages, micros)
    with pytest.raises(ValueError, match=says):
        schedules.actions(schedule, pp, stages, micros)


def test_crossed_tables_are_seen_to_deadlock() -> None:
    """A planted fault: each rank waits for what the other would do next."""
    crossed = ((Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1)), (Action("F", 1, 1), Action("B", 1, 1)))
    with pytest.raises(ValueError, match="wait for each other"):
        schedules.timeline(crossed, 2)
