"""The node that holds a run's meeting: it gathers nodes, plans for those that are there, and ends and begins attempts.

launch/meeting.py and launch/supervise.py decide; this acts.
"""

import socket
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.cli.attempts import Again, exit_of, supervised, told_code
from shardwise.cli.follow import Followed, follow
from shardwise.cli.nodes import Task, say
from shardwise.errors import EXIT_REQUEUE, PlanInfeasible, ShardwiseError
from shardwise.launch import run_folder, watch
from shardwise.launch.address import Address, free_port
from shardwise.launch.meeting import (
    ENDED_SECONDS,
    FAILED_SECONDS,
    JOIN_SECONDS,
    Begin,
    EndAttempt,
    Ended,
    Over,
    begins,
    parts,
    together,
)
from shardwise.launch.nodes import Host, leave_secret
from shardwise.launch.progress import Progress
from shardwise.launch.supervise import ENDINGS, Exit, Stop
from shardwise.launch.watch import Wish
from shardwise.plan.plan import Plan

TURN_SECONDS = 0.2


class Round:
    """One attempt: on which nodes it has ended how, which were lost meanwhile, and which came.

    more: whether so many nodes can take part, where that is more than do.
    """

    def __init__(
        self,
        host: Host,
        me: str,
        attempt: int,
        given: dict[str, Begin],
        more: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.me, self.attempt, self.given, self._more, self._clock = host, me, attempt, given, more, clock
        self.ends: dict[str, Ended] = {}
        there = {one.node for one in host.members}
        self.gone = [node for node in given if node not in there]
        self.came: list[str] = []
        self._failed: float | None = None
        self._mark: int | None = None
        self._ended = False

    def begin(self) -> None:
        for node, part in self.given.items():
            if node != self.me:
                self.host.tell(node, part)

    def wish(self, committed: int) -> Wish | None:
        """What is wanted of this node's ranks now. committed: the step after which a restart would go on."""
        self.look(0.0)
        if self.broken():
            return "end"
        if not self.came and self._to_join(committed):
            self.came = [one.node for one in self.host.members if one.node not in self.given]
        return "save" if self.came else None

    def _to_join(self, committed: int) -> bool:
        """Whether nodes have come since, that can take part, and a step was saved after they did."""
        if len(self.host.members) <= len(self.given) or not self._more(len(self.host.members)):
            self._mark = None
            return False
        if self._mark is None:
            self._mark = committed
            say("another node has come: all begin together after the next save")
        return committed > self._mark

    def broken(self) -> bool:
        """Whether nothing is to come any more of the ranks that are left."""
        failed = self._failed is not None and self._clock() - self._failed >= FAILED_SECONDS
        return bool(self.gone) or failed

    def look(self, seconds: float) -> None:
        """Hear the nodes for so long, and end on the others what is broken."""
        ended, gone = self.host.turn(seconds)
        for node, said in ended:
            # What is told of an earlier attempt says nothing of this one.
            if said.exit.attempt == self.attempt and node in self.given:
                self.end(node, said)
        self.gone += [node for node in gone if node in self.given and node not in self.ends]
        if self.broken() and not self._ended:
            self._ended = True
            for node in self.left():
                self.host.tell(node, EndAttempt(self.attempt))

    def end(self, node: str, said: Ended) -> None:
        self.ends[node] = said
        if said.exit.cause not in ENDINGS and self._failed is None:
            self._failed = self._clock()

    def left(self) -> list[str]:
        """The nodes of which it is not known how the attempt ended."""
        return [node for node in self.given if node not in self.ends and node not in self.gone]

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Until it has ended everywhere; a node that does not end what is broken is given up."""
        since: float | None = None
        while (left := self.left()) and not given_up():
            self.look(TURN_SECONDS)
            if since is None and self.broken():
                since = self._clock()
            if since is not None and self._clock() - since >= ENDED_SECONDS:
                for node in left:
                    self.host.give_up(node)


def hold(task: Task, listener: socket.socket, address: Address, ended: Callable[[Followed, Plan, int], int]) -> int:
    """Hold the meeting until the run is over for all nodes; the exit code, of `ended`, which says how it ended.

    Raises: BadInput, which the nodes that have joined are told.
    """
    recipe, join = task.recipe, task.join()
    host = Host(listener, leave_secret(recipe.run), join.recipe, task.several.span, (join,), recipe.train.lost_seconds)
    over = Over(EXIT_REQUEUE, "the host was ended")
    try:
        hosting = Hosting(task, host, address)
        with watch.received() as came:
            stop = hosting.gather(came)
        if stop is not None:
            over = Over(stop.code, stop.why)
            say(stop.why)
            return stop.code
        folder = Path(recipe.run)
        followed = supervised(lambda: folder, hosting.attempt, hosting.prepare, recipe.train.restarts, hosting.idle)
        over = Over(followed.code)
        return ended(followed, hosting.made, hosting.number)
    except ShardwiseError as error:
        over = Over(error.exit_code, error.what)
        raise
    finally:
        host.close(over)


class Hosting:
    """The attempts of a run over several nodes: each has a plan for the nodes that are left. number: of the last."""

    def __init__(self, task: Task, host: Host, address: Address) -> None:
        self.task, self.host, self.address = task, host, address
        self.number = 1
        self._plans: dict[int, Plan | PlanInfeasible] = {}
        self.nodes = task.several.span.least
        self.members = tuple(host.members)

    @property
    def made(self) -> Plan:
        """The plan for the nodes that take part."""
        found = self._plan(self.nodes)
        if isinstance(found, PlanInfeasible):
            raise found
        return found

    def gather(self, came: list[int]) -> Stop | None:
        """Wait for the nodes; why there is no first attempt, None where it may begin. Raises: PlanInfeasible."""
        span, began = self.task.several.span, time.monotonic()
        say(f"node {self.task.several.name} holds the meeting; waiting for {_words(span.least, span.most)}")
        while not begins(self.host.members, span, time.monotonic()):
            if came:
                return Stop(told_code(came))
            if time.monotonic() - began >= JOIN_SECONDS and len(self.host.members) < span.least:
                there = ", ".join(one.node for one in self.host.members)
                return Stop(EXIT_REQUEUE, f"of {span.least} nodes only {there} came within {JOIN_SECONDS:.0f} s")
            self.host.turn(TURN_SECONDS)
        self._take(self._most(len(self.host.members)))
        say(f"{len(self.members)} nodes: {', '.join(one.node for one in self.members)}")
        return None

    def attempt(self, before: int, came: list[int], progress: Progress) -> tuple[Exit, Followed]:
        recipe, me = self.task.recipe, self.task.several.name
        state = run_folder.open_run(recipe.run, recipe)
        self.number = state.attempt
        logs = run_folder.new_logs_folder(state.folder / "logs", f"attempt-{state.attempt:03d}")
        where, port = self.address[0], free_port(self.address[0])
        given = parts(self.members, self.task.ranks, state.attempt, where, port, self.made.to_json())
        job = self.task.part(given[me], self.made, where, logs)
        this = Round(self.host, me, state.attempt, given, lambda nodes: self._most(nodes) > self.nodes)
        this.begin()
        followed = follow(
            job, state.folder, state.attempt, came=came, progress=progress, quiet_stdout=self.task.as_json,
            wish=lambda: this.wish(progress.committed),
        )  # fmt: skip
        own = exit_of(followed, state.attempt, progress, ())
        this.end(me, Ended(own, told=bool(came)))
        this.wait(lambda: len(came) > 1)
        whole = together(this.ends, this.gone, me, own, this.came)
        if whole.error and whole.error != own.error:
            say(f"on another node, {whole.why}")
        return whole, followed

    def prepare(self, leave_out: frozenset[int]) -> int:
        """Plan for the nodes that are there. Raises: Again where they are too few, or no plan runs on them."""
        span, there = self.task.several.span, len(self.host.members)
        if there < span.least:
            raise Again(Stop(EXIT_REQUEUE, f"{_words(there, there)} left, and --nodes asks for at least {span.least}"))
        try:
            self._take(self._most(there))
        except PlanInfeasible as error:
            raise Again(Stop(EXIT_REQUEUE, f"{_words(there, there)} left: {error.what}")) from None
        return self.made.decision.mesh.world

    def idle(self, seconds: float) -> None:
        """Spend a pause between two attempts."""
        self.host.turn(seconds)

    def _take(self, nodes: int) -> None:
        self.nodes, self.members = nodes, tuple(self.host.members[:nodes])

    def _most(self, there: int) -> int:
        """Of so many nodes, how many a plan can use; the others wait. Raises: PlanInfeasible where no plan runs."""
        least = self.task.several.span.least
        for nodes in range(there, least, -1):
            if not isinstance(self._plan(nodes), PlanInfeasible):
                return nodes
        found = self._plan(least)
        if isinstance(found, PlanInfeasible):
            raise found
        return least

    def _plan(self, nodes: int) -> "Plan | PlanInfeasible":
        """The same for the same number: a run that goes on with as many nodes has the bits of one that was whole."""
        if nodes not in self._plans:
            try:
                self._plans[nodes] = self.task.plan(nodes)
            except PlanInfeasible as error:
                self._plans[nodes] = error
        return self._plans[nodes]


def _words(least: int, most: int) -> str:
    count = f"{least} to {most}" if least != most else f"{least}"
    return f"{count} node{'' if most == 1 else 's'}"
