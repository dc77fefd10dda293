"""A score of the cost model as text and JSON: errors by source, coverage, out of memory, regret, what was skipped."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from shardwise.cost.scoring import Errors, Overall, Regret, Score, Source

WORST_SWEEPS = 5


def as_json(score: Score) -> str:
    """One object."""
    return msgspec.json.format(msgspec.json.encode(score), indent=2).decode()


def text(score: Score) -> str:
    """A table a line for each family, then what the figures mean together."""
    overall = score.overall
    lines = [_header(), *(_line(name, source) for name, source in score.sources.items())]
    whole = Source((), overall.time, overall.memory, overall.small_memory, overall.dense_time, overall.naive)
    lines += [_line("mean of sources", whole), "", *_summary(score)]
    return "\n".join(lines)


def _header() -> str:
    over = f"{'':<22}{'step time':^30}{'memory, 5 GB and more':^30}{'dense: ours, naive':^20}"
    columns = (
        f"{'source':<22}" + f"{'rows':>6}{'median':>8}{'p90':>8}{'in 80 %':>8}" * 2 + f"{'median':>10}{'median':>10}"
    )
    return f"{over.rstrip()}\n{columns}"


def _line(name: str, source: Source) -> str:
    pair = f"{share(source.dense_time.median):>10}{share(source.naive.median):>10}"
    return f"{name[:21]:<22}{_cells(source.time)}{_cells(source.memory)}{pair}".rstrip()


def _cells(errors: Errors) -> str:
    if not errors.rows:
        return f"{'-':>6}{'-':>8}{'-':>8}{'-':>8}"
    return f"{errors.rows:>6}{share(errors.median):>8}{share(errors.p90):>8}{share(errors.coverage, 0):>8}"


def share(value: float | None, digits: int = 1) -> str:
    """`12.3%`; a dash where there is none."""
    return "-" if value is None else f"{value * 100:.{digits}f}%"


def _summary(score: Score) -> list[str]:
    overall, regret = score.overall, score.overall.regret
    lines = [
        f"errors are |predicted / measured - 1|; every source counts the same; intervals claim 80 %, and "
        f"{share(overall.interval_coverage, 0)} of the measurements lie in them",
        *_memory(overall),
    ]
    if regret.count:
        lines.append(
            f"choosing among measured plans: {regret.count} sweeps, the choice is slower than the best by "
            f"{share(regret.median)} (median), {share(regret.p90)} (90th percentile)"
        )
        lines += [_sweep(each) for each in regret.sweeps[:WORST_SWEEPS] if each.regret > 0]
    return lines + _skipped(score)


def _memory(overall: Overall) -> list[str]:
    if not overall.memory.rows + overall.small_memory.rows + overall.oom_rows:
        return ["memory: no row has both a measurement and a prediction"]
    return [
        f"memory below 5 GB: {overall.small_memory.rows} rows, median {share(overall.small_memory.median)}",
        f"out of memory: {overall.oom_called_fitting} of {overall.oom_rows} such runs were called fitting",
    ]


def _sweep(each: Regret) -> str:
    return (
        f"  {each.source} {each.model} on {each.cluster}: {each.plans} plans, chose {each.chosen_seconds:.4g} s, "
        f"best {each.best_seconds:.4g} s (+{share(each.regret)})"
    )


def _skipped(score: Score) -> list[str]:
    if not score.skipped:
        return [f"scored all {score.rows} rows"]
    # The part before a colon is the rule, what follows is the row's own.
    reasons: Sequence[tuple[str, int]] = Counter(each.reason.partition(":")[0] for each in score.skipped).most_common()
    head = f"skipped {len(score.skipped)} of {score.rows} rows (--json lists each):"
    return [head, *(f"  {count:>4}  {reason}" for reason, count in reasons)]
