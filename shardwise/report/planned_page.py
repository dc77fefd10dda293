"""One self-contained page of what `shardwise plan` found: figures, memory stacks and the step's timeline as pictures.

No script, no font and no file from elsewhere: it opens anywhere, without a network.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwise.plan import schedules
from shardwise.plan.automatic import Searched, words
from shardwise.plan.choice import Choice
from shardwise.plan.plan import Decision
from shardwise.report import planned
from shardwise.report.planned import Planned
from shardwise.units import format_bytes, format_seconds

WIDTH = 920
COLOURS = (
    "#3b6ea8", "#d9822b", "#5b9e58", "#b34a4a", "#8067a8", "#c2a83e", "#4aa3a3", "#c06c9c", "#7f7f7f", "#9c6b3f",
    "#5a7fd6", "#93b84c", "#d06f5a",
)  # fmt: skip
KINDS = {"F": "#3b6ea8", "B": "#d9822b", "I": "#d9822b", "W": "#5b9e58"}
KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "backward to weights"}
# What a step takes beside its micro-batches, at its end.
AFTER, AFTER_NAME = "#8a8a8a", "sums and optimizer"
AFTER_PARTS = ("data_parallel", "optimizer", "offload", "waiting")
# More boxes and lines than these are not told apart any more.
MOST_BOXES = 1600
MOST_RANKS = 32
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1120px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .3em .6em; text-align: right; white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; white-space: normal; min-width: 16em; }
tr { border-bottom: 1px solid #ddd; }
.wide { overflow-x: auto; } tr.chosen { background: #eef4fb; } .note { color: #666; font-size: 13px; }
svg { display: block; max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px; }
"""


class Stack(NamedTuple):
    """A bar: what it is of, its parts, and a limit that they should stay under."""

    label: str
    parts: Mapping[str, float]
    limit: float | None = None


def page(told: Planned, held: Sequence[Mapping[str, float]], limits: Sequence[float]) -> str:
    """HTML. `held`: bytes by part on each pipeline rank of the chosen plan; `limits`: those of its device."""
    done = told.searched
    chosen = done.chosen or done.candidates[0]
    title = f"{done.subject.workload.arch.name} on {done.subject.cluster.name}"
    plans = list(enumerate(done.candidates, 1))
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(planned.name(chosen.decision))}: {_summary(chosen)}.</p>",
        "<h2>The best plans</h2>",
        _table(done, chosen),
        "<h2>Memory of the chosen plan, by stage of the pipeline</h2>",
        bars(ranks(chosen.decision, held, limits), format_bytes),
        f'<p class="note">{escape(_how_held(chosen.decision, len(held)))}</p>',
        "<h2>The chosen plan's step, as time goes by</h2>",
        timeline(chosen),
        "<h2>Memory of the fullest rank, by plan</h2>",
        bars(
            [Stack(f"plan {at}", one.estimate.memory, one.estimate.memory_limit_bytes) for at, one in plans],
            format_bytes,
        ),
        "<h2>Where a step's time goes, by plan</h2>",
        bars([Stack(f"plan {at}", one.estimate.seconds) for at, one in plans], format_seconds),
        "<h2>All of it in words</h2>",
        f"<pre>{escape(planned.text(told))}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(body)}</body></html>'
    )


def _summary(chosen: Choice) -> str:
    """What the chosen plan takes, as text."""
    estimate, limit = chosen.estimate, chosen.estimate.memory_limit_bytes
    memory = f"{format_bytes(estimate.memory_bytes)} of {format_bytes(limit)} on the fullest rank"
    return f"{format_seconds(estimate.step_seconds)} a step, {memory}"


