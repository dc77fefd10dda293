"""What `shardwise verify` shows: the plan, the bytes of fake ranks, what parity compared, and the verdict last."""

from collections.abc import Iterable

from shardwise.plan.plan import Plan
from shardwise.report import plan as plan_report
from shardwise.units import format_bytes, format_seconds
from shardwise.verify.values import CATEGORIES, Collective, DryRun, RankRun
from shardwise.verify.verdict import Check, Verdict

PARITY_DOES_NOT_SHOW = (
    "the plan's own precision, sizes, compiled kernels and NCCL: it compares fp64 and fp32 on CPU ranks"
)


def head(plan: Plan) -> str:
    return f"plan     {plan_report.line(plan)}"


# ---------------------------------------------------------------- the dry run


def dry_run(run: DryRun) -> str:
    """A row for each distinct rank at its peak, its collectives, and what would end the run."""
    limit = f"{format_bytes(run.limit_bytes)} usable"
    if not run.ranks:
        lines = [f"dry run  no rank of {run.world} could be run, {format_seconds(run.seconds)}"]
    else:
        lines = [
            f"dry run  {len(run.ranks)} distinct of {run.world} fake ranks, {limit}, {format_seconds(run.seconds)}"
        ]
        lines += _table(run)
        fullest = run.fullest
        if fullest is not None:
            lines += [f"  one step of rank {fullest.rank} sends", *_collectives(fullest.collectives)]
    lines += [f"  {one}" for one in run.said]
    lines += [f"  FAILED  {one.what}\n    why: {one.why}\n    fix: {one.fix}" for one in run.violations]
    lines += [
        f"  FAILED  ranks {one.ranks[0]} and {one.ranks[1]} differ along {one.axis} at call {one.position + 1}: "
        f"{one.first} and {one.second}"
        for one in run.mismatches
    ]
    lines.append("  not in these bytes:")
    lines += [f"    {one}" for one in run.not_covered]
    return "\n".join(lines)


def _table(run: DryRun) -> list[str]:
    """Right-aligned columns; categories that no rank has are left out."""
    used = [name for name in CATEGORIES if any(getattr(one.peak.live, name) for one in run.ranks)]
    rows = [["rank", "stands for", "peak in", *used, "total"]]
    for one in run.ranks:
        live = one.peak.live
        sizes = [format_bytes(getattr(live, name)) for name in used]
        rows.append([str(one.rank), str(one.stands_for), one.peak.phase, *sizes, format_bytes(live.total)])
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _collectives(calls: Iterable[Collective]) -> list[str]:
    """Calls and bytes by kind and axis, in the order in which each first comes."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for call in calls:
        entry = sums.setdefault((call.kind, call.axis, call.size), [0, 0])
        entry[0] += call.times
        entry[1] += call.times * call.bytes
    rows = [
        [kind, f"over {axis} ({size})", f"{times} calls", format_bytes(total)]
        for (kind, axis, size), (times, total) in sums.items()
    ]
    return [f"  {line}" for line in _aligned(rows)] if rows else ["    nothing"]


def peak(run: DryRun) -> str:
    fullest: RankRun | None = run.fullest
    return f"peak {format_bytes(fullest.peak.live.total)} a rank" if fullest is not None else ""


# ---------------------------------------------------------------- parity


def parity(found: Verdict) -> str:
    """What was compared, the worst difference against its bound, and what it cannot show."""
    if found.skipped:
        return f"parity   not run: {found.skipped}"
    lines = [f"parity   {found.shrunk}; against one process by hand, {format_seconds(found.seconds)}"]
    rows = [[one.tier, one.what, _measured(one), "passed" if one.passed else "FAILED"] for one in found.checks]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if found.zero_gradients:
        lines.append(f"  true gradient zero, theirs is noise: {', '.join(found.zero_gradients)}")
    lines += [f"  {note}" for note in found.notes]
    lines.append(f"  not shown: {PARITY_DOES_NOT_SHOW}")
    return "\n".join(lines)


def _measured(check: Check) -> str:
    if check.bound == 0:
        return "equal" if check.passed else "differs"
    return f"{check.worst:.1e} of {check.bound:.1e}"


# ---------------------------------------------------------------- the verdict


def passed(dry: DryRun | None, found: Verdict | None) -> bool:
    """Whether every half that was asked for passed; one that could not be run did not."""
    return (dry is None or dry.passed) and (found is None or found.passed)


def verdict(dry: DryRun | None, found: Verdict | None) -> str:
    if passed(dry, found):
        said = [peak(dry)] if dry is not None else []
        said += [f"{found.ranks} ranks are one rank"] if found is not None else []
        return f"verdict  passed: {'; '.join(said)}"
    lines = []
    if dry is not None and not dry.passed:
        first = dry.violations[0].what if dry.violations else "ranks of one group do not make the same calls"
        lines.append(f"the dry run: {first}")
    if found is not None and found.skipped:
        lines.append("parity was not run")
    elif found is not None and not found.passed:
        lines.append(_fault(found))
    return "verdict  FAILED: " + "\n         ".join(lines)


def _fault(found: Verdict) -> str:
    fault = found.fault
    if fault is None:
        return "ranks are not one rank"
    where = f"first at {fault.tensor} ({fault.layer})" if fault.tensor else fault.check
    axis = f", axis {fault.axis}" if fault.axis else ""
    return f"{fault.check}: {where}{axis}\n         likely cause: {fault.cause}\n         {fault.numbers}"
