"""Judging: where N ranks differ from one process, and the likely cause. Pure; no torch.

A fault is told by its structure. Copies that should be equal and are not show the axis over which nothing was summed; a
factor shows what was scaled; which tensors differ shows a partial sum, an untied weight, a stage.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardwise.plan.mesh import AXES, MeshShape
from shardwise.verify.verdict import Check, Comparison, Fault, Kind, Masks, Resumed, Tensor, Told

# Of a factor that is a degree, after sums in another order.
RATIO_TOLERANCE = 1e-6


class Judged(NamedTuple):
    checks: tuple[Check, ...]
    fault: Fault | None


def layer(name: str) -> str:
    """The block that a tensor lies in, by the first index in its name; "outside the blocks" elsewhere."""
    parts = name.split(".")
    index = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: index + 1]) if index is not None else "outside the blocks"


def judge(compared: Comparison) -> Judged:
    """Every check of one training, and the fault that the first failing one shows."""
    checks, fault = [], None
    for find in (
        _samples, _initial, _counts, _forward, _first_loss, _gradients, _first_norm, _losses, _norms, _parameters,
        _evaluation,
    ):  # fmt: skip
        check, found = find(compared)
        checks.append(check)
        if not check.passed and fault is None:
            fault = found()
    return Judged(tuple(checks), fault)


Finding = tuple[Check, Callable[[], Fault]]


def _check(compared: Comparison, what: str, worst: float, bound: float) -> Check:
    worst = worst if math.isfinite(worst) else math.inf
    return Check(compared.tier, what, worst, bound, worst <= bound)


# ---------------------------------------------------------------- what was read, and what was counted


def _samples(compared: Comparison) -> Finding:
    """Ranks that differ in tp or pp alone read the same samples, and all others share the batch out."""
    wanted = sorted(compared.one.samples)
    mesh = compared.mesh
    seen = [told.samples for told in compared.ranks]
    first = [seen[r] for r in range(mesh.world) if mesh.coord(r).tp == 0 and mesh.coord(r).pp == 0]
    read = sorted(sample for samples in first for sample in samples)
    apart = next((a for a in ("tp", "pp", "cp") for r, q in _pairs(mesh, a) if seen[r] != seen[q]), "")
    check = _check(compared, "samples of the first step", 0.0 if read == wanted and not apart else 1.0, 0.0)

    def fault() -> Fault:
        numbers = f"{len(set(read))} different samples of {len(wanted)} were read, {len(read)} in all"
        if apart:
            return Fault(check.what, "", "", apart, f"ranks along {apart} read different samples", numbers)
        axis = next(
            (a for a in ("dp_replicate", "dp_shard") for r, q in _pairs(mesh, a) if set(seen[r]) & set(seen[q])), ""
        )
        cause = f"ranks along {axis} read the same samples" if axis else "samples of the global batch are missing"
        return Fault(check.what, "", "", axis, cause, numbers)

    return check, fault


def _counts(compared: Comparison) -> Finding:
    expected = compared.one.counts[:1]
    worst = max(_relative(told.counts[:1], expected) for told in compared.ranks)
    check = _check(compared, "tokens counted in the first step", worst, 0.0)

    def fault() -> Fault:
        found = next(t.counts[0] for t in compared.ranks if _relative(t.counts[:1], expected))
        numbers = f"{found:g} counted, {expected[0]:g} in the batch"
        axis, cause = _by_factor(compared, found / expected[0], "the count")
        return Fault(check.what, "", "", axis, cause or "a micro-batch was dropped, or counted twice", numbers)

    return check, fault


# ---------------------------------------------------------------- the forward pass


def _forward(compared: Comparison) -> Finding:
    """The squares of each block's output over the whole batch: the first block that differs, in the forward's order."""
    expected = {name: sum(values) for name, values in compared.one.outputs.items()}
    found = {name: _output(compared, name) for name in expected}
    worst = max((_relative((found[name],), (expected[name],)) for name in expected), default=0.0)
    # A sum of squares is as a norm is.
    check = _check(compared, "outputs of the blocks in the first step", worst, compared.bounds.norm)

    def fault() -> Fault:
        name = next(n for n in expected if not _relative((found[n],), (expected[n],)) <= check.bound)
        numbers = f"sum of its squares {found[name]:.12g}, in one process {expected[name]:.12g}"
        axis, cause = _cause_of_output(compared, name, list(expected))
        return Fault(check.what, f"output of {name}", name, axis, cause, numbers)

    return check, fault


def _output(compared: Comparison, name: str) -> float:
    """Data-parallel ranks add up. Of the others of one such rank equal numbers are copies, others are parts."""
    parts: dict[tuple[int, int], set[float]] = {}
    for rank, told in enumerate(compared.ranks):
        coord = compared.mesh.coord(rank)
        parts.setdefault((coord.dp_replicate, coord.dp_shard), set()).update(told.outputs.get(name, ()))
    return sum(value for values in parts.values() for value in sorted(values))


def _cause_of_output(compared: Comparison, name: str, order: list[str]) -> tuple[str, str]:
    """Only tp and pp touch what a block computes; its weights were right where this is asked."""
    mesh = compared.mesh
    stage = {n: mesh.coord(rank).pp for rank, told in enumerate(compared.ranks) for n in told.outputs}
    before = order[order.index(name) - 1] if order.index(name) else None
    if before is not None and stage.get(before) != stage.get(name):
        return "pp", f"what crosses from stage {stage.get(before)} to stage {stage.get(name)} is not what was sent"
    if mesh.tp > 1:
        return "tp", f"in {name} a sum or a gather over tp is missing or wrong: no other axis splits its forward"
    return "", f"{name} computes something else with the same weights: look at recompute, precision and its inputs"


# ---------------------------------------------------------------- losses


def _first_loss(compared: Comparison) -> Finding:
    return _loss(compared, "loss of the first step", lambda told: told.losses[:1])


def _losses(compared: Comparison) -> Finding:
    return _loss(compared, f"losses of {len(compared.one.losses)} steps", lambda told: told.losses)


def _evaluation(compared: Comparison) -> Finding:
    return _loss(compared, "evaluation on every rank", lambda told: (told.evaluation,))


def _loss(compared: Comparison, what: str, of: Callable[[Told], tuple[float, ...]]) -> Finding:
    expected = of(compared.one)
    worst = max(_relative(of(told), expected) for told in compared.ranks)
    check = _check(compared, what, worst, compared.bounds.loss)

    def fault() -> Fault:
        found = [of(told) for told in compared.ranks]
        step = next(i for i in range(len(expected)) if max(_relative(f[i : i + 1], expected[i : i + 1]) for f in found)
                    > check.bound)  # fmt: skip
        values = [f[step] for f in found]
        rank = max(range(len(values)), key=lambda r: _relative((values[r],), (expected[step],)))
        numbers = f"rank {rank}, step {step + 1}: {values[rank]:.12g}, one process {expected[step]:.12g}"
        axis = _axis_of_unequal(compared.mesh, range(len(values)), values)
        if axis:
            return Fault(
                what, "", "", axis, f"the loss is not agreed over {axis}: its ranks have different ones", numbers
            )
        axis, cause = _by_factor(compared, values[rank] / expected[step], "the loss")
        fallback = "forward computes something else" if step == 0 else "the update of the step before differs"
        return Fault(what, "", "", axis, cause or fallback, numbers)

    return check, fault


# ---------------------------------------------------------------- tensors


def _of(compared: Comparison, kind: Kind) -> list[Tensor]:
    return [tensor for tensor in compared.tensors if tensor.kind == kind]


def _initial(compared: Comparison) -> Finding:
    return _tensors(compared, "initial value", "initial values", 0.0, backward=False)


def _gradients(compared: Comparison) -> Finding:
    return _tensors(compared, "gradient", "gradients of the first step", compared.bounds.gradient, backward=True)


def _parameters(compared: Comparison) -> Finding:
    what = f"{compared.parameters} after {len(compared.one.losses)} steps"
    return _tensors(compared, "parameter", what, compared.bounds.parameter, backward=False)


def _tensors(compared: Comparison, kind: Kind, what: str, bound: float, *, backward: bool) -> Finding:
    noise = set(compared.zero_gradients) if kind == "parameter" else set()
    tensors = [tensor for tensor in _of(compared, kind) if tensor.name not in noise]
    failing = [t for t in tensors if not t.worst <= bound or _unequal(compared, t)]
    worst = max((t.worst for t in tensors), default=math.inf)
    check = Check(compared.tier, what, worst, bound, not failing)

    def fault() -> Fault:
        ordered = failing[::-1] if backward else failing
        first = ordered[0]
        axis, cause = _cause(compared, tensors, failing, kind)
        numbers = (
            f"{first.name}: {first.worst:.2g} of its size, bound {bound:.0g}; {len(failing)} of {len(tensors)} differ"
        )
        return Fault(what, first.name, layer(first.name), axis, cause, numbers)

    return check, fault


def _cause(compared: Comparison, tensors: list[Tensor], failing: list[Tensor], kind: Kind) -> tuple[str, str]:
    """The axis and the likely cause, told by which tensors differ and how; the sharpest evidence first."""
    mesh, names = compared.mesh, {tensor.name for tensor in failing}
    swapped = [tensor for tensor in failing if tensor.twin and layer(tensor.twin) != layer(tensor.name)]
    if swapped:
        one, other = layer(swapped[0].name), layer(swapped[0].twin)
        axis = "pp" if mesh.pp > 1 else ""
        return axis, f"{one} and {other} are swapped" + (" between the stages" if axis else "")
    tied = {name for group in compared.ties for name in group}
    if names <= tied:
        return ("pp" if mesh.pp > 1 else ""), "a tied weight came untied: its two uses are not one weight any more"
    axis = next((a for t in failing if (a := _axis_of_unequal(mesh, t.ranks, t.copies))), "")
    if axis == "tp" and kind == "gradient":
        return axis, "a partial sum is not reduced over tp: its ranks hold different copies of what is whole on each"
    if axis:
        done = {"initial value": "initialised equally", "gradient": "summed", "parameter": "updated equally"}[kind]
        return axis, f"not {done} over {axis}: ranks along it hold different copies"
    stage = _only_stage(mesh, tensors, failing)
    if stage is not None:
        return "pp", f"only stage {stage} differs: its gradients are scaled, or it lost a micro-batch"
    if all(t.residual < RATIO_TOLERANCE for t in failing) and _same(t.ratio for t in failing):
        axis, cause = _by_factor(compared, failing[0].ratio, f"the {kind}")
        if cause:
            return axis, cause
    if mesh.tp > 1 and all("tp" not in t.split for t in failing) and any("tp" in t.split for t in tensors):
        return "tp", "a partial sum is not reduced over tp: only tensors that are whole on every tp rank differ"
    layers = {layer(name) for name in names}
    if len(layers) == 1:
        return "", f"only {layers.pop()} differs: look at its own passes (recompute, roles, precision)"
    return "", "no known structure: look at the first tensor that differs"


def _unequal(compared: Comparison, tensor: Tensor) -> bool:
    """Whether ranks that hold one tensor hold other bits of it."""
    return len(set(tensor.copies)) > 1


def _only_stage(mesh: MeshShape, tensors: list[Tensor], failing: list[Tensor]) -> int | None:
    """The one pipeline coordinate that holds all that differs, where others are right."""

    def at(tensor: Tensor) -> set[int]:
        return {mesh.coord(rank).pp for rank in tensor.ranks}

    held = set().union(*(at(tensor) for tensor in failing))
    everywhere = set().union(*(at(tensor) for tensor in tensors))
    return held.pop() if mesh.pp > 1 and len(held) == 1 and len(everywhere) > 1 else None


# ---------------------------------------------------------------- the gradient norm


def _first_norm(compared: Comparison) -> Finding:
    return _norm(compared, "gradient norm of the first step", 1)


def _norms(compared: Comparison) -> Finding:
    return _norm(compared, f"gradient norms of {len(compared.one.norms)} steps", len(compared.one.norms))


def _norm(compared: Comparison, what: str, steps: int) -> Finding:
    expected = compared.one.norms[:steps]
    worst = max(_relative(told.norms[:steps], expected) for told in compared.ranks)
    check = _check(compared, what, worst, compared.bounds.norm)

    def fault() -> Fault:
        rank = max(range(len(compared.ranks)), key=lambda r: _relative(compared.ranks[r].norms[:steps], expected))
        found = compared.ranks[rank].norms
        numbers = f"rank {rank}: {found[0]:.12g}, one process {expected[0]:.12g}"
        for explains, axis, cause in _norms_by_fault(compared, rank):
            if _relative((explains,), found[:1]) < RATIO_TOLERANCE:
                return Fault(what, "", "", axis, cause, numbers)
        return Fault(what, "", "", "", "the norm alone differs, by no known factor", numbers)

    return check, fault


def _norms_by_fault(compared: Comparison, rank: int) -> Iterable[tuple[float, str, str]]:
    """What a rank's norm would be under each known fault: the norm, the axis, the cause."""
    mesh = compared.mesh
    here = mesh.coord(rank)
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1]
    for axis in axes:
        line = [r for r in range(mesh.world) if getattr(mesh.coord(r), axis) == getattr(here, axis)]
        yield _norm_over(compared, line, ()), axis, f"the norm's squares are not summed over {axis}"
        yield (
            _norm_over(compared, range(mesh.world), (axis,)),
            axis,
            (f"the norm counts what is replicated over {axis} once a rank"),
        )
    yield _norm_over(compared, [rank], ()), "", "the norm's squares are not summed over the ranks at all"
    yield _norm_over(compared, range(mesh.world), AXES), "", "the norm counts every rank's copy"


