"""What `shardwise dev chaos` shows: a row for each kind of fault, what the ledger proves, and the verdict last."""

import json
import statistics
from collections.abc import Sequence

from shardwise.units import format_seconds
from shardwise.verify.faults import Befell, Verdict


def text(verdict: Verdict, folder: str) -> str:
    """A table by kind and moment, then what was found."""
    lines = [f"{'fault':<38}  times  steps lost (most)  to the next step (median, most)  exit codes"]
    for name in sorted({str(one.fault) for one in verdict.befell}):
        lines.append(_row(name, [one for one in verdict.befell if str(one.fault) == name]))
    if verdict.proof is not None:
        proof = verdict.proof
        lines.append(
            f"ledger    {proof.trained} samples in {proof.steps} steps of {proof.attempts} attempts, each once"
            if not proof.faults
            else f"ledger    {len(proof.faults)} faults"
        )
    lines.append(
        f"weights   {'the bits of the undisturbed run' if verdict.same_bits else 'NOT the bits of the undisturbed run'}"
    )
    if verdict.late:
        lines.append(f"disk      {verdict.late} writes and syncs were late")
    if verdict.harmed:
        lines.append(f"store     {verdict.harmed} requests failed, or their answers did")
    lines += [f"never came: {fault}, the run was over before" for fault in verdict.not_reached]
    lines += [f"FOUND     {finding}" for finding in verdict.findings]
    count = len(verdict.befell)
    survived = "survived" if verdict.survived else "NOT survived"
    lines.append(f"{survived}: {count} faults, {verdict.starts} starts, {format_seconds(verdict.seconds)}; {folder}")
    return "\n".join(lines)


def _row(name: str, some: Sequence[Befell]) -> str:
    seconds = [one.seconds for one in some]
    codes = sorted({one.exit_code for one in some if one.exit_code is not None})
    lost = max(one.lost_steps for one in some)
    times = f"{format_seconds(statistics.median(seconds))}, {format_seconds(max(seconds))}"
    return f"{name:<38}  {len(some):>5}  {lost:>17}  {times:>31}  {', '.join(map(str, codes)) or 'went on'}"


def as_json(verdict: Verdict, folder: str) -> str:
    """One object; `survived` says whether nothing was lost."""
    faults = [
        {
            "fault": str(one.fault), "kind": one.fault.kind, "moment": one.fault.moment, "step": one.step,
            "exit_code": one.exit_code, "lost_steps": one.lost_steps, "seconds": one.seconds,
        }
        for one in verdict.befell
    ]  # fmt: skip
    return json.dumps(
        {
            "survived": verdict.survived,
            "findings": list(verdict.findings),
            "faults": faults,
            "not_reached": [str(one) for one in verdict.not_reached],
            "starts": verdict.starts,
            "same_bits": verdict.same_bits,
            "ledger_faults": None if verdict.proof is None else list(verdict.proof.faults),
            "seconds": verdict.seconds,
            "late": verdict.late,
            "harmed": verdict.harmed,
            "folder": folder,
        }
    )
