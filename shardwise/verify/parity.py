"""Parity: N small ranks against one process, on this machine. No torch here: it runs in processes of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from shardwise import errors
from shardwise.environment import child_environment
from shardwise.errors import BadInput, RankFailed, RecipeError, ShardwiseError
from shardwise.plan import check
from shardwise.plan.plan import Plan
from shardwise.verify import shrink
from shardwise.verify.judge import Judged, judge, judge_dropout, judge_resume
from shardwise.verify.messages import STOP_AFTER, About, Case, Failure, Report, Task
from shardwise.verify.verdict import Bounds, Check, Comparison, Fault, Kind, Resumed, Tensor, Verdict

LIMIT_SECONDS = 300
EPS32 = float(np.finfo(np.float32).eps)
# A true gradient of zero: what is left of it is rounding of the largest one.
ZERO_GRADIENT = 1e-12
# Of a model of transformers, whose norms are computed in fp32: in few of them a rounding falls to the other side, which
# is one part in 2^23 of a number, and a few such numbers add up.
HF_BOUND = 8 * EPS32
Arrays = dict[str, np.ndarray[Any, Any]]


def parity(plan: Plan, *, compiled: bool = False, mutation: str = "") -> Verdict:
    """Shrink the plan, train it on real ranks and in one process, compare, and say what differs and why.

    `mutation` plants a fault, for tests. Raises: PlanInfeasible, RecipeError, ModelError; RankFailed where one broke.
    """
    started = time.monotonic()
    _require_buildable(plan)
    _require_whole(plan)
    logic = shrink.shrink(plan, precision="fp64", compiled=compiled)
    rounding = shrink.shrink(plan, precision="fp32", compiled=compiled)
    world = logic.decision.mesh.world
    check.require(logic, world)
    own, sgd = logic.recipe.optimizer, msgspec.structs.replace(logic.recipe.optimizer, name="sgd", lr=0.1, momentum=0.0)
    if not plan.ours and plan.arch is not None:
        # transformers computes norms in fp32 whatever the weights are, and AdamW divides the rounding of a gradient
        # that is next to nothing by itself. Momentum is a state that a resume has to bring back.
        own = msgspec.structs.replace(sgd, momentum=0.9)
    cases = (Case("logic", logic, own), Case("rounding", rounding, sgd))
    said = f"{_shape(logic)}; {logic.decision.accumulation} micro-batches"
    with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as name:
        folder = Path(name)
        reason = _run(folder, Task(cases, mutation), is_ours=plan.ours)
        if reason:
            return Verdict(False, world, said, skipped=reason, seconds=time.monotonic() - started)
        return _verdict(folder, cases, said, time.monotonic() - started)


def _require_buildable(plan: Plan) -> None:
    if plan.arch is None and plan.recipe.model.factory is None and plan.recipe.model.hf is None:
        raise RecipeError(
            "This plan's model was handed over as an object, so verify cannot build it.",
            why="a plan file holds values, no module",
            fix='model.factory = "my.module:build", or model.preset or model.config',
        )
    if plan.arch is None and plan.recipe.model.hf is not None:
        raise RecipeError(
            f"verify does not know how to make a small model of {plan.recipe.model.hf!r}.",
            why="its model_type is none whose sizes are known here",
            fix="shardwise verify --half dry, which takes the model as it is",
        )


def _require_whole(plan: Plan) -> None:
    if plan.recipe.model.hf is not None and plan.recipe.model.trainable != "full":
        raise RecipeError(
            "verify does not compare adapters or frozen parts yet.",
            why="it trains a small model of the same make, which has not the parts that model.trainable names",
            fix='shardwise verify --half dry, or model.trainable = "full"',
        )


def _shape(plan: Plan) -> str:
    mesh = plan.decision.mesh
    axes = " x ".join(
        f"{axis} {getattr(mesh, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if getattr(mesh, axis) > 1
    )  # fmt: skip
    arch = plan.arch
    model = f"{arch.num_layers} blocks of {arch.hidden_size}" if arch is not None else "blocks cut to few"
    return f"{mesh.world} ranks" + (f" = {axes}" if axes else "") + f", {model}"


# ---------------------------------------------------------------- the processes


def _run(folder: Path, task: Task, *, is_ours: bool) -> str:
    """Run the worker to its end; why a user's module cannot be compared, or empty. Raises: as `parity`."""
    (folder / "task.json").write_bytes(msgspec.json.encode(task))
    # CPU ranks on loopback whatever the machine has; one thread each, so that a fork copies no other.
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
             "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.verify.worker", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(quiet), start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT_SECONDS)
        except BaseException:
            _end(process)
            raise
    if code == 0:
        return ""
    failures = [msgspec.json.decode(p.read_bytes(), type=Failure) for p in sorted(folder.glob("failure.*.json"))]
    if not failures:
        raise RankFailed("A process of the comparison died.", why=(folder / "output.log").read_text()[-2000:])
    return _first_failure(failures[0], is_ours)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The worker leads a session of its own, so all its ranks end with it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _first_failure(failure: Failure, is_ours: bool) -> str:
    who = "the hand-written loop" if failure.who == "one" else f"rank {failure.who}"
    if failure.who == "one" and not is_ours:
        return f"{failure.kind}: {failure.what}" + (f" ({failure.fix})" if failure.fix else "")
    kind = getattr(errors, failure.kind, ShardwiseError) if failure.expected else RankFailed
    if failure.expected and issubclass(kind, BadInput):
        raise kind(failure.what, why=failure.why, fix=failure.fix)
    raise RankFailed(f"{who} raised {failure.kind}: {failure.what}", why=failure.traceback.strip())