def _norm_over(compared: Comparison, ranks: Iterable[int], all_count: Sequence[str]) -> float:
    """The norm of what these ranks own; along `all_count` every rank counts its copy."""
    split = {tensor.name: tensor.split for tensor in _of(compared, "gradient")}
    # A later stage's copy of a tied weight has another name, and no part in the norm.
    seconds = {name for group in compared.ties for name in group[1:]} if compared.mesh.pp > 1 else set()
    total = 0.0
    for rank in ranks:
        coord = compared.mesh.coord(rank)
        for name, square in compared.ranks[rank].squares.items():
            axes = {*split.get(name, ()), *all_count, "pp"}
            if name not in seconds and all(axis in axes or getattr(coord, axis) == 0 for axis in AXES):
                total += square
    return math.sqrt(total)


# ---------------------------------------------------------------- resume, dropout


def judge_resume(resumed: Resumed) -> Judged:
    """Equal bits, or the fault: where the first difference is says what was not restored."""
    same = resumed.whole == resumed.resumed and not resumed.changed and not resumed.unsaved
    check = Check(
        "resume", f"stopped after step {resumed.step}, gone on in new processes", 0.0 if same else 1.0, 0.0, same
    )
    if same:
        return Judged((check,), None)
    if resumed.unsaved:
        return Judged((check,), Fault(check.what, "", "", "", "its checkpoint was refused", resumed.unsaved))
    first = next((n for n, (a, b) in enumerate(zip(resumed.whole, resumed.resumed, strict=True)) if a != b), 0)
    whole, again = resumed.whole[first], resumed.resumed[first]
    step = next((n for n, (a, b) in enumerate(zip(whole, again, strict=True)) if a != b), None)
    tensor = resumed.changed[0] if resumed.changed else ""
    if step == 0:
        cause = "the first loss after it differs: the weights or the position in the data were not restored"
    else:
        cause = "the first loss after it is right and what follows is not: the optimizer's states were not restored"
    numbers = f"rank {first}: {again[step]:.17g}, without a stop {whole[step]:.17g}" if step is not None else ""
    numbers = numbers or f"{len(resumed.changed)} parameters have other bits"
    return Judged((check,), Fault(check.what, tensor, layer(tensor) if tensor else "", "", cause, numbers))