def ranks(decided: Decision, held: Sequence[Mapping[str, float]], limits: Sequence[float]) -> list[Stack]:
    """A bar for each pipeline rank; of more than can be looked at every second, third or so, and the last."""
    every = range(0, len(held), -(-len(held) // MOST_RANKS))
    shown = sorted({*every, len(held) - 1})
    return [Stack(rank_name(decided, rank), held[rank], limits[rank]) for rank in shown]


def rank_name(decided: Decision, rank: int) -> str:
    """A pipeline rank is its stage where it has one."""
    if decided.mesh.pp == 1:
        return "every rank" if decided.shares == "equal" else f"group {rank}"
    return f"{'stage' if decided.stages_per_rank == 1 else 'rank'} {rank}"


def _how_held(decided: Decision, count: int) -> str:
    said = "Bytes at the fullest moment of a step; the dashed line is the device's memory."
    if decided.stages_per_rank > 1:
        said += f" Each of the pipeline's ranks has {decided.stages_per_rank} stages."
    return said + (f" Of {count} ranks some are shown." if count > MOST_RANKS else "")


def _table(done: Searched, chosen: Choice) -> str:
    lines = ['<div class="wide"><table><tr>', *(f"<th>{escape(one)}</th>" for one in planned.HEAD), "</tr>"]
    for number, one in enumerate(done.candidates, 1):
        kind = ' class="chosen"' if one == chosen else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in planned.cells(number, one, one == chosen))
        lines.append(f"<tr{kind}>{cells}</tr>")
    note = "The highlighted plan is the chosen one. Intervals hold four of five measurements."
    if any(one.planned_only for one in done.candidates):
        note = f"* planned only: this engine does not run it yet. {note}"
    return "".join(lines) + f'</table></div><p class="note">{note}</p>'


def bars(stacks: Sequence[Stack], said: planned.Said) -> str:
    """Horizontal bars of parts side by side, a legend, and a line at each bar's limit."""
    names = list(dict.fromkeys(part for stack in stacks for part in stack.parts))
    shown = [name for name in names if any(_visible(stack, name) for stack in stacks)]
    # A part has its colour whatever else is shown, so that pictures can be held side by side.
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names) if name in shown}
    longest = max(max(sum(stack.parts.values()), stack.limit or 0.0) for stack in stacks) or 1.0
    left, high = 90, 24
    scale = (WIDTH - left - 90) / longest
    marks = []
    for row, stack in enumerate(stacks):
        x, y = float(left), row * (high + 6)
        marks.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(stack.label)}</text>')
        for name in shown:
            wide = stack.parts.get(name, 0.0) * scale
            tip = f"{words(name)}: {said(stack.parts.get(name, 0.0))}"
            marks.append(_box(x, y, wide, high, colours[name], tip))
            x += wide
        marks.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{escape(said(sum(stack.parts.values())))}</text>')
    tall = len(stacks) * (high + 6)
    limits = [(stack.limit, row) for row, stack in enumerate(stacks) if stack.limit is not None]
    for limit, run in itertools.groupby(limits, key=lambda one: one[0]):
        rows = [row for _, row in run]
        at, top, bottom = left + limit * scale, rows[0] * (high + 6), (rows[-1] + 1) * (high + 6)
        marks.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" stroke="#b00" stroke-dasharray="4 3"/>'
        )
    for limit in dict.fromkeys(limit for limit, _ in limits):
        at = left + limit * scale
        marks.append(f'<text x="{at:.1f}" y="{tall + 12}" text-anchor="middle">limit {escape(said(limit))}</text>')
    legend, below = _legend({words(name): colour for name, colour in colours.items()}, tall + (26 if limits else 8))
    return _svg([*marks, legend], below)


def _visible(stack: Stack, name: str) -> bool:
    return stack.parts.get(name, 0.0) > 0.002 * sum(stack.parts.values())


