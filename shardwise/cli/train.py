"""`shardwise train`: load, plan, check, prepare the data, open the run, start the ranks, say how it ended."""

import contextlib
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.cli import fork, nodes
from shardwise.cli.follow import follow, say, tell
from shardwise.data.from_recipe import prepare_recipe, require_tokenizer
from shardwise.environment import in_pod, notice_seconds
from shardwise.errors import EXIT_REQUEUE, PlanInfeasible, RecipeError
from shardwise.events.reader import read
from shardwise.events.values import AnyEvent, Evaluated, Saved, Step
from shardwise.inputs import hub
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import arch_of
from shardwise.inputs.hardware import Cluster
from shardwise.inputs.recipe import Recipe, device_span
from shardwise.launch import address, before_ranks, hosting, local, run_folder, taking_part
from shardwise.launch.attempts import Again, Followed, exit_of, supervised
from shardwise.launch.progress import Progress
from shardwise.launch.supervise import Device, Exit, Shape, Span, Stop, too_few, world_of
from shardwise.launch.task import CORES, Several, Task
from shardwise.plan import automatic
from shardwise.plan.check import require
from shardwise.plan.machines import used
from shardwise.plan.plan import Plan
from shardwise.report import plan as plan_report
from shardwise.report import summary
from shardwise.resilience.budget import budget_of


class Asked(NamedTuple):
    recipe: str
    overrides: tuple[str, ...]
    fresh: bool
    fork: str | None
    devices: str | None
    as_json: bool
    dry_run: bool
    nodes: str | None = None
    rendezvous: str | None = None
    node_name: str | None = None


def train(asked: Asked) -> int:
    """Train a recipe to its end, or go on where it stopped, on this machine or on several nodes; the exit code."""
    several = nodes.asked_for(asked.nodes, asked.rendezvous, asked.node_name)
    if asked.fresh and asked.fork is not None:
        raise RecipeError(
            "--fresh and --fork contradict each other.",
            why="a fork begins at a checkpoint, a fresh run at nothing",
            fix="give one of them",
        )
    if asked.devices is not None and not re.fullmatch("[1-9][0-9]*(:[1-9][0-9]*)?", asked.devices):
        raise RecipeError(f"--devices {asked.devices} is no number of ranks.", fix="--devices 4, or --devices 2:4")
    overrides = asked.overrides if asked.devices is None else (*asked.overrides, f"train.devices={asked.devices}")
    recipe = recipes.load(asked.recipe, overrides)
    made_from = None if asked.fork is None else fork.planned(recipe.run, asked.fork, recipe)
    recipe = recipe if made_from is None else made_from.recipe
    if several is not None:
        return _on_several(asked, several, recipe, made_from)
    made = _plan(recipe)
    _require(made)
    if asked.dry_run:
        return _dry_run(made, asked.as_json)
    if (finished := _checked(asked, recipe, made_from)) is not None:
        return _say_finished(finished, asked.as_json)
    _prepare(recipe)
    with _held(asked, recipe):
        return _run(made, asked.as_json)


def _require(made: Plan) -> None:
    """Hold the tokenizer against the model, and a module that is not ours against its plan. Raises: BadInput."""
    model, arch = made.recipe.model, made.arch
    rows = hub.vocabulary_of(hub.find(model.hf, weights=False)) if model.hf else arch.vocab_size if arch else None
    require_tokenizer(made.recipe.data, model.hf, rows, model.hf or (arch.name if arch else ""))
    if not_tried := before_ranks.require_module(made):
        print(f"the module was not run in its parts: {not_tried}", file=sys.stderr)


def _checked(asked: Asked, recipe: Recipe, made_from: fork.Fork | None) -> run_folder.RunState | None:
    """Make the fork that is asked for, and see that the folder is free; its state where the run is finished.

    Raises: RunFolderError.
    """
    if made_from is not None:
        fork.make(made_from)
    run_folder.require_free(recipe.run)
    return None if asked.fresh else _finished(recipe)


def _finished(recipe: Recipe) -> run_folder.RunState | None:
    state = run_folder.open_run(recipe.run, recipe)
    return state if state.finished else None


@contextlib.contextmanager
def _held(asked: Asked, recipe: Recipe) -> Iterator[None]:
    """Hold the run's folder, emptied where that is asked for. Raises: RunFolderError."""
    if asked.fresh and (aside := run_folder.move_aside(recipe.run)) is not None:
        print(f"the run that was there is now {aside}", file=sys.stderr)
    # From before the ranks start: of two commands at once one is refused here, and never shows the other's steps.
    with run_folder.locked(recipe.run, run_folder.COMMAND):
        yield