# ---------------------------------------------------------------- what they left, compared


def _verdict(folder: Path, cases: tuple[Case, ...], said: str, seconds: float) -> Verdict:
    about = msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
    world = cases[0].plan.decision.mesh.world
    judged: list[Judged] = []
    zeros: tuple[str, ...] = ()
    for case in cases:
        # What is zero in truth fp64 tells; in fp32 it is noise.
        zeros = zeros if judged else _zero_gradients(folder, case)
        compared = compare(folder, case, about, zeros)
        judged.append(judge(compared))
    judged.append(judge_resume(_resumed(folder, cases[0], world)))
    masks = [report.masks for report in _reports(folder, "logic", world)]
    drawn = [msgspec.structs.replace(mask, draws=about.draws) for mask in masks if mask is not None]
    notes = ["dropout: the model has no dropout module"] if not any(mask.drawn for mask in drawn) else []
    if not notes:
        judged.append(judge_dropout(cases[0].plan.decision.mesh, drawn))
    judged.append(_probed(about.probe))
    return Verdict(
        passed=all(check.passed for one in judged for check in one.checks),
        ranks=world,
        shrunk=said,
        checks=tuple(check for one in judged for check in one.checks),
        fault=next((one.fault for one in judged if one.fault is not None), None),
        zero_gradients=zeros,
        probe=about.probe,
        notes=tuple(notes),
        seconds=seconds,
    )


def _probed(probe: str) -> Judged:
    mixes = probe.startswith("mixes")
    check = Check("samples", "a batch is the sum of its parts", float(mixes), 0.0, not mixes)
    cause = "the model mixes the samples of a micro-batch: the split changes the result"
    fault = Fault(check.what, "", "", "", cause, probe.partition(": ")[2]) if mixes else None
    return Judged((check,), fault)


def _reports(folder: Path, case: str, world: int) -> list[Report]:
    return [msgspec.json.decode((folder / f"{case}.{r}.json").read_bytes(), type=Report) for r in range(world)]


def _arrays(path: Path) -> Arrays:
    with np.load(path) as saved:
        return dict(saved)


def _zero_gradients(folder: Path, case: Case) -> tuple[str, ...]:
    """Parameters on which the loss does not depend."""
    arrays = _arrays(folder / f"{case.name}.one.npz")
    sizes = {k.partition("/")[2]: float(np.linalg.norm(v)) for k, v in arrays.items() if k.startswith("gradient/")}
    return tuple(name for name, size in sizes.items() if size <= ZERO_GRADIENT * max(sizes.values()))


def compare(folder: Path, case: Case, about: About, zeros: tuple[str, ...]) -> Comparison:
    """One training's files as a Comparison."""
    mesh = case.plan.decision.mesh
    one = msgspec.json.decode((folder / f"{case.name}.one.json").read_bytes(), type=Report)
    reports = _reports(folder, case.name, mesh.world)
    expected = _arrays(folder / f"{case.name}.one.npz")
    found = [_arrays(folder / f"{case.name}.{rank}.npz") for rank in range(mesh.world)]
    elementwise = case.optimizer.name == "sgd"
    split = {name: axes for report in reports for name, axes in report.split.items()}
    other = {name: group[0] for group in about.ties for name in group}
    names = [*expected, *(key for arrays in found for key in arrays if key not in expected)]
    largest = max(float(np.linalg.norm(v)) for n, v in expected.items() if n.startswith("gradient/"))
    twins = {_digest(value): name for name, value in expected.items() if name.startswith("initial value/")}
    tensors = []
    for key in dict.fromkeys(names):
        kind, _, name = key.partition("/")
        # Of a tied weight a later stage's rank has the second name; the one process has the first.
        wanted = expected.get(key, expected.get(f"{kind}/{other.get(name, name)}"))
        tensors.append(
            _tensor(kind, name, wanted, [arrays.get(key) for arrays in found], split.get(name, ()), twins,
                    elementwise and kind == "parameter", largest if kind == "gradient" and name in zeros else 0.0)
        )  # fmt: skip
    how = "each element of the parameters" if elementwise else "parameters, in norm,"
    return Comparison(
        case.name, mesh, case.plan.decision.accumulation, _bounds(case), one.told, tuple(r.told for r in reports),
        tuple(tensors), about.ties, zeros, how,
    )  # fmt: skip