def timeline(chosen: Choice) -> str:
    """When each pipeline rank computes which micro-batch, over seconds; without a pipeline, the passes of one rank."""
    decided = chosen.decision
    pp, held, micros = decided.mesh.pp, decided.stages_per_rank, decided.accumulation
    # Whole rounds of micro-batches, so that every schedule can be drawn; on one rank those that can be told apart.
    drawn = min(micros, 12 if pp == 1 else max(pp, MOST_BOXES // (2 * held * pp * pp) * pp))
    schedule = decided.schedule if pp > 1 else "1f1b"
    if pp > MOST_RANKS or schedules.requires(schedule, pp, held, drawn):
        return f'<p class="note">{pp} ranks and {micros} micro-batches are too many to draw.</p>'
    spans = schedules.timeline(schedules.actions(schedule, pp, held, drawn), pp * held)
    each, after = _seconds_of(chosen)
    computed = each * max(span.end for span in spans.values())
    left, high, gap = 90, 20 if pp <= 16 else 12, 4
    scale = (WIDTH - left - 70) / (computed + (after if drawn == micros else 0.0))
    marks = [
        f'<text x="{left - 8}" y="{rank * (high + gap) + high - 5}" text-anchor="end">{rank_name(decided, rank)}</text>'
        for rank in range(pp)
    ]
    for action, span in spans.items():
        y = schedules.rank_of_stage(schedule, action.stage, pp) * (high + gap)
        tip = f"{KIND_NAMES[action.kind]} of micro-batch {action.micro}, stage {action.stage}"
        x, wide = left + span.start * each * scale, (span.end - span.start) * each * scale
        marks.append(_box(x, y, wide, high, KINDS[action.kind], tip))
    kinds = {KIND_NAMES[kind]: KINDS[kind] for kind in dict.fromkeys(action.kind for action in spans)}
    if drawn == micros and after > 0:
        tip = f"{AFTER_NAME}: {format_seconds(after)}"
        marks += [_box(left + computed * scale, at * (high + gap), after * scale, high, AFTER, tip) for at in range(pp)]
        kinds[AFTER_NAME] = AFTER
    bottom = pp * (high + gap)
    marks.append(_axis(computed + (after if drawn == micros else 0.0), left, scale, bottom))
    legend, below = _legend(kinds, bottom + 26)
    return _svg([*marks, legend], below) + f'<p class="note">{escape(_how_drawn(chosen, drawn))}</p>'


def _seconds_of(chosen: Choice) -> tuple[float, float]:
    """Of the third part of a stage's micro-batch (a forward, or half a backward), and of what comes after them all."""
    decided, parts = chosen.decision, chosen.estimate.seconds
    after = sum(parts.get(part, 0.0) for part in AFTER_PARTS)
    working = chosen.estimate.step_seconds - after - parts.get("bubble", 0.0)
    return working / (decided.accumulation * decided.stages_per_rank * 3), after


def _how_drawn(chosen: Choice, drawn: int) -> str:
    decided, estimate = chosen.decision, chosen.estimate
    micros = decided.accumulation
    some = f"The first {drawn} of {micros} micro-batches" if drawn < micros else f"{micros} micro-batches"
    later = "" if drawn == micros else f"; {AFTER_NAME} come last, {format_seconds(_seconds_of(chosen)[1])}"
    schedule = f" by the schedule {decided.schedule}" if decided.mesh.pp > 1 else ""
    step = format_seconds(estimate.step_seconds)
    return (
        f"{some}{schedule} of a step of {step}. A backward is drawn twice as long as a forward, and each stage as long "
        f"as the slowest{later}."
    )


def _axis(length: float, left: float, scale: float, y: float) -> str:
    """Seconds below a picture: some five marks at round numbers."""
    rough = length / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    marks = [f'<line x1="{left}" x2="{left + length * scale:.1f}" y1="{y}" y2="{y}" stroke="#999"/>']
    for number in range(int(length / step * (1 + 1e-9)) + 1):
        x = left + number * step * scale
        said = format_seconds(number * step) if number else "0"
        marks.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}" stroke="#999"/>')
        marks.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{said}</text>')
    return "".join(marks)


def _box(x: float, y: float, wide: float, high: float, colour: str, tip: str) -> str:
    if wide <= 0:
        return ""
    # A line around what is hardly wider would hide it.
    edge = ' stroke="#fff" stroke-width="0.6"' if wide > 3 else ""
    shape = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{high}" fill="{colour}"{edge}'
    return f"<rect {shape}><title>{escape(tip)}</title></rect>"


def _legend(colours: Mapping[str, str], y: float) -> tuple[str, float]:
    """Names beside their colours, five a line, and where the picture ends."""
    marks = []
    for at, (name, colour) in enumerate(colours.items()):
        x, line = 90 + (at % 5) * 160, y + 18 * (at // 5)
        marks.append(f'<rect x="{x}" y="{line}" width="11" height="11" fill="{colour}"/>')
        marks.append(f'<text x="{x + 16}" y="{line + 10}">{escape(name)}</text>')
    return "".join(marks), y + 18 * (-(-len(colours) // 5)) + 4


def _svg(marks: Sequence[str], tall: float) -> str:
    box = f'viewBox="0 0 {WIDTH} {tall:.0f}" width="{WIDTH}" height="{tall:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{"".join(marks)}</svg>'
