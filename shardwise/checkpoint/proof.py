"""A resume proof: what a run recorded after a checkpoint, beside what a replay from there gives. Pure, no torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shardwise.checkpoint.manifest import Machine, Manifest
from shardwise.checkpoint.retention import Committed
from shardwise.errors import RecipeError
from shardwise.events.values import AnyEvent, Step


class Span(NamedTuple):
    """What is replayed: from after `first` up to step `until`; `last` is the checkpoint of that step, where there is
    one.
    """

    first: Committed
    until: int
    last: Committed | None


class Told(msgspec.Struct, frozen=True):
    """Loss and gradient norm of a step; a norm is None where nobody took it."""

    step: int
    loss: float
    grad_norm: float | None


class Proof(msgspec.Struct, frozen=True):
    """What a replay showed. `steps` that were compared; `step` and `what`: the first that differs. `roots`: of the
    checkpoint and of the replay, "" where none was saved at that step. `tensors`: those that differ, in order of name.
    `machine`: what is another here, so that other bits prove nothing.
    """

    begins: int
    steps: int
    step: int = 0
    what: str = ""
    roots: tuple[str, str] = ("", "")
    tensors: tuple[str, ...] = ()
    machine: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not self.what


def recorded(attempts: Iterable[Iterable[AnyEvent]]) -> dict[int, Told]:
    """What the run's last word on each step was: of an attempt's steps that a crash took back, the next one's are."""
    found: dict[int, Told] = {}
    for events in attempts:
        for event in events:
            if isinstance(event, Step):
                found[event.step] = Told(event.step, event.loss, event.grad_norm)
    return found


def choose(committed: Sequence[Committed], told: Mapping[int, Told], *, begin: int | None, steps: int | None) -> Span:
    """Where to begin, and how far to go: by default from the newest checkpoint that has a newer one, up to that.

    `committed` newest first. Raises: RecipeError where there is nothing to compare with.
    """
    wanted = [item for item in committed if begin is None or item.manifest.step == begin]
    for first in wanted:
        newer = [item for item in committed if item.manifest.step > first.manifest.step and _alike(first, item)]
        last = newer[-1] if newer else None
        if last is None and begin is None and len(wanted) > 1 and first is not wanted[-1]:
            continue
        known = [step for step in told if step > first.manifest.step]
        end = last.manifest.step if last is not None else max(known, default=0)
        until = end if steps is None else min(end, first.manifest.step + steps)
        if until > first.manifest.step:
            return Span(first, until, last if last is not None and last.manifest.step == until else None)
    where = "the run" if begin is None else f"step {begin}"
    raise RecipeError(
        f"There is no checkpoint of {where} after which something was recorded under the same plan.",
        why="a replay is compared with what the run recorded after the checkpoint that it begins at",
        fix="shardwise checkpoints list RUN shows them; keep more with checkpoint.keep",
    )


def compare(span: Span, told: Mapping[int, Told], replayed: Mapping[int, Told], manifest: Manifest) -> Proof:
    """`manifest` is that of the replay's checkpoint after its last step."""
    first = span.first.manifest
    steps = range(first.step + 1, span.until + 1)
    machine = other_machine(first.machine, manifest.machine)
    proof = Proof(first.step, len(steps), machine=machine)
    for step in steps:
        what = _differs(told.get(step), replayed.get(step))
        if what:
            return msgspec.structs.replace(proof, step=step, what=what)
    if span.last is None:
        return proof
    kept = span.last.manifest
    proof = msgspec.structs.replace(proof, roots=(kept.root, manifest.root))
    if kept.root and kept.root != manifest.root:
        sums = {entry.name: entry.sum for entry in manifest.tensors}
        apart = tuple(e.name for e in kept.tensors if e.name in sums and e.sum != sums[e.name])
        what = f"the root: {apart[0]} first" if apart else "the root: no tensor, but the JSON of the state"
        return msgspec.structs.replace(proof, step=span.until, what=what, tensors=apart)
    return proof


def other_machine(before: Machine, now: Machine) -> tuple[str, ...]:
    """On what bits depend, and is another now."""
    lines = [
        f"{name} {version} -> {now.versions.get(name, 'absent')}"
        for name, version in before.versions.items()
        if now.versions.get(name) != version
    ]
    if before.torch_threads != now.torch_threads:
        lines.append(f"torch's threads {before.torch_threads} -> {now.torch_threads}")
    if before.cpu_capability != now.cpu_capability:
        lines.append(f"the CPU's instructions {before.cpu_capability} -> {now.cpu_capability}")
    if before.revision and now.revision and before.revision != now.revision:
        lines.append(f"the code's revision {before.revision[:12]} -> {now.revision[:12]}")
    return tuple(lines)


def _alike(one: Committed, other: Committed) -> bool:
    """Whether the same plan saved both: only then are the bits to be the same."""
    return (one.manifest.world, one.manifest.decision) == (other.manifest.world, other.manifest.decision)


def _differs(before: Told | None, now: Told | None) -> str:
    if now is None:
        return "the replay did not come so far"
    if before is None:
        return "the run recorded nothing of it"
    if not _equal(before.loss, now.loss):
        return f"loss {before.loss!r}, and {now.loss!r} in the replay"
    if not _equal(before.grad_norm, now.grad_norm):
        return f"gradient norm {before.grad_norm!r}, and {now.grad_norm!r} in the replay"
    return ""


def _equal(before: float | None, now: float | None) -> bool:
    """To the bit; what is no number is equal to what is none."""
    return before == now or (before is not None and now is not None and before != before and now != now)
