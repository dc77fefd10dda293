"""What `shardwise train` is asked for with --nodes, --rendezvous and --node-name.

The same command starts on every node. The one that has the rendezvous's address holds the meeting (launch/hosting.py);
every other one joins it (launch/taking_part.py).
"""

import re

from shardwise.environment import hostname
from shardwise.errors import RecipeError
from shardwise.launch.address import parse
from shardwise.launch.supervise import Span
from shardwise.launch.task import Several


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
