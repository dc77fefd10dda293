"""`shardwise checkpoints resume-check`: train some steps again from an earlier checkpoint, and hold them to the bit
against what the run recorded.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.checkpoint import proof
from shardwise.checkpoint.audit import survey
from shardwise.checkpoint.fork import copied
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.proof import Span, Told
from shardwise.checkpoint.retention import Committed, look
from shardwise.checkpoint.store import LocalStore, Store
from shardwise.cli.checkpoints import Place, find, told
from shardwise.cli.follow import follow, tell
from shardwise.data.from_recipe import prepare_recipe
from shardwise.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, RecipeError
from shardwise.events.reader import read
from shardwise.events.values import AnyEvent
from shardwise.inputs.recipe import CheckpointPolicy, Recipe
from shardwise.launch import local, run_folder
from shardwise.plan.check import require
from shardwise.plan.plan import Plan
from shardwise.report import checkpoints as report


class Asked(NamedTuple):
    target: str
    begin: int | None
    steps: int | None
    as_json: bool
    dry_run: bool


def resume_check(asked: Asked) -> int:
    """0 where every step's loss and gradient norm, and the root where one was saved, are the same to the bit."""
    place = find(asked.target)
    run = _run_of(place, asked.target)
    with told():
        span, before = _span(place, run, asked)
    plan = _plan_of(span, run)
    require(plan, plan.decision.mesh.world)
    if asked.dry_run:
        print(report.replay_json(span) if asked.as_json else report.replay(span, plan.decision.mesh.world))
        return EXIT_DONE
    with tempfile.TemporaryDirectory(prefix=".resume-check-", dir=run) as scratch, told():
        _lay_out(place.store, span.first, plan.recipe, Path(scratch) / "run")
        prepare_recipe(plan.recipe.data, hf=plan.recipe.model.hf)
        again = msgspec.structs.replace(plan, recipe=_quiet(plan.recipe, Path(scratch) / "run"))
        code = _replay(again, span.until, quiet_stdout=asked.as_json)
        if code != EXIT_DONE:
            return code
        replayed = Path(again.recipe.run)
        found = proof.compare(span, before, _recorded(replayed), _newest(replayed, span.until))
    print(report.proof_json(found) if asked.as_json else report.proof(found))
    return EXIT_DONE if found.same else EXIT_FAILED


def _run_of(place: Place, target: str) -> Path:
    record = run_folder.read_record(place.run) if place.run is not None else None
    if place.run is None or record is None:
        raise RecipeError(f"{target} is not a run, nor a checkpoint in one.", fix="name a run's folder")
    if record.recipe.model.given is not None or record.recipe.data.given is not None:
        raise RecipeError(
            f"{place.run} is the run of a script, which builds its model and data itself.",
            why="only a run of a recipe can be started again from its folder alone",
            fix="copy an earlier checkpoint into a new run folder, run the script to a later one's step, and "
            "shardwise checkpoints diff the two",
        )
    return place.run


def _span(place: Place, run: Path, asked: Asked) -> tuple[Span, dict[int, Told]]:
    lineages = {item.lineage for item in survey(place.store) if item.state == "whole"}
    committed = [item for lineage in sorted(lineages) for item in look(place.store, lineage).committed]
    committed.sort(key=lambda item: item.order, reverse=True)
    begin = asked.begin
    if place.folder:
        begin = next((item.manifest.step for item in committed if item.folder == place.folder), begin)
    before = _recorded(run)
    return proof.choose(committed, before, begin=begin, steps=asked.steps), before


def _recorded(run: Path) -> dict[int, Told]:
    return proof.recorded(_events(run))


def _events(run: Path) -> list[list[AnyEvent]]:
    return [read(path) for path in sorted((run / "events").glob("attempt-*.jsonl"))]


def _plan_of(span: Span, run: Path) -> Plan:
    """The plan that saved what is compared, with the recipe of then: a schedule reaches to the end of its run."""
    kept = (span.last or span.first).manifest
    try:
        if kept.plan is not None:
            return msgspec.convert(kept.plan, Plan)
        return Plan.from_json(run_folder.plan_path(run).read_bytes())
    except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
        fix = "replay with the version of Shardwise that saved it"
        raise RecipeError(f"The plan of {run} cannot be read.", why=str(error), fix=fix) from None


def _lay_out(store: Store, first: Committed, recipe: Recipe, run: Path) -> None:
    """A run folder that holds this one checkpoint: links to its files on a file system, else copies."""
    copied(store, first.folder, LocalStore(run_folder.checkpoints_folder(run)), "")
    run_folder.write_record(run, run_folder.RunRecord(recipe=_quiet(recipe, run)))


def _quiet(recipe: Recipe, run: Path) -> Recipe:
    """The same training: nothing is evaluated, logged elsewhere, or saved on the way."""
    train = msgspec.structs.replace(recipe.train, evaluate_every_steps=0)
    policy = CheckpointPolicy(every_steps=0, asynchronous=False)
    return msgspec.structs.replace(recipe, run=str(run), train=train, checkpoint=policy, log=())


def _replay(plan: Plan, until: int, *, quiet_stdout: bool) -> int:
    run = Path(plan.recipe.run)
    logs = run_folder.new_logs_folder(run / "logs", "replay")
    path = run_folder.write_plan(logs, plan)
    job = local.Job(
        ranks=plan.decision.mesh.world,
        command=("-m", "shardwise.train.replay", str(path), str(until)),
        logs=str(logs),
        cores=plan.cluster.node.host_cores or 1,
        watched=True,
        on_cpu=plan.cluster.kind == "cpu",
        hang_seconds=plan.recipe.train.hang_seconds,
    )
    followed = follow(job, run, 1, quiet_stdout=quiet_stdout)
    tell(followed)
    if followed.code != EXIT_DONE:
        print(f"the replay ended with {followed.code}", file=sys.stderr)
    return followed.code


def _newest(run: Path, step: int) -> Manifest:
    for item in look(LocalStore(run_folder.checkpoints_folder(run)), "").committed:
        if item.manifest.step == step:
            return item.manifest
    raise CheckpointError(f"The replay saved nothing of step {step}.", why="it ended before", fix="look at its output")
