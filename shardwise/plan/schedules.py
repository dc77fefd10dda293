"""The orders in which a pipeline's ranks run their stages' forwards and backwards, as tables. No torch.

A stage is a contiguous part of the model's blocks. Every rank knows every rank's table, so that who sends what, and in
which order it arrives, needs no word between them.
Sources: GPipe arXiv 1811.06965; 1F1B arXiv 2006.09503; interleaved arXiv 2104.04473, with rounds of any equal length
as in torch; zero bubble (ZB-H1 over several stages a rank, and ZB-V) arXiv 2401.10241; DualPipeV the steps of torch's
ScheduleDualPipeV, after DualPipe arXiv 2412.19437.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev")
# Every backward in two halves; in dualpipev those alone that have a wait to fill.
SPLIT_BACKWARD = ("interleaved-zb", "zbv", "dualpipev")
# Two stages a rank, down the ranks and back up again: the first rank holds the first stage and the last.
V_SHAPED = ("zbv", "dualpipev")


class Action(NamedTuple):
    """F a forward, B a whole backward; I the backward to the stage's input alone, W the one to its weights."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro: int


class Message(NamedTuple):
    """What crosses to another rank: the hidden tensor or its gradient, and the stage and micro-batch that take it."""

    kind: Literal["hidden", "gradient"]
    stage: int
    micro: int


class Span(NamedTuple):
    start: int
    end: int


Table = tuple[Action, ...]
# A backward to the input, one to the weights and a forward each cost about one multiplication by every weight.
COST = {"F": 1, "I": 1, "W": 1, "B": 2}


def rank_of_stage(schedule: str, stage: int, pp: int) -> int:
    """The pipeline rank that holds a stage: in turn; in a V down the ranks and back up again."""
    if schedule in V_SHAPED and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def stages_of_rank(schedule: str, rank: int, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, ascending: the inverse of `rank_of_stage`."""
    return tuple(s for s in range(pp * stages_per_rank) if rank_of_stage(schedule, s, pp) == rank)


Sizes = Literal["even"] | tuple[int, ...]


def stage_blocks(blocks: int, stages: int, sizes: Sizes = "even") -> tuple[range, ...]:
    """Each stage's blocks, contiguous: as many as `sizes` say; evenly, the earlier stages have one more where they do
    not divide. Raises: ValueError where `cannot_share` says why.
    """
    problem = cannot_share(blocks, stages, sizes)
    if problem:
        raise ValueError(problem)
    size, longer = divmod(blocks, stages)
    each = [size + (stage < longer) for stage in range(stages)] if sizes == "even" else sizes
    return tuple(range(start, end) for start, end in itertools.pairwise((0, *itertools.accumulate(each))))


def cannot_share(blocks: int, stages: int, sizes: Sizes = "even") -> str:
    """Why so many blocks cannot be shared out so among stages; "" where they can."""
    if blocks < stages:
        return f"{blocks} blocks are fewer than {stages} stages"
    if sizes != "even" and (len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 1):
        return f"stages of {', '.join(map(str, sizes))} blocks do not share {blocks} blocks out among {stages} stages"
    return ""


def in_runs(sizes: Sequence[int]) -> str:
    """`2 x 12 and 6`: equal neighbours together."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    return " and ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in runs)