def judge_dropout(mesh: MeshShape, masks: Sequence[Masks]) -> Judged:
    """New masks for each micro-batch and each data-parallel rank, agreement where tensor parallelism needs it."""
    fault = _dropout_fault(mesh, masks)
    check = Check("dropout", "masks differ between micro-batches and samples, agree over tp", float(fault is not None),
                  0.0, fault is None)  # fmt: skip
    return Judged((check,), fault)


def _dropout_fault(mesh: MeshShape, masks: Sequence[Masks]) -> Fault | None:
    what = "dropout masks"
    for rank, mask in enumerate(masks):
        for name, drawn in mask.drawn.items():
            wanted = mask.forwards * mask.draws.get(name, 1)
            if len(set(drawn)) != wanted:
                less = len(set(drawn)) < wanted
                cause = "micro-batches draw the same mask" if less else "recompute draws another mask than forward did"
                numbers = f"rank {rank}: {len(set(drawn))} different masks, {wanted} in {mask.forwards} micro-batches"
                return Fault(what, name, layer(name), "", cause, numbers)
    for axis in ("dp_replicate", "dp_shard", "tp"):
        apart = axis != "tp" or any(mask.draws_apart for mask in masks)
        for r, q in _pairs(mesh, axis):
            for name in masks[r].drawn.keys() & masks[q].drawn.keys():
                same = set(masks[r].drawn[name]) & set(masks[q].drawn[name])
                if apart and same:
                    cause = f"ranks along {axis} draw the same masks: the seed leaves {axis} out"
                    return Fault(
                        what, name, layer(name), axis, cause, f"ranks {r} and {q}: {len(same)} masks are equal"
                    )
                if not apart and masks[r].drawn[name] != masks[q].drawn[name]:
                    cause = "ranks along tp draw different masks for what is replicated over tp"
                    return Fault(what, name, layer(name), axis, cause, f"ranks {r} and {q}")
    return None