def _on_several(asked: Asked, several: Several, recipe: Recipe, made_from: fork.Fork | None) -> int:
    """This node's part of a run over several: it holds the meeting where it has the rendezvous's address."""
    task = _task(recipe, several, asked.as_json)
    if asked.dry_run:
        return _dry_run(task.plan(Shape(several.span.most, task.ranks.most)), asked.as_json, several)
    where = address.resolve(several.address)
    _require(task.plan(Shape(several.span.least, task.ranks.most)))
    if not asked.fresh and (finished := _finished(recipe)) is not None:
        return _say_finished(finished, asked.as_json)
    _prepare(recipe)
    listener = address.listen(where) if address.is_here(where[0]) else None
    if listener is None:
        code = taking_part.take_part(task, where)
        if asked.as_json:
            print(json.dumps({"exit_code": code, "node": several.name}))
        return code
    with listener:
        if (finished := _checked(asked, recipe, made_from)) is not None:
            return _say_finished(finished, asked.as_json)
        with _held(asked, recipe):
            return hosting.hold(
                task, listener, where, lambda end, made, number: _ended(end, made, number, asked.as_json)
            )


def _task(recipe: Recipe, several: Several, as_json: bool) -> Task:
    """Raises: RecipeError where this node has fewer devices than are asked of each."""
    cluster, asked = local.cluster_here(recipe.train.cluster), device_span(recipe.train.devices)
    on_gpus = cluster.kind == "gpu"
    every = cluster.devices if on_gpus or asked else _plan(recipe).decision.mesh.world
    ranks = Span(*(asked or (1, every)))
    devices = cluster.devices if on_gpus else ranks.most  # Cores can be shared.
    if devices < ranks.least:
        raise RecipeError(
            f"train.devices = {recipe.train.devices!r}, and this node has {devices} GPUs.",
            why="every node gives as many ranks, each on a GPU of its own",
            fix=f"--devices {devices}, on every node",
        )

    def plan_for(shape: Shape) -> Plan:
        there = cluster if shape.nodes == 1 else used(cluster, *shape)
        made = automatic.plan(recipe, arch_of(recipe.model, cluster.kind), there, world=shape.world)
        require(made, shape.world)
        return made

    def job_of(made: Plan, logs: Path, places: Sequence[int], place: local.Place | None) -> local.Job:
        whole = places == list(range(len(places)))
        return _job_of_node(made, logs, len(places), place, () if whole else _names(cluster, places))

    kind = cluster.device.name if on_gpus else CORES
    shown = partial(follow, quiet_stdout=as_json)
    return Task(recipe, several, ranks, asked is None, devices, kind, plan_for, job_of, shown, say)


def _plan(recipe: Recipe, world: int | None = None) -> Plan:
    """The plan for this machine, of `world` ranks where that is known. Raises: PlanInfeasible if it cannot run here."""
    cluster = local.cluster_here(recipe.train.cluster)
    made = automatic.plan(recipe, arch_of(recipe.model, cluster.kind), cluster, world=world)
    devices = recipe.train.devices
    require(made, devices if isinstance(devices, int) and world is None else made.decision.mesh.world)
    return made


def _job_of_node(
    made: Plan, logs: Path, ranks: int, place: local.Place | None, devices: tuple[str, ...] = ()
) -> local.Job:
    return msgspec.structs.replace(_job(made, logs, devices), ranks=ranks, place=place)


def _job(made: Plan, logs: Path, devices: tuple[str, ...] = ()) -> local.Job:
    asked = made.recipe.checkpoint.notice_seconds
    budget = budget_of(None if asked == "auto" else asked, notice_seconds(), in_pod())
    return local.Job(
        devices=devices,
        shutdown_seconds=math.ceil(budget.seconds),
        ranks=made.decision.mesh.world,
        command=("-m", "shardwise.train.worker", str(logs / "plan.json")),
        logs=str(logs),
        cores=made.cluster.node.host_cores or 1,
        watched=True,
        on_cpu=made.cluster.kind == "cpu",
        hang_seconds=made.recipe.train.hang_seconds,
    )