def _tensor(
    kind: str, name: str, wanted: np.ndarray[Any, Any] | None, held: list[np.ndarray[Any, Any] | None],
    split: tuple[str, ...], twins: dict[str, str], elementwise: bool, instead: float,
) -> Tensor:  # fmt: skip
    ranks = [rank for rank, value in enumerate(held) if value is not None]
    values = [value for value in held if value is not None]
    digests = [_digest(value) for value in values]
    copies = tuple(list(dict.fromkeys(digests)).index(digest) for digest in digests)
    if wanted is None:
        return Tensor(name, _kind(kind), tuple(ranks), (float("inf"),) * len(ranks), copies, split)
    if not ranks:
        return Tensor(name, _kind(kind), (0,), (float("inf"),), (0,), split)
    differences = tuple(_difference(value, wanted, elementwise, instead) for value in values)
    worst = values[int(np.argmax(differences))].astype(np.float64)
    exact = wanted.astype(np.float64)
    size = float((exact * exact).sum())
    ratio = float((worst * exact).sum()) / size if size else 1.0
    residual = float(np.linalg.norm(worst - ratio * exact)) / max(float(np.linalg.norm(worst)), 1e-300)
    twin = twins.get(digests[int(np.argmax(differences))], "").partition("/")[2] if kind == "initial value" else ""
    return Tensor(name, _kind(kind), tuple(ranks), differences, copies, split, ratio, residual,
                  twin if max(differences) > 0 else "")  # fmt: skip


def _kind(kind: str) -> Kind:
    found: Kind = msgspec.convert(kind, Kind)
    return found


def _difference(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], elementwise: bool, instead: float) -> float:
    """Relative to the tensor's size: the largest element's distance, or the distance in norm.

    instead: the size to measure against where the tensor's own is noise: a gradient that is zero in truth.
    """
    if found.shape != wanted.shape:
        return float("inf")
    gap = found.astype(np.float64) - wanted.astype(np.float64)
    if elementwise:
        return float(np.abs(gap).max()) / max(float(np.abs(wanted).max()), 1e-300)
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(gap)) / max(size, instead, 1e-300)


def _digest(value: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())


def _bounds(case: Case) -> Bounds:
    """Logic: nothing but fp64 rounding may differ, and 1e-10 leaves it a factor of 1e5.

    Rounding: k * C^depth * eps with k = 4 and C = 1.03 (arXiv 2506.09280, theorem 5.3), times sqrt(width x tokens), the
    terms of one sum; a user's module's width and depth are taken as large as those of one that is let in.
    """
    plan = case.plan
    if plan.decision.precision == "fp64":
        bound = 1e-10 if plan.recipe.model.hf is None else HF_BOUND
        return Bounds(bound, bound, bound, bound)
    arch = plan.arch
    width, depth = (arch.hidden_size, arch.num_layers + 1) if arch is not None else (1024, 8)
    terms = float(np.sqrt(width * plan.decision.global_batch * plan.recipe.data.sequence_length))
    return Bounds(1e-6, 1e-5, 4 * 1.03**depth * terms * EPS32, 1e-5)


def _resumed(folder: Path, case: Case, world: int) -> Resumed:
    stop = STOP_AFTER
    whole = _reports(folder, case.name, world)
    if whole[0].told.unsaved:
        return Resumed(stop, (), (), (), whole[0].told.unsaved)
    again = _reports(folder, "resumed", world)
    changed: dict[str, None] = {}
    for rank in range(world):
        before, after = _arrays(folder / f"{case.name}.{rank}.npz"), _arrays(folder / f"resumed.{rank}.npz")
        for key in before:
            if key.startswith("parameter/") and not np.array_equal(before[key], after.get(key, np.empty(0))):
                changed[key.partition("/")[2]] = None
    return Resumed(
        stop,
        tuple((*told.losses[stop:], told.evaluation) for told in (r.told for r in whole)),
        tuple((*told.losses, told.evaluation) for told in (r.told for r in again)),
        tuple(changed),
    )
