"""One side of a meeting of nodes as a process: `host` or `guest`, an address, a folder, a name. It prints JSON lines.

Its clock runs FAST times faster than the wall's, so that bounds of 10 and 20 s are met in 2 and 4.
"""

import json
import socket
import sys
import time

from shardwise.inputs.recipe import Restarts
from shardwise.launch import meeting, nodes
from shardwise.launch.address import Address
from shardwise.launch.supervise import Exit, Span, decide

FAST = 5.0


def clock() -> float:
    return time.monotonic() * FAST


def say(**words: object) -> None:
    print(json.dumps({"at": clock(), **words}), flush=True)


def host(address: Address, folder: str, until: int) -> int:
    """Begin an attempt when two have joined; end after `until` nodes were given up, or all have said how it ended."""
    listener = socket.create_server(address)
    wanted = meeting.Wanted(Span(2, 2), Span(1, 2))
    host = nodes.Host(listener, nodes.leave_secret(folder), "recipe", wanted, clock=clock)
    say(listens=listener.getsockname()[:2])
    ends: dict[str, meeting.Ended] = {}
    begun, gone = False, 0
    while gone < until and len(ends) < 2:
        ended, lost = host.turn(0.05)
        ends.update(ended)
        gone += len(lost)
        for node in lost:
            before = Exit(attempt=1, cause="crash", code=1)
            whole = meeting.together(ends, lost, "a", before)
            say(lost=node, then=type(decide([whole], Restarts())).__name__)
        if not begun and meeting.begins(host.members, Span(2, 2), clock()):
            begun = True
            for node, part in meeting.parts(host.members, 2, 1, "127.0.0.1", 4000, b'{"a":1}').items():
                host.tell(node, part)
    host.close(meeting.Over(0, "done"))
    return 0


def guest(address: Address, folder: str, name: str, ends: bool) -> int:
    """Take part until the run is over, for this node or for all; its code."""
    join = meeting.Join(name, 2, "cpu", "recipe", "")
    guest = nodes.Guest(socket.create_connection(address), join, lambda: nodes.read_secret(folder), clock=clock)
    while True:
        for said in guest.turn(0.05):
            if isinstance(said, meeting.Begin):
                say(
                    begin=[
                        said.node_rank,
                        said.nodes,
                        said.first_rank,
                        said.ranks,
                        said.world,
                        bytes(said.plan).decode(),
                    ]
                )
                if ends:
                    guest.tell(meeting.Ended(Exit(attempt=1, cause="done", code=0)))
            if isinstance(said, meeting.Refused):
                say(refused=said.what)
                return 2
            if isinstance(said, meeting.Over):
                say(over=said.why)
                return said.code


def main(side: str, where: str, port: str, folder: str, word: str) -> int:
    address = (where, int(port))
    if side == "host":
        return host(address, folder, int(word))
    return guest(address, folder, word.removesuffix("!"), word.endswith("!"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
