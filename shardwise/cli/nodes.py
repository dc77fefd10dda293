"""`shardwise train --nodes`: what all nodes of a run share, and a node that does not hold the meeting.

The same command starts on every node. The one that has the rendezvous's address holds the meeting (cli/hosting.py);
every other one joins it, starts the ranks that it is told to, and says how they ended.
"""

import hashlib
import json
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.cli.attempts import exit_of, told_code
from shardwise.cli.follow import follow
from shardwise.environment import hostname
from shardwise.errors import EXIT_REQUEUE, RecipeError
from shardwise.inputs.recipe import Recipe
from shardwise.launch import local, nodes, run_folder, watch
from shardwise.launch.address import Address, interface_of, parse
from shardwise.launch.meeting import (
    BEAT_SECONDS,
    JOIN_SECONDS,
    Begin,
    EndAttempt,
    Ended,
    Join,
    Leave,
    Over,
    Refused,
)
from shardwise.launch.progress import Progress
from shardwise.launch.supervise import Span
from shardwise.plan.plan import Plan


class Several(NamedTuple):
    """What --nodes, --rendezvous and --node-name ask for; the address as it is written."""

    span: Span
    address: Address
    name: str


class Task(NamedTuple):
    """A run over several nodes, as every node knows it. ranks: of a node; device: the kind of its devices.

    plan: for so many nodes, raises PlanInfeasible; job: of a plan, its logs, its ranks on this node and their place.
    """

    recipe: Recipe
    several: Several
    ranks: int
    device: str
    plan: Callable[[int], Plan]
    job: Callable[[Plan, Path, int, local.Place | None], local.Job]
    as_json: bool

    def join(self) -> Join:
        """This node's word, but for its proof."""
        digest = hashlib.sha256(msgspec.json.encode(self.recipe, order="sorted")).hexdigest()[:16]
        return Join(self.several.name, self.ranks, self.device, digest, "")

    def part(self, part: Begin, plan: Plan, here: str, logs: Path) -> local.Job:
        """This node's part of an attempt; its plan is written beside its logs. here: its address for the others."""
        run_folder.write_plan(logs, plan)
        return self.job(plan, logs, part.ranks, place_of(part, here))


def asked_for(nodes: str | None, rendezvous: str | None, name: str | None) -> Several | None:
    """None for a run on this machine alone. Raises: RecipeError."""
    if nodes is None:
        given = [flag for flag, value in (("--rendezvous", rendezvous), ("--node-name", name)) if value is not None]
        if given:
            raise RecipeError(
                f"{' and '.join(given)} without --nodes.", fix="--nodes 2, or --nodes 2:4 where it may be any of them"
            )
        return None
    found = re.fullmatch("([1-9][0-9]{0,3})(?::([1-9][0-9]{0,3}))?", nodes)
    if found is None:
        raise RecipeError(f"--nodes {nodes} is no number of nodes.", fix="--nodes 4, or --nodes 2:4")
    span = Span(int(found[1]), int(found[2] or found[1]))
    if span.least > span.most:
        raise RecipeError(
            f"--nodes {nodes} asks for at least {span.least} and at most {span.most}.",
            why="the fewest come first",
            fix=f"--nodes {span.most}:{span.least}",
        )
    if rendezvous is None:
        raise RecipeError(
            f"--nodes {nodes} without --rendezvous.",
            why="one of the nodes holds the meeting, and the others must find it",
            fix="--rendezvous HOST:PORT with an address of one node, the same on all of them",
        )
    name = hostname() if name is None else name
    if re.fullmatch(r"[A-Za-z0-9._-]{1,255}", name) is None:
        raise RecipeError(
            f"--node-name {name!r} is no name.", fix="letters, digits, dots and dashes: --node-name gpu-3"
        )
    return Several(span, parse(rendezvous), name)