def _dry_run(made: Plan, as_json: bool, several: Several | None = None) -> int:
    """Of several nodes the plan is for as many as may come, and the command the first one's."""
    if as_json:
        print(plan_report.as_json(made))
        return 0
    job = _job(made, Path(made.recipe.run) / "logs" / "attempt-001")
    if several is not None and several.span.most > 1:
        count = several.span.most
        # A port of its own is chosen for every attempt, and the interface by the address.
        place = local.Place(0, count, several.address[0], 0, "")
        job = _job_of_node(made, Path(job.logs), job.ranks // count, place)
    print(plan_report.text(made))
    print(f"command\n  {shlex.join(local.render(job))}")
    return 0


def _prepare(recipe: Recipe) -> None:
    """Turn the text into tokens, with a bar while there is something to do."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("turning text into tokens"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokens", total=None, visible=False)
        made = prepare_recipe(
            recipe.data,
            lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            recipe.model.hf,
        )
    tokens, said = sum(one.header.tokens for one in made), (*recipe.data.text, *recipe.data.chat)
    print(f"data: {tokens:,} tokens of {', '.join(said) or 'a mixture'}", file=sys.stderr)


class _Attempts:
    """The attempts of a run on this machine: each has a plan for the devices that are left."""

    def __init__(self, made: Plan, as_json: bool) -> None:
        self.made, self.recipe, self.as_json = made, made.recipe, as_json
        world = made.decision.mesh.world
        self.span = Span(*(device_span(self.recipe.train.devices) or (1, world)))
        self.places = tuple(range(world))
        self.names: tuple[str, ...] = ()
        self.number = 1

    def attempt(self, before: int, came: list[int], progress: Progress) -> tuple[Exit, Followed]:
        state = run_folder.open_run(self.recipe.run, self.recipe)
        self.number = state.attempt
        logs = run_folder.new_logs_folder(state.folder / "logs", f"attempt-{state.attempt:03d}")
        run_folder.write_plan(logs, self.made)
        job = _job(self.made, logs, self.names)
        followed = follow(job, state.folder, state.attempt, came=came, progress=progress, quiet_stdout=self.as_json)
        return exit_of(followed, state.attempt, progress, self.places), followed

    def prepare(self, leave: frozenset[Device]) -> int:
        """Plan again where the number of ranks changes; else the same plan gives the same bits."""
        leave_out = frozenset(device.place for device in leave)
        cluster = local.probe_cluster()
        here = cluster.devices if cluster.kind == "gpu" else None
        world = world_of(self.span, here, len(leave_out))
        if world is None and here is None:  # A core is not at fault: it is left out where that is allowed, and no more.
            leave_out, world = frozenset(), world_of(self.span, here, 0)
        if world is None:
            raise Again(too_few(self.span, (self.span.most if here is None else here) - len(leave_out)))
        if world != self.made.decision.mesh.world:
            try:
                self.made = _plan(self.recipe, world)
            except PlanInfeasible as error:
                raise Again(Stop(EXIT_REQUEUE, f"{world} ranks are left: {error.what}")) from None
        there = range(self.span.most if here is None else here)
        self.places = tuple([place for place in there if place not in leave_out][:world])
        self.names = _names(cluster, self.places) if leave_out else ()
        return world


def _names(cluster: Cluster, places: Sequence[int]) -> tuple[str, ...]:
    """What CUDA calls the devices at these places of those that are visible; nothing for cores."""
    if cluster.kind != "gpu":
        return ()
    visible = local.visible_names(cluster.devices)
    return tuple(visible[place] for place in places)


def _run(made: Plan, as_json: bool) -> int:
    attempts = _Attempts(made, as_json)
    folder = Path(made.recipe.run)
    followed = supervised(lambda: folder, attempts.attempt, attempts.prepare, made.recipe.train.restarts, say)
    return _ended(followed, attempts.made, attempts.number, as_json)


def _ended(followed: Followed, made: Plan, number: int, as_json: bool) -> int:
    """Say how the run ended, with its last attempt, of this number."""
    tell(followed)
    folder = Path(made.recipe.run)
    events = (*_told_before(folder, number), *followed.events)
    if not as_json and followed.code == 0:
        print(summary.text(made, events, str(folder)))
    print(summary.last_line(events, str(folder), followed.code))
    return followed.code


def _told_before(folder: Path, number: int) -> tuple[AnyEvent, ...]:
    """Of the earlier attempts, the first and the last evaluation and step, and the last save.

    The first say what "before" means for the whole run; the last stand where this attempt has nothing left to train.
    """
    paths = [run_folder.events_path(folder, attempt) for attempt in range(1, number)]
    told = [event for path in paths if path.exists() for event in read(path)]
    kept: list[AnyEvent] = []
    for kind in (Evaluated, Step, Saved):
        of_kind = [event for event in told if isinstance(event, kind)]
        kept += of_kind[:1] if len(of_kind) == 1 else [*of_kind[:1], *of_kind[-1:]]
    return tuple(kept)


def _say_finished(state: run_folder.RunState, as_json: bool) -> int:
    """A finished run has nothing left to do; its last attempt's figures again."""
    if not as_json:
        print(f"{state.folder} is finished. Go on with more train.steps, or start over with --fresh.")
    path = run_folder.events_path(state.folder, state.attempt - 1)
    print(summary.last_line(read(path) if path.exists() else [], str(state.folder), 0))
    return 0
