"""The node that holds a run's meeting: it gathers nodes, plans for those that are there, and ends and begins attempts.

launch/meeting.py and launch/supervise.py decide; this acts.
"""

import socket
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import EXIT_REQUEUE, PlanInfeasible, ShardwiseError
from shardwise.launch import run_folder, watch
from shardwise.launch.address import Address, free_port
from shardwise.launch.attempts import Again, Followed, exit_of, supervised, told_code
from shardwise.launch.meeting import JOIN_SECONDS, Ended, Member, Over, begins, parts, together
from shardwise.launch.nodes import Host, leave_secret
from shardwise.launch.progress import Progress
from shardwise.launch.rounds import TURN_SECONDS, Round
from shardwise.launch.supervise import Device, Exit, Shape, Stop, shapes
from shardwise.launch.task import Task
from shardwise.plan.plan import Plan


def hold(task: Task, listener: socket.socket, address: Address, ended: Callable[[Followed, Plan, int], int]) -> int:
    """Hold the meeting until the run is over for all nodes; the exit code, of `ended`, which says how it ended.

    Raises: BadInput, which the nodes that have joined are told.
    """
    recipe, join = task.recipe, task.join()
    host = Host(listener, leave_secret(recipe.run), join.recipe, task.wanted, (join,), recipe.train.lost_seconds)
    over = Over(EXIT_REQUEUE, "the host was ended")
    try:
        hosting = Hosting(task, host, address)
        with watch.received() as came:
            stop = hosting.gather(came)
        if stop is not None:
            over = Over(stop.code, stop.why)
            task.say(stop.why)
            return stop.code
        folder = Path(recipe.run)
        followed = supervised(
            lambda: folder, hosting.attempt, hosting.prepare, recipe.train.restarts, task.say, hosting.idle
        )
        over = Over(followed.code)
        return ended(followed, hosting.made, hosting.number)
    except ShardwiseError as error:
        over = Over(error.exit_code, error.what)
        raise
    finally:
        host.close(over)


class Hosting:
    """The attempts of a run over several nodes: each has a plan for the nodes and devices that are left. number: of the
    last; left: the devices that are not used any more.
    """

    def __init__(self, task: Task, host: Host, address: Address) -> None:
        self.task, self.host, self.address = task, host, address
        self.number = 1
        self.left: frozenset[Device] = frozenset()
        self._plans: dict[Shape, Plan | PlanInfeasible] = {}
        self.shape = Shape(1, task.ranks.most)
        self.members = tuple(host.members)

    @property
    def made(self) -> Plan:
        """The plan for the nodes that take part."""
        found = self._plan(self.shape)
        if isinstance(found, PlanInfeasible):
            raise found
        return found

    def gather(self, came: list[int]) -> Stop | None:
        """Wait for the nodes; why there is no first attempt, None where it may begin. Raises: PlanInfeasible."""
        span, began = self.task.several.span, time.monotonic()
        self.task.say(f"node {self.task.several.name} holds the meeting; waiting for {_words(span.least, span.most)}")
        while not begins(self.host.members, span, time.monotonic()):
            if came:
                return Stop(told_code(came))
            if time.monotonic() - began >= JOIN_SECONDS and len(self.host.members) < span.least:
                there = ", ".join(one.node for one in self.host.members)
                return Stop(EXIT_REQUEUE, f"of {span.least} nodes only {there} came within {JOIN_SECONDS:.0f} s")
            self.host.turn(TURN_SECONDS)
        self._take(self._best())
        self.task.say(f"{len(self.members)} nodes: {', '.join(one.node for one in self.members)}")
        return None

    def attempt(self, before: int, came: list[int], progress: Progress) -> tuple[Exit, Followed]:
        recipe, me = self.task.recipe, self.task.several.name
        state = run_folder.open_run(recipe.run, recipe)
        self.number = state.attempt
        logs = run_folder.new_logs_folder(state.folder / "logs", f"attempt-{state.attempt:03d}")
        where, port = self.address[0], free_port(self.address[0])
        plan = self.made.to_json()
        given = parts(self.members, self.shape.ranks, state.attempt, where, port, plan, self.left)
        job = self.task.part(given[me], self.made, where, logs)
        this = Round(
            self.host, me, state.attempt, given, lambda nodes: self._best().world > self.shape.world, self.task.say
        )
        this.begin()
        followed = self.task.follow(
            job, state.folder, state.attempt, came=came, progress=progress,
            wish=lambda: this.wish(progress.committed),
        )  # fmt: skip
        own = exit_of(followed, state.attempt, progress, self.task.places(given[me]))
        this.end(me, Ended(own, told=bool(came)))
        this.wait(lambda: len(came) > 1)
        whole = together(this.ends, this.gone, me, own, this.came)
        if whole.error and whole.error != own.error:
            self.task.say(f"on another node, {whole.why}")
        return whole, followed

    def prepare(self, leave_out: frozenset[Device]) -> int:
        """Plan for what is there. Raises: Again where that is too little, or no plan runs on it."""
        span, there = self.task.several.span, len(self.host.members)
        self.left = leave_out
        if not self._shapes() and not self.task.on_gpus:
            self.left = frozenset()  # A core is not at fault: it is left out where that is allowed, and no more.
        if there < span.least:
            raise Again(Stop(EXIT_REQUEUE, f"{_words(there, there)} left, and --nodes asks for at least {span.least}"))
        if not self._shapes():
            least = self.task.ranks.least
            raise Again(Stop(EXIT_REQUEUE, f"{_words(there, there)} left, and too few have {least} devices that work"))
        try:
            self._take(self._best())
        except PlanInfeasible as error:
            raise Again(Stop(EXIT_REQUEUE, f"{_words(there, there)} left: {error.what}")) from None
        return self.made.decision.mesh.world

    def idle(self, seconds: float) -> None:
        """Spend a pause between two attempts."""
        self.host.turn(seconds)

    def _take(self, shape: Shape) -> None:
        """With the first that joined of those that can give so many ranks."""
        able = [one for one in self.host.members if self._free(one) >= shape.ranks]
        self.shape, self.members = shape, tuple(able[: shape.nodes])

    def _free(self, member: Member) -> int:
        return member.devices - sum(device.node == member.node for device in self.left)

    def _shapes(self) -> list[Shape]:
        free = [self._free(one) for one in self.host.members]
        return shapes(free, self.task.several.span, self.task.ranks)

    def _best(self) -> Shape:
        """The largest that a plan can use; who is not in it waits. Raises: PlanInfeasible where no plan runs."""
        found = self._shapes()
        for shape in found:
            if isinstance(self._plan(shape), Plan):
                return shape
        raise self._plan(found[-1])  # type: ignore[misc]  # none of them is a Plan

    def _plan(self, shape: Shape) -> "Plan | PlanInfeasible":
        """The same for the same shape: a run that goes on with it has the bits of one that was whole."""
        if shape not in self._plans:
            try:
                self._plans[shape] = self.task.plan(shape)
            except PlanInfeasible as error:
                self._plans[shape] = error
        return self._plans[shape]


def _words(least: int, most: int) -> str:
    count = f"{least} to {most}" if least != most else f"{least}"
    return f"{count} node{'' if most == 1 else 's'}"
