"""One self-contained page of what `shardwise plan` found: figures, memory stacks and the step's timeline as pictures.

No script, no font and no file from elsewhere: it opens anywhere, without a network.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from shardwise.plan import schedules
from shardwise.plan.automatic import Searched, words
from shardwise.plan.choice import Choice
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
# More boxes and lines than these are not told apart any more.
MOST_BOXES = 1600
MOST_RANKS = 32
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 960px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .3em .7em; text-align: right; }
th:nth-child(2), td:nth-child(2) { text-align: left; } tr { border-bottom: 1px solid #ddd; }
tr.chosen { background: #eef4fb; } .note { color: #666; font-size: 13px; }
svg { display: block; max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 12px; }
"""


class Stack(NamedTuple):
    """A bar: what it is of, and its parts."""

    label: str
    parts: Mapping[str, float]


def page(told: Planned, stages: Sequence[Stack] = ()) -> str:
    """HTML. `stages`: memory by pipeline rank of the chosen plan; empty: of the fullest rank of each plan told."""
    done = told.searched
    chosen = done.chosen or done.candidates[0]
    title = f"{done.subject.workload.arch.name} on {done.subject.cluster.name}"
    stacks = list(stages) or [Stack(f"plan {at}", one.estimate.memory) for at, one in enumerate(done.candidates, 1)]
    whose = "by pipeline rank" if stages else "of the fullest rank, by plan"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(planned.name(chosen.decision))}: {format_seconds(chosen.estimate.step_seconds)} a step.</p>",
        "<h2>The best plans</h2>",
        _table(done, chosen),
        f"<h2>Memory {whose}</h2>",
        bars(stacks, format_bytes, chosen.estimate.memory_limit_bytes),
        "<h2>Where a step's time goes, by plan</h2>",
        bars([Stack(f"plan {at}", one.estimate.seconds) for at, one in enumerate(done.candidates, 1)], format_seconds),
        "<h2>The step's timeline</h2>",
        timeline(chosen),
        "<h2>All of it in words</h2>",
        f"<pre>{escape(planned.text(told))}</pre>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(body)}</body></html>'
    )


def _table(done: Searched, chosen: Choice) -> str:
    lines = ["<table><tr>", *(f"<th>{escape(one)}</th>" for one in planned.HEAD), "</tr>"]
    for number, one in enumerate(done.candidates, 1):
        kind = ' class="chosen"' if one == chosen else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in planned.cells(number, one, one == chosen))
        lines.append(f"<tr{kind}>{cells}</tr>")
    note = "* planned only: this engine does not run it yet. Intervals hold four of five measurements."
    return "".join(lines) + f'</table><p class="note">{note}</p>'


def bars(stacks: Sequence[Stack], said: planned.Said, limit: float | None = None) -> str:
    """Horizontal bars of parts side by side, a legend, and a line at the limit."""
    names = list(dict.fromkeys(part for stack in stacks for part in stack.parts))
    shown = [name for name in names if any(_visible(stack, name) for stack in stacks)]
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(shown)}
    longest = max([sum(stack.parts.values()) for stack in stacks] + [limit or 0.0]) or 1.0
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
    if limit is not None:
        at = left + limit * scale
        marks.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{tall}" stroke="#b00" stroke-dasharray="4 3"/>')
        marks.append(f'<text x="{at:.1f}" y="{tall + 12}" text-anchor="middle">{escape(said(limit))}</text>')
    legend, below = _legend({words(name): colour for name, colour in colours.items()}, tall + 22)
    return _svg([*marks, legend], below)


def _visible(stack: Stack, name: str) -> bool:
    return stack.parts.get(name, 0.0) > 0.002 * sum(stack.parts.values())


def timeline(chosen: Choice) -> str:
    """When each pipeline rank computes which micro-batch; without a pipeline, the passes of one rank."""
    decided, estimate = chosen.decision, chosen.estimate
    pp, held, micros = decided.mesh.pp, decided.stages_per_rank, decided.accumulation
    # Whole rounds of micro-batches, so that every schedule can be drawn; on one rank those that can be told apart.
    drawn = min(micros, 12 if pp == 1 else max(pp, MOST_BOXES // (2 * held * pp * pp) * pp))
    schedule = decided.schedule if pp > 1 else "1f1b"
    if pp > MOST_RANKS or schedules.requires(schedule, pp, held, drawn):
        return f'<p class="note">{pp} ranks and {micros} micro-batches are too many to draw.</p>'
    spans = schedules.timeline(schedules.actions(schedule, pp, held, drawn), pp * held)
    length = max(span.end for span in spans.values())
    left, high = 90, 20 if pp <= 16 else 12
    scale = (WIDTH - left - 10) / length
    marks = [
        f'<text x="{left - 8}" y="{rank * (high + 4) + high - 5}" text-anchor="end">rank {rank}</text>'
        for rank in range(pp)
    ]
    for action, span in spans.items():
        y = schedules.rank_of_stage(schedule, action.stage, pp) * (high + 4)
        tip = f"{KIND_NAMES[action.kind]} of micro-batch {action.micro}, stage {action.stage}"
        wide = (span.end - span.start) * scale
        marks.append(_box(left + span.start * scale, y, wide, high, KINDS[action.kind], tip))
    kinds = {KIND_NAMES[kind]: KINDS[kind] for kind in dict.fromkeys(action.kind for action in spans)}
    legend, below = _legend(kinds, pp * (high + 4) + 10)
    after = sum(estimate.seconds.get(part, 0.0) for part in ("data_parallel", "optimizer", "offload", "waiting"))
    some = f"the first {drawn} of {micros} micro-batches" if drawn < micros else f"{micros} micro-batches"
    note = (
        f"{some}; {decided.schedule if pp > 1 else 'one stage'}. Data parallel, optimizer and the like take "
        f"{format_seconds(after)} of {format_seconds(estimate.step_seconds)} after them, or beside them unhidden."
    )
    return _svg([*marks, legend], below) + f'<p class="note">{escape(note)}</p>'


def _box(x: float, y: float, wide: float, high: float, colour: str, tip: str) -> str:
    if wide <= 0:
        return ""
    shape = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{high}" fill="{colour}" stroke="#fff" stroke-width="0.6"'
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
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(marks)}</svg>'