def place_of(part: Begin, here: str) -> local.Place | None:
    """None where a node is alone: its ranks need no network. Raises: RecipeError."""
    if part.nodes == 1:
        return None
    interface = interface_of(here)
    if not interface:
        raise RecipeError(
            f"No network interface of this node has {here} as its first address.",
            why="the ranks talk by the interface by which the nodes meet",
            fix="--rendezvous with an address in a network of which each node has a first address",
        )
    return local.Place(part.node_rank, part.nodes, part.address, part.port, interface)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def take_part(task: Task, address: Address) -> int:
    """Join the meeting there, and do this node's part until the run is over or the host is gone; the exit code."""
    with watch.received() as came:
        connection = _reach(address, came)
        if connection is None:
            code = told_code(came) if came else EXIT_REQUEUE
        else:
            code = Member(task, connection, came).run()
    if task.as_json:
        print(json.dumps({"exit_code": code, "node": task.several.name}))
    return code


def _reach(address: Address, came: list[int]) -> socket.socket | None:
    """A connection to the host, which may start later than this node; None where it never came, or a signal did."""
    began, why = time.monotonic(), ""
    while not came and time.monotonic() - began < JOIN_SECONDS:
        try:
            return socket.create_connection(address, timeout=2 * BEAT_SECONDS)
        except OSError as error:
            if not why:
                say(f"waiting for the host at {address[0]}:{address[1]} ({error.strerror or error})")
            why = error.strerror or str(error)
        time.sleep(BEAT_SECONDS / 2)
    if not came:
        say(f"no host at {address[0]}:{address[1]} within {JOIN_SECONDS:.0f} s: {why}")
    return None


class Member:
    """A node that takes part in a meeting. came: the signals that were sent to it."""

    def __init__(self, task: Task, connection: socket.socket, came: list[int]) -> None:
        self.task, self.came = task, came
        self.here = str(connection.getsockname()[0])
        folder, lost = task.recipe.run, task.recipe.train.lost_seconds
        self.guest = nodes.Guest(connection, task.join(), lambda: nodes.read_secret(folder), lost)
        self.heard: deque[Begin | EndAttempt] = deque()
        self.over: Over | None = None

    def run(self) -> int:
        """Raises: RecipeError where the host refuses this node."""
        name, began, said = self.task.several.name, time.monotonic(), False
        try:
            while self.over is None and not self.came:
                self._listen(BEAT_SECONDS / 2)
                if self.guest.joined and not said:
                    said = True
                    say(f"node {name} takes part")
                if not self.guest.challenged and time.monotonic() - began >= JOIN_SECONDS:
                    self.over = Over(EXIT_REQUEUE, f"the host said nothing for {JOIN_SECONDS:.0f} s")
                while self.heard and self.over is None:
                    one = self.heard.popleft()
                    if isinstance(one, Begin):
                        self._attempt(one)
            if self.over is None:
                self.guest.tell(Leave())
                return told_code(self.came)
            say(f"node {name} ends: {self.over.why or 'the run is over'}")
            return self.over.code
        finally:
            self.guest.close()

    def _listen(self, seconds: float) -> None:
        for one in self.guest.turn(seconds):
            if isinstance(one, Refused):
                raise RecipeError(one.what, why=one.why, fix=one.fix)
            if isinstance(one, Over):
                self.over = one
            if isinstance(one, Begin | EndAttempt):
                self.heard.append(one)

    def _wish(self, attempt: int) -> watch.Wish | None:
        self._listen(0.0)
        told = any(isinstance(one, EndAttempt) and one.attempt == attempt for one in self.heard)
        return "end" if told or self.over is not None else None

    def _attempt(self, part: Begin) -> None:
        recipe, name = self.task.recipe, self.task.several.name
        say(f"attempt {part.attempt}: ranks {part.first_rank} to {part.first_rank + part.ranks - 1} of {part.world}")
        logs = run_folder.new_logs_folder(Path(recipe.run) / "logs", f"attempt-{part.attempt:03d}-{name}")
        job = self.task.part(part, Plan.from_json(bytes(part.plan)), self.here, logs)
        followed = follow(
            job, Path(recipe.run), part.attempt, came=self.came, quiet_stdout=self.task.as_json,
            wish=lambda: self._wish(part.attempt),
        )  # fmt: skip
        if self.over is None:
            self.guest.tell(Ended(exit_of(followed, part.attempt, Progress(), ()), told=bool(self.came)))
