"""What `shardwise checkpoints` says, as text and as JSON."""

import datetime
import json
from collections.abc import Sequence

import msgspec

from shardwise.checkpoint.audit import Audit, Fault, Item
from shardwise.checkpoint.compare import Change, Difference, TensorDifference
from shardwise.checkpoint.export import Exported
from shardwise.checkpoint.proof import Proof, Span
from shardwise.checkpoint.retention import Retained
from shardwise.data import ledger as samples
from shardwise.units import format_bytes

_SHOWN = 20


def items(found: Sequence[Item], where: str) -> str:
    """A line each, newest first: step, when, why, world and plan, bytes, root, state."""
    if not found:
        return f"no checkpoints in {where}"
    rows = [_row(item) for item in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([where, *lines])


def _row(item: Item) -> list[str]:
    when = datetime.datetime.fromtimestamp(item.created, datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    whole = item.state == "whole"
    ranks = f"{item.world} rank{'s' if item.world > 1 else ''}" + (f" ({item.plan})" if item.plan else "")
    cells = [
        f"step {item.step}",
        when if whole else "",
        ranks if whole else "",
        format_bytes(item.bytes) if whole else "",
    ]
    root = f"root {item.root[:12]}" if item.root else "no root" if whole else ""
    state = ", ".join([item.state, *item.marks])
    return [*cells, root, state, f"{item.folder}: {item.why}"]


def items_json(found: Sequence[Item]) -> str:
    return json.dumps({"checkpoints": msgspec.to_builtins(found)})


def audit(found: Audit) -> str:
    if not found.faults:
        root = f"root {found.root}" if found.root else "no root (version 1)"
        lines = [f"{found.folder}: whole, {format_bytes(found.bytes)}, {root}"]
    else:
        lines = [f"{found.folder}: damaged", *(f"  {fault(one)}" for one in found.faults[:_SHOWN])]
        lines += [f"  and {len(found.faults) - _SHOWN} more"] if len(found.faults) > _SHOWN else []
    if found.foreign:
        lines.append(f"  not its own, never read: {', '.join(found.foreign)}")
    return "\n".join(lines)


def fault(one: Fault) -> str:
    """`rank-00001.safetensors, bytes 512 to 1023, model/a: has another digest than was saved`."""
    where = [one.file] if one.file else []
    where += [f"bytes {one.begin} to {one.end - 1}"] if one.end else []
    where += [one.tensor] if one.tensor else []
    return f"{', '.join(where)}: {one.what}"


def audits_json(found: Sequence[Audit]) -> str:
    return json.dumps({"checkpoints": msgspec.to_builtins(found)})


def ledger(folder: str, found: samples.Proof) -> str:
    """`each once: 1,560 samples in 260 steps of 14 attempts`, what was passed over, and what came twice or never."""
    attempts = f"{found.attempts} attempt{'s' if found.attempts != 1 else ''}"
    count = f"{found.trained:,} samples in {found.steps:,} steps of {attempts}"
    lines = [f"{folder}: {'not each once' if found.faults else 'each once'}: {count}"]
    lines += _some("faults", list(found.faults))
    over = [f"{one.first} to {one.end - 1}, before step {one.first_step}: {one.why}" for one in found.passed_over]
    return "\n".join([*lines, *_some("samples passed over on purpose", over)])


def ledger_json(folder: str, segments: Sequence[samples.Segment], found: samples.Proof) -> str:
    told = [msgspec.structs.asdict(one) for one in segments]
    proof = {"trained": found.trained, "steps": found.steps, "attempts": found.attempts, "faults": found.faults}
    return json.dumps({"folder": folder, **proof, "segments": told})


def exported(folder: str, told: Exported) -> str:
    """Where a model was written to."""
    files = f"{told.files} files" if told.files > 1 else "one file"
    return f"{folder}: {told.tensors} tensors, {format_bytes(told.bytes)} of {told.dtype} in {files}: {told.folder}"


def exported_json(told: Exported) -> str:
    return json.dumps({**told._asdict(), "folder": str(told.folder)})


def difference(told: Difference) -> str:
    """Whether two checkpoints hold one state; else what differs."""
    roots = " and ".join(root or "none" for root in dict.fromkeys(told.roots))
    lines = [f"{'the same state' if told.same else 'different states'}: root {roots}"]
    lines += _some("tensors", [_tensor(one) for one in told.tensors])
    lines += _some("state", [_change(one) for one in told.state])
    lines += _some("settings (not part of the state)", [_change(one) for one in told.settings])
    return "\n".join(lines)


def _tensor(one: TensorDifference) -> str:
    if one.what:
        return f"{one.name}: {one.what}"
    largest = "" if one.largest is None else f", by {one.largest:.3g} at most"
    return f"{one.name}: {one.values} of {one.numel} values{largest}"


def _change(one: Change) -> str:
    return f"{one.path}: {one.before} -> {one.after}"


def _some(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"{title}, {len(lines)}:", *(f"  {line}" for line in lines[:_SHOWN]), *more]


def difference_json(told: Difference) -> str:
    return json.dumps(msgspec.to_builtins(told))


def pruned(done: Retained, dry_run: bool) -> str:
    verb = "would delete" if dry_run else "deleted"
    lines = [f"{verb} {folder}" for folder in done.deleted] or ([] if done.notes else ["nothing to delete"])
    return "\n".join([*lines, *done.notes])


def pruned_json(done: Retained, dry_run: bool) -> str:
    return json.dumps({"deleted": done.deleted, "notes": done.notes, "dry_run": dry_run})


def replay(span: Span, world: int) -> str:
    """What would be replayed."""
    root = "and the root" if span.last is not None else "(no checkpoint of that step: no root)"
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    steps = f"steps {span.first.manifest.step + 1} to {span.until}"
    return f"would train {steps} again on {ranks}, from {span.first.folder}: losses, norms {root}"


def replay_json(span: Span) -> str:
    last = "" if span.last is None else span.last.folder
    return json.dumps({"first": span.first.folder, "until": span.until, "last": last, "dry_run": True})


def proof(found: Proof) -> str:
    """`the same: steps 5 to 8, loss and gradient norm to the bit, root 0123...`, or what differs first."""
    begin, end = found.begins + 1, found.begins + found.steps
    if found.same:
        root = f", root {found.roots[0]}" if found.roots[0] else "; no root was saved at that step"
        lines = [f"the same: steps {begin} to {end}, loss and gradient norm to the bit{root}"]
    else:
        lines = [f"not the same: step {found.step} of {begin} to {end}: {found.what}"]
        lines += _some("tensors that differ", list(found.tensors))
    if found.machine:
        lines.append(f"this is not the machine that recorded it: {'; '.join(found.machine)}")
    return "\n".join(lines)


def proof_json(found: Proof) -> str:
    return json.dumps({"same": found.same, **msgspec.to_builtins(found)})
