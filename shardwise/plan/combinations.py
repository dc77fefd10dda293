"""What composes: schedule x data-parallel kind x recompute x compile x tensor parallel, as one table. No torch.

The first row that holds a cell decides. A cell runs, and the test that compares it with one process is named; or it is
refused, with the reason and with what to change. Sources: each refused combination was let through once on torch 2.13
and CPU ranks, and its reason is what was seen (an exception; under tensor parallel, torch's own count of compilations);
zero bubble's are also in docs/decisions/005.
"""

from typing import Literal, NamedTuple, get_args

from shardwise.inputs.recipe import PipelineSchedule
from shardwise.plan import schedules
from shardwise.plan.plan import Decision

Data = Literal["one", "zero0", "zero1", "zero2", "zero3", "hybrid1", "hybrid2", "hybrid3"]
SCHEDULES: tuple[str, ...] = ("none", *get_args(PipelineSchedule))
DATA: tuple[str, ...] = get_args(Data)
RECOMPUTE = ("none", "selective", "full")
COMPILE = ("off", "blocks")
TENSOR = ("no", "yes")


class Cell(NamedTuple):
    """A combination. `data`: one rank, or a ZeRO stage, or hybrid (copies of sharded groups) with its stage."""

    schedule: str
    data: str
    recompute: str
    compile: str
    tensor: str


class Refusal(NamedTuple):
    """Why a cell does not run, and which of its parts becomes what so that this reason is gone."""

    why: str
    part: Literal["schedule", "data", "recompute", "compile"]
    instead: str


class Row(NamedTuple):
    """Cells, each part as words ("any": all of them), and the test that holds them or the reason against them."""

    schedule: str
    data: str
    recompute: str
    compile: str
    tensor: str
    verdict: str | Refusal

    def holds(self, cell: Cell) -> bool:
        return all(words == "any" or part in words.split() for words, part in zip(self[:5], cell, strict=True))


ZERO_BUBBLE = " ".join(schedules.SPLIT_BACKWARD)
SHARDED = "zero1 zero2 zero3 hybrid1 hybrid2 hybrid3"
CELLS = "tests/distributed/test_combinations.py::test_a_cell_that_runs_gives_the_hand_written_loop"
COMPILED = "tests/distributed/test_combinations.py::test_a_compiled_cell_stays_within_the_rounding_bound"

LATE_WEIGHTS = Refusal(
    "zero bubble makes the weights' gradients after the backward in which a sharded module reduces them",
    "schedule", "1f1b",
)  # fmt: skip
TWO_BACKWARDS = Refusal(
    "zero bubble goes back twice through a block, and a recomputed one is gone after the first", "recompute", "none"
)
ONE_PIECE = Refusal(
    "zero bubble splits each backward in two, and a compiled block's is one piece", "compile", "off"
)  # fmt: skip
COMPILED_TENSOR = Refusal(
    "tensor parallel gives each block a forward of its own, so each is compiled anew, and past the 8th torch runs "
    "them uncompiled",
    "compile", "off",
)  # fmt: skip
COMPILED_SELECTIVE = Refusal(
    "torch.compile cannot trace a block whose products alone are kept", "compile", "off"
)  # fmt: skip

TABLE: tuple[Row, ...] = (
    #    schedule  data                  recompute         compile   tensor  verdict
    Row(ZERO_BUBBLE, SHARDED, "any", "any", "any", LATE_WEIGHTS),
    Row(ZERO_BUBBLE, "any", "selective full", "any", "any", TWO_BACKWARDS),
    Row(ZERO_BUBBLE, "any", "any", "blocks", "any", ONE_PIECE),
    Row("any", "any", "any", "blocks", "yes", COMPILED_TENSOR),
    Row("any", "any", "selective", "blocks", "any", COMPILED_SELECTIVE),
    Row("any", "any", "any", "blocks", "no", COMPILED),
    Row("any", "any", "any", "off", "any", CELLS),
)  # fmt: skip


def cell_of(decision: Decision) -> Cell:
    """Where a decision stands in the table."""
    mesh = decision.mesh
    if mesh.data_parallel == 1:
        data = "one"
    else:
        data = f"{'hybrid' if mesh.dp_replicate > 1 and mesh.dp_shard > 1 else 'zero'}{decision.zero}"
    if data == "hybrid0":  # a contradiction that another rule names
        data = "zero0"
    return Cell(decision.schedule, data, decision.recompute, decision.compile, "yes" if mesh.tp > 1 else "no")


def verdict(cell: Cell) -> str | Refusal:
    """The test that holds a cell, or the reason against it."""
    return next(row.verdict for row in TABLE if row.holds(cell))


def refusals(cell: Cell) -> tuple[Refusal, ...]:
    """The reasons against a cell one after another, each met, until what is left runs; empty where it runs."""
    found: list[Refusal] = []
    while isinstance(reason := verdict(cell), Refusal):
        found.append(reason)
        cell = cell._replace(**{reason.part: reason.instead})
    return tuple(found)


def overrides(reason: Refusal) -> dict[str, str | int]:
    """What meets a reason, as overrides of a recipe."""
    if reason.part == "data":
        return {"train.plan.zero": int(reason.instead[-1])}
    if reason.part == "schedule":
        return {"train.plan.schedule": reason.instead, "train.plan.stages_per_rank": "auto"}
    return {f"train.plan.{reason.part}": reason.instead}