def requires(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> str:
    """What a schedule needs and these numbers do not give, as a sentence; empty where it can run."""
    if schedule not in SCHEDULES:
        return f"{schedule} is no schedule of a pipeline; there are {', '.join(SCHEDULES)}"
    if micro_batches < 1:
        return f"{schedule} needs at least one micro-batch"
    if schedule in ("gpipe", "1f1b") and stages_per_rank != 1:
        return f"{schedule} needs stages_per_rank = 1"
    if schedule == "interleaved-1f1b" and stages_per_rank < 2:
        return f"{schedule} needs stages_per_rank of at least 2"
    if schedule in V_SHAPED and stages_per_rank != 2:
        return f"{schedule} needs stages_per_rank = 2"
    if schedule == "dualpipev" and micro_batches < 2 * pp:
        return f"{schedule} needs at least {2 * pp} micro-batches, as many as stages"
    if schedule.startswith("interleaved"):
        rounds = max(1, micro_batches // pp)
        if micro_batches % rounds:
            return (
                f"{schedule} needs a number of micro-batches that is a multiple of {pp}, or divides into equal rounds"
            )
    return ""


def actions(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> tuple[Table, ...]:
    """The table of each pipeline rank. Raises: ValueError where `requires` has something to say."""
    if problem := requires(schedule, pp, stages_per_rank, micro_batches):
        raise ValueError(problem)
    return tuple(_of_rank(schedule, rank, pp, stages_per_rank, micro_batches) for rank in range(pp))


def _of_rank(schedule: str, rank: int, pp: int, stages_per_rank: int, micros: int) -> Table:
    if schedule == "gpipe":
        return tuple(Action("F", rank, m) for m in range(micros)) + tuple(Action("B", rank, m) for m in range(micros))
    if schedule == "1f1b":
        return _one_forward_one_backward(rank, pp, 1, micros, warmup=pp - 1 - rank)
    if schedule == "zbv":
        return _zero_bubble_v(rank, pp, micros)
    if schedule == "dualpipev":
        return _dual_pipe_v(rank, pp, micros)
    per_round = micros // max(1, micros // pp)
    hops = pp - 1 - rank
    if schedule == "interleaved-1f1b":
        return _one_forward_one_backward(
            rank, pp, stages_per_rank, micros, warmup=(stages_per_rank - 1) * per_round + 2 * hops
        )
    return _one_forward_one_backward(
        rank, pp, stages_per_rank, micros, warmup=(stages_per_rank - 1) * per_round + hops, weights_late=rank
    )


def _one_forward_one_backward(
    rank: int, pp: int, stages_per_rank: int, micros: int, *, warmup: int, weights_late: int | None = None
) -> Table:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left.

    `weights_late`: each backward is split in two, and that to the weights comes so many backwards later.
    """
    total = micros * stages_per_rank
    per_round = micros // max(1, micros // pp) if stages_per_rank > 1 else micros
    warmup = min(warmup, total)

    def place(k: int, backward: bool) -> tuple[int, int]:
        """The stage and micro-batch of the k-th one: a round of micro-batches through one stage, then the next."""
        turn, within = divmod(k, per_round)
        held = turn % stages_per_rank
        held = stages_per_rank - 1 - held if backward else held
        return held * pp + rank, turn // stages_per_rank * per_round + within

    order = [Action("F", *place(k, False)) for k in range(warmup)]
    for k in range(total):
        if warmup + k < total:
            order.append(Action("F", *place(warmup + k, False)))
        order.append(Action("B" if weights_late is None else "I", *place(k, True)))
        if weights_late is not None and k >= weights_late:
            order.append(Action("W", *place(k - weights_late, True)))
    if weights_late is not None:
        order += [Action("W", *place(k, True)) for k in range(max(0, total - weights_late), total)]
    return tuple(order)


class _Order:
    """Actions one after another. The n-th of a kind through a stage is micro-batch n's; a B is an I and a W at once."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done = Counter[tuple[str, int]]()  # by kind, of F, I and W, and stage

    def run(self, kinds: str, stage: int) -> None:
        for kind in kinds:
            halves = "IW" if kind == "B" else kind
            self.actions.append(Action(kind, stage, self.done[halves[0], stage]))  # type: ignore[arg-type]
            self.done.update((half, stage) for half in halves)


def _zero_bubble_v(rank: int, pp: int, micros: int) -> Table:
    """ZB-V. The table is that of at least 2 pp - 1 micro-batches; with fewer, those that are not there are left out."""
    down, up = rank, 2 * pp - 1 - rank
    planned, order = max(2 * pp - 1, micros), _Order()
    run, done = order.run, order.done
    for _ in range(2 * (pp - rank) - 1):
        run("F", down)
    for _ in range(rank):
        run("F", up)
        run("F", down)
    for _ in range(pp - rank):
        run("FIW", up)
    while done["F", up] < done["F", down] or done["F", down] < planned:
        if done["F", down] < planned:
            run("F", down)
        run("IW", down)
        run("FIW", up)
    for _ in range(rank):
        run("I", down)
        run("I", up)
    for _ in range(pp - rank):
        run("IW", down)
    for stage in (up, down):
        while done["W", stage] < done["I", stage]:
            run("W", stage)
    return tuple(action for action in order.actions if action.micro < micros)


def _dual_pipe_v(rank: int, pp: int, micros: int) -> Table:
    """DualPipeV. Its pairs of a forward and a backward, which torch marks to overlap, run one after the other here."""
    down, up, behind = rank, 2 * pp - 1 - rank, pp - 1 - rank
    order = _Order()
    run = order.run
    for _ in range(2 * behind):
        run("F", down)
    for _ in range(rank + 1):
        run("F", down)
        run("F", up)
    for _ in range(behind):
        run("IWF", up)
    for _ in range(micros - 2 * pp + rank + 1):
        run("F", down)
        run("B", up)
        run("F", up)
        run("B", down)
    for _ in range(behind):
        run("B", up)
        run("F", up)
        run("B", down)
    # No forward is left. The second half of the backwards goes to the input alone, and its weights fill the waits.
    left = [up, down] * (rank + 1)
    late = left[rank + 1 :] + [down] * behind
    for stage in left[: rank + 1]:
        run("B", stage)
    for stage in left[rank + 1 :]:
        run("I", stage)
    for stage in late[:behind]:
        run("W", stage)
        run("I", down)
    for stage in late[behind:]:
        run("W", stage)
    return tuple(order.actions)


def forward_actions(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> tuple[Table, ...]:
    """The tables of an evaluation: forwards alone, any number of micro-batches, a group of `pp` of them at a time."""
    groups = [range(m, min(m + pp, micro_batches)) for m in range(0, micro_batches, pp)]
    return tuple(
        tuple(
            Action("F", stage, micro)
            for group in groups
            for stage in stages_of_rank(schedule, rank, pp, stages_per_rank)
            for micro in group
        )
        for rank in range(pp)
    )


def sent_by(action: Action, stages: int) -> Message | None:
    """What an action makes for a neighbouring stage; None where there is none."""
    if action.kind == "F" and action.stage < stages - 1:
        return Message("hidden", action.stage + 1, action.micro)
    if action.kind in "BI" and action.stage > 0:
        return Message("gradient", action.stage - 1, action.micro)
    return None


def taken_by(action: Action, stages: int) -> Message | None:
    """What an action waits for from a neighbouring stage."""
    if action.kind == "F" and action.stage > 0:
        return Message("hidden", action.stage, action.micro)
    if action.kind in "BI" and action.stage < stages - 1:
        return Message("gradient", action.stage, action.micro)
    return None


def channels(tables: Sequence[Table], schedule: str, stages: int) -> dict[tuple[int, int], tuple[Message, ...]]:
    """By (sending, receiving) rank: the messages in the order in which they are sent, which is that of arrival."""
    found: dict[tuple[int, int], list[Message]] = {}
    for rank, table in enumerate(tables):
        for action in table:
            message = sent_by(action, stages)
            if message is not None:
                receiver = rank_of_stage(schedule, message.stage, len(tables))
                if receiver != rank:
                    found.setdefault((rank, receiver), []).append(message)
    return {pair: tuple(messages) for pair, messages in found.items()}


def timeline(tables: Sequence[Table], stages: int) -> dict[Action, Span]:
    """When each action runs where each waits for its messages alone and costs COST.

    Raises: ValueError where the ranks would wait for each other for ever.
    """
    spans: dict[Action, Span] = {}
    arrived: dict[Message, int] = {}
    position, free = [0] * len(tables), [0] * len(tables)
    while any(at < len(table) for at, table in zip(position, tables, strict=True)):
        before = list(position)
        for rank, table in enumerate(tables):
            while position[rank] < len(table):
                action = table[position[rank]]
                wanted = taken_by(action, stages)
                if wanted is not None and wanted not in arrived:
                    break
                start = max(free[rank], arrived[wanted] if wanted is not None else 0)
                spans[action] = Span(start, start + COST[action.kind])
                free[rank] = spans[action].end
                message = sent_by(action, stages)
                if message is not None:
                    arrived[message] = free[rank]
                position[rank] += 1
        if position == before:
            stuck = [table[at] for at, table in zip(position, tables, strict=True) if at < len(table)]
            raise ValueError(f"the ranks wait for each other at {stuck}")
    return spans


def idle_fraction(tables: Sequence[Table], stages: int) -> float:
    """The pipeline's bubble: the part of the ranks' time, first action to last one, in which they wait."""
    spans = timeline(tables, stages)
    length = max(span.end for span in spans.values())
    busy = sum(span.end - span.start for span in spans.values())
    return 1.0 - busy / (length * len(tables))


def most_in_flight(table: Table) -> int:
    """The most (stage, micro-batch) pairs whose activations a rank keeps at one time."""
    held, most = 0, 0
    for action in table:
        # The weights' half of a backward reads them too.
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
