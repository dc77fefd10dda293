"""What `shardwise plan` found, as text and JSON: the best plans with their intervals, why, and answers."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from shardwise.plan.automatic import Searched, share, words
from shardwise.plan.choice import Choice
from shardwise.plan.estimate import Estimate, Interval
from shardwise.plan.plan import Decision, Plan
from shardwise.plan.questions import WhatIf
from shardwise.plan.schedules import in_runs
from shardwise.plan.shortfall import Shortfall
from shardwise.plan.violation import Violation
from shardwise.units import format_bytes, format_count, format_seconds

HEAD = ("", "plan", "micro-batch", "recompute", "step", "80 %", "tokens/s a GPU", "MFU", "memory", "80 %")
Said = Callable[[float], str]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
# What a part of the step says about what to change.
MEANS = {
    "matmul": "arithmetic: faster GPUs or fp8 would help, another split hardly",
    "attention": "attention: shorter sequences or a window would help",
    "memory_bound": "memory bandwidth: compiled blocks save passes over memory",
    "tensor_parallel": "the links in a node, by tensor parallel",
    "context_parallel": "passing keys and values around, by context parallel",
    "expert": "sending tokens to experts",
    "data_parallel": "the network, by gradients and weights: a larger batch or a faster network would help",
    "waiting": "waiting for the slowest of many machines",
    "pipeline_transfers": "passing activations between stages",
    "bubble": "waiting in the pipeline: more micro-batches would help",
    "optimizer": "the optimizer's passes over memory",
    "host": "starting kernels: larger micro-batches or compiled blocks would help",
    "offload": "the link to the host",
}


class Planned(NamedTuple):
    """All that is told. thumb: the rule of thumb's plan, and what it takes where it is a valid one."""

    searched: Searched
    plan: Plan | None
    violations: tuple[Violation, ...]
    thumb: tuple[Plan, Choice | None]
    what_ifs: tuple[WhatIf, ...] = ()
    answers: tuple[str, ...] = ()
    values: Mapping[str, Any] = MappingProxyType({})
    assumed: tuple[str, ...] = ()
    shortfall: Shortfall | None = None
    reason: str = ""


def text(told: Planned) -> str:
    """For a person."""
    done = told.searched
    lines = [_head(told), f"{done.found.searched:,} plans searched in {format_seconds(done.seconds)}"]
    chosen = done.chosen
    if chosen is None:
        return "\n".join([*lines, "", *_nothing(told)])
    lines += ["", *_table(done.candidates, chosen, done.subject.limit), "", "why", *_why(told, chosen)]
    if told.what_ifs:
        lines += ["what if", *(f"  {_what_if(one)}" for one in told.what_ifs)]
    lines += ["answers", *(f"  {answer}" for answer in told.answers)] if told.answers else []
    return "\n".join(lines)


def _head(told: Planned) -> str:
    subject = told.searched.subject
    arch, work, cluster = subject.workload.arch, subject.workload, subject.cluster
    active = f", {format_count(arch.active_parameters())} active" if arch.experts else ""
    model = f"{arch.name}: {format_count(arch.parameters())} parameters{active}, {arch.num_layers} layers"
    gpus = f"{subject.task.world} {'CPU cores' if cluster.kind == 'cpu' else cluster.device.name}"
    asked = f" ({cluster.asked})" if cluster.asked not in ("", cluster.name) else ""
    step = f"{work.global_batch:,} samples of {work.sequence_length:,} tokens a step, {work.precision}"
    assumed = f"; assumed: {', '.join(told.assumed)}" if told.assumed else ""
    measured = f"\nmeasured values are used: {cluster.measured.by}" if cluster.measured else ""
    return f"{model}\n{cluster.name}{asked}: {gpus}{measured}\n{step}{assumed}"


