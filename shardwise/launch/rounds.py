"""One attempt on several nodes, as their host sees it: launch/meeting.py decides, this acts."""

import time
from collections.abc import Callable

from shardwise.launch.attempts import Say
from shardwise.launch.meeting import ENDED_SECONDS, FAILED_SECONDS, Begin, EndAttempt, Ended
from shardwise.launch.nodes import Host
from shardwise.launch.supervise import ENDINGS
from shardwise.launch.watch import Wish

TURN_SECONDS = 0.2


class Round:
    """One attempt: on which nodes it has ended how, which were lost meanwhile, and which came.

    more: whether so many nodes can take part, where that is more than do; say: shows a line.
    """

    def __init__(
        self,
        host: Host,
        me: str,
        attempt: int,
        given: dict[str, Begin],
        more: Callable[[int], bool],
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.me, self.attempt, self.given = host, me, attempt, given
        self._more, self._say, self._clock = more, say, clock
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
            self._say("another node has come: all begin together after the next save")
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