# ---------------------------------------------------------------- numbers


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where one is not finite."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if not (math.isfinite(one) and math.isfinite(other)):
            return math.inf
        worst = max(worst, abs(one - other) / max(abs(other), 1e-300))
    return worst


def _same(ratios: Iterable[float]) -> bool:
    values = list(ratios)
    return max(values) - min(values) <= RATIO_TOLERANCE * max(map(abs, values))


def _by_factor(compared: Comparison, ratio: float, subject: str) -> tuple[str, str]:
    """The axis and cause where a factor is a degree, a product of degrees, or the number of micro-batches."""
    mesh = compared.mesh
    factors = [(axis, float(getattr(mesh, axis))) for axis in AXES if getattr(mesh, axis) > 1]
    factors += [("accumulation", float(compared.accumulation))] if compared.accumulation > 1 else []
    factors += (
        [("dp_replicate x dp_shard", float(mesh.data_parallel))] if min(mesh.dp_replicate, mesh.dp_shard) > 1 else []
    )
    factors += [("the world", float(mesh.world))] if mesh.world not in {value for _, value in factors} else []
    for up in (True, False):
        meant = [
            name for name, value in factors if _relative((ratio,), (value if up else 1 / value,)) < RATIO_TOLERANCE
        ]
        if meant and ratio != 1:
            times = "multiplied" if up else "divided"
            axis = meant[0] if meant[0] in AXES else ""
            return axis, f"{subject} is {times} by {' or '.join(meant)} ({ratio:.6g} of what it should be)"
    return "", ""


def _pairs(mesh: MeshShape, axis: str) -> list[tuple[int, int]]:
    """Ranks that differ in one axis alone."""
    found = []
    for rank in range(mesh.world):
        coord = mesh.coord(rank)
        if getattr(coord, axis) > 0:
            found.append((mesh.rank(coord._replace(**{axis: 0})), rank))
    return found


def _axis_of_unequal(mesh: MeshShape, ranks: Sequence[int], values: Sequence[object]) -> str:
    """The first axis along which two ranks that differ in nothing else have different values."""
    held = dict(zip(ranks, values, strict=True))
    for axis in AXES:
        if any(held[r] != held[q] for r, q in _pairs(mesh, axis) if r in held and q in held):
            return axis
    return ""