def _table(told: tuple[Choice, ...], chosen: Choice, limit: float) -> list[str]:
    rows = [
        list(HEAD),
        *(cells(number, one, one == chosen) for number, one in enumerate(told, 1)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [_line(row, widths) for row in rows]
    limits = " or ".join(dict.fromkeys(format_bytes(size) for size in (limit, *_limits(told))))
    lines.append(f"memory: of the fullest rank, of {limits}; MFU: causal attention counts as half")
    if any(one.planned_only for one in told):
        lines.append("*  planned only: this engine does not run it yet" + _reasons(told))
    return lines


def _limits(told: tuple[Choice, ...]) -> list[float]:
    """Bytes of the devices that the fullest ranks have, which differ where machines do."""
    return sorted({one.estimate.memory_limit_bytes for one in told})


def _line(row: list[str], widths: list[int]) -> str:
    """Words to the left, numbers to the right."""
    words_end = 4
    cells = [cell.ljust(width) for cell, width in zip(row[:words_end], widths[:words_end], strict=True)]
    cells += [cell.rjust(width) for cell, width in zip(row[words_end:], widths[words_end:], strict=True)]
    return "  ".join(cells).rstrip()


def _reasons(told: tuple[Choice, ...]) -> str:
    found = dict.fromkeys(reason for one in told for reason in one.planned_only)
    return f" ({'; '.join(found)})" if found else ""


def cells(number: int, one: Choice, chosen: bool) -> list[str]:
    """A line of the table."""
    decided, estimate = one.decision, one.estimate
    mark = "*" if one.planned_only else ">" if chosen else ""
    return [
        f"{mark:<1}{number:>2}",
        name(decided),
        f"{decided.micro_batch} x {_counts(decided)}",
        decided.recompute,
        format_seconds(estimate.step_seconds),
        _between(estimate.step_seconds_interval, format_seconds),
        format_count(estimate.tokens_per_second_per_gpu),
        "—" if estimate.mfu is None else share(estimate.mfu, 1),
        format_bytes(estimate.memory_bytes),
        _between(estimate.memory_bytes_interval, format_bytes),
    ]


def _counts(decided: Decision) -> str:
    """Micro-batches of a rank; of each group of machines where they are not equal."""
    return str(decided.accumulation) if decided.shares == "equal" else " / ".join(map(str, decided.shares))


def _between(ends: Interval, said: Said) -> str:
    """Both ends, their unit once where it is the same: 37 - 51 s."""
    low, high = (said(end).split() for end in ends)
    alike = len(low) == len(high) == 2 and low[1] == high[1]
    return f"{low[0] if alike else ' '.join(low)} - {' '.join(high)}"


def name(decided: Decision) -> str:
    """A plan in a few words: its degrees and options that are not the plainest."""
    mesh = decided.mesh
    degrees = " x ".join(f"{axis} {degree}" for axis in AXES if axis != "ep" and (degree := getattr(mesh, axis)) > 1)
    parts = [degrees or "one rank"]
    parts += [f"ep {mesh.ep}"] if mesh.ep > 1 else []
    parts += [f"zero {decided.zero}"] if mesh.data_parallel > 1 else []
    if mesh.pp > 1:
        held = f" x{decided.stages_per_rank}" if decided.stages_per_rank > 1 else ""
        parts.append(f"{decided.schedule}{held}")
    parts += [f"stages of {in_runs(decided.stage_blocks)} blocks"] if decided.stage_blocks != "even" else []
    parts += ["compiled"] if decided.compile == "blocks" else []
    parts += ["no sequence parallel"] if decided.sequence_parallel is False else []
    parts += [f"offload to {decided.offload}"] if decided.offload != "none" else []
    parts += [f"buckets of {decided.bucket_cap_mb} MB"] if decided.bucket_cap_mb != "default" else []
    return ", ".join(parts)


def _why(told: Planned, chosen: Choice) -> list[str]:
    estimate = chosen.estimate
    largest = max(estimate.seconds, key=lambda part: estimate.seconds[part])
    lines = [
        f"time    {_parts(estimate.seconds, estimate.step_seconds)}",
        f"memory  {_parts(estimate.memory, sum(estimate.memory.values()), format_bytes)}",
        f"bound   {MEANS.get(largest, words(largest))}",
        f"thumb   {_thumb(told, estimate)}",
    ]
    lines += [f"note    {one}" for one in told.searched.subject.workload.arch.left_out()]
    if told.plan is not None:
        lines += [f"runs    not as it is: {one.what} fix: {one.fix}" for one in told.violations]
    if told.searched.running and told.searched.candidates[0].planned_only:
        gain = estimate.step_seconds / told.searched.candidates[0].estimate.step_seconds - 1
        lines.append(f"ahead   what this engine does not run yet would be {gain:.0%} faster")
    return [f"  {line}" for line in lines]


def _parts(parts: dict[str, float], whole: float, said: Said | None = None) -> str:
    """Parts of a percent and more, the largest first."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{words(part)} {said(value) if said else share(value, whole)}"
        for part, value in ordered
        if value >= 0.01 * whole
    )


def _thumb(told: Planned, estimate: Estimate) -> str:
    made, taken = told.thumb
    said = f"the rule of thumb takes {name(made.decision)}, micro-batch {made.decision.micro_batch}"
    if made.decision.recompute != "none":
        said += f", recompute {made.decision.recompute}"
    if taken is None:
        return f"{said}, which is no valid plan here"
    other = taken.estimate
    over = other.memory_bytes_interval[1] - other.memory_limit_bytes
    if over > 0:
        return f"{said}: {format_bytes(over)} more than fits for sure"
    slower = other.step_seconds / estimate.step_seconds - 1
    return f"{said}: {format_seconds(other.step_seconds)} a step" + (
        f", {slower:.0%} slower" if slower >= 0.005 else ", as fast" if slower > -0.005 else f", {-slower:.0%} faster"
    )


def _what_if(one: WhatIf) -> str:
    change = one.speedup - 1
    how = "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} {'faster' if change > 0 else 'slower'}"
    other = "" if one.same_plan else ", with another of these plans"
    tight = "" if one.fits else "; none of these plans fits then"
    return f"{one.what:<34} {format_seconds(one.step_seconds):>8} a step, {how}{other}{tight}"


def _nothing(told: Planned) -> list[str]:
    short = told.shortfall
    if short is None:
        return [f"no plan is valid: {told.reason}"]
    near, estimate = short.closest.decision, short.closest.estimate
    lines = [
        f"nothing fits: {format_bytes(short.short_bytes)} short a GPU",
        f"  nearest  {name(near)}, micro-batch {near.micro_batch}, recompute {near.recompute}: "
        f"{format_bytes(estimate.memory_bytes)} (80 %: up to {format_bytes(estimate.memory_bytes_interval[1])}) "
        f"of {format_bytes(estimate.memory_limit_bytes)}",
        f"  most     {words(short.binding)}: {format_bytes(short.binding_bytes)}",
        "what helps, each tried",
    ]
    changes = [
        f"  {one.what}: fits, {format_seconds(one.step_seconds)} a step on {one.gpus} ranks ({' '.join(one.arguments)})"
        for one in short.changes
    ]
    return [*lines, *(changes or ["  none of more machines, larger GPUs and shorter sequences: a smaller model"])]


def as_json(told: Planned) -> str:
    """For a program: one object, `candidates` best first."""
    done = told.searched
    made, taken = told.thumb
    found = {
        "plan": msgspec.to_builtins(told.plan),
        "violations": msgspec.to_builtins(told.violations),
        "candidates": [candidate(one) for one in done.candidates],
        "searched": done.found.searched,
        "costed": done.found.costed,
        "search_seconds": done.seconds,
        "rule_of_thumb": None if taken is None else candidate(taken),
        "rule_of_thumb_why": list(made.why),
        "what_if": msgspec.to_builtins(told.what_ifs),
        "answers": dict(told.values),
        "assumed": list(told.assumed),
        "shortfall": _shortfall(told.shortfall),
        "reason": told.reason,
        "measured": None if done.subject.cluster.measured is None else done.subject.cluster.measured.by,
    }
    return json.dumps(found)


def candidate(one: Choice) -> dict[str, Any]:
    """A plan and its estimate, flat."""
    decided, estimate = one.decision, one.estimate
    options = ("zero", "micro_batch", "accumulation", "schedule", "stages_per_rank", "recompute", "offload", "compile")
    return {
        "degrees": msgspec.to_builtins(decided.mesh),
        **{option: getattr(decided, option) for option in options},
        "sequence_parallel": decided.mesh.tp > 1 and decided.sequence_parallel is not False,
        "bucket_cap_mb": decided.bucket_cap_mb,
        "stage_blocks": decided.stage_blocks,
        "shares": decided.shares,
        "step_seconds": estimate.step_seconds,
        "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu,
        "mfu": estimate.mfu,
        "memory_bytes": estimate.memory_bytes,
        "memory_limit_bytes": estimate.memory_limit_bytes,
        "intervals": {
            "step_seconds": estimate.step_seconds_interval,
            "tokens_per_second_per_gpu": estimate.tokens_per_second_per_gpu_interval,
            "mfu": estimate.mfu_interval,
            "memory_bytes": estimate.memory_bytes_interval,
        },
        "seconds": estimate.seconds,
        "memory": estimate.memory,
        "runs": not one.planned_only,
        "planned_only": list(one.planned_only),
    }


def _shortfall(short: Shortfall | None) -> dict[str, Any] | None:
    if short is None:
        return None
    return {**msgspec.to_builtins(short), "closest": candidate(short.closest)}
