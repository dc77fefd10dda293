"""The meeting of a run's nodes: what they say to each other, and what their host concludes from it. Pure.

One node holds the meeting (the host); the supervisor of every node is a member of it, the host's own too. The host
gives a node up that it has not heard for `lost_seconds`; a node that hears nothing for half of that ends its ranks and
itself: when the others go on without a node, its ranks are gone and write nothing more.

Messages are JSON, one a line, of at most MESSAGE_BYTES. Whoever joins proves that it sees the run's folder: it reads a
secret there, and answers the host's challenge with it. So a node with a folder of its own is found before it starts,
and nobody joins who cannot read the run.
"""

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from shardwise.errors import EXIT_REQUEUE
from shardwise.launch.outcome import Cause
from shardwise.launch.supervise import Device, Exit, Span, passes

BEAT_SECONDS = 1.0
# An attempt that failed on one node ends on the others by itself, as their collectives break; after this long it is
# ended there.
FAILED_SECONDS = 5.0
# How long a node may take to end an attempt of which nothing is to come any more; longer than watch.end_left waits.
ENDED_SECONDS = 60.0
# How long nodes wait for each other before the first attempt. As torchelastic's join timeout.
JOIN_SECONDS = 600.0
# More nodes may come until none has for this long: those of one job start within seconds of each other, and who is
# later joins after the next save.
SETTLE_SECONDS = 10.0
# A plan with its recipe and cluster takes some 20 KiB; nothing else here is long.
MESSAGE_BYTES = 4 * 2**20

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="says"):
    """Any line of the meeting."""


class Challenge(Message, frozen=True, tag="challenge"):
    """The host's first word to whoever connects."""

    nonce: str


class Join(Message, frozen=True, tag="join"):
    """A node's answer. devices: that it has; proof: of `prove`; recipe: digest of the one it was started with."""

    node: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    devices: Positive
    device: str
    recipe: str
    proof: str


class Refused(Message, frozen=True, tag="refused"):
    """This node does not take part: the parts of the error that it ends with."""

    what: str
    why: str
    fix: str


class Beat(Message, frozen=True, tag="beat"):
    """I am there. Both sides say it, every BEAT_SECONDS."""


class Begin(Message, frozen=True, tag="begin"):
    """An attempt begins: this node's part of it. The ranks are first_rank to first_rank + ranks - 1 of `world`, none on
    the node's devices of `leave_out`.
    """

    attempt: Positive
    node_rank: Count
    nodes: Positive
    address: str
    port: Port
    first_rank: Count
    ranks: Positive
    world: Positive
    plan: msgspec.Raw = msgspec.Raw(b"null")
    leave_out: tuple[Count, ...] = ()


class Ended(Message, frozen=True, tag="ended"):
    """How an attempt ended on this node. told: this node itself was told to stop, by a signal."""

    exit: Exit
    told: bool = False


class Leave(Message, frozen=True, tag="leave"):
    """A node's last word: it has no ranks any more, and nobody needs to wait for it."""


class EndAttempt(Message, frozen=True, tag="end_attempt"):
    """End this attempt's ranks at once: they wait for somebody who is gone."""

    attempt: Positive


class Over(Message, frozen=True, tag="over"):
    """The run is over: the exit code of the whole, and why."""

    code: Count
    why: str = ""


FromHost = Challenge | Refused | Beat | Begin | EndAttempt | Over
FromNode = Join | Beat | Ended | Leave
_FROM_HOST = msgspec.json.Decoder(FromHost)
_FROM_NODE = msgspec.json.Decoder(FromNode)


class NoMessage(ValueError):
    """What came is no message of the meeting: the connection that it came by is closed."""


def to_line(message: Message) -> bytes:
    """Raises: NoMessage where it would be longer than the other side reads."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > MESSAGE_BYTES:
        raise NoMessage(f"{len(line)} bytes, and a message has at most {MESSAGE_BYTES}")
    return line


def from_host(line: bytes) -> FromHost:
    """Raises: NoMessage."""
    try:
        return _FROM_HOST.decode(line)
    except msgspec.DecodeError as error:
        raise NoMessage(str(error)) from None


def from_node(line: bytes) -> FromNode:
    """Raises: NoMessage."""
    try:
        return _FROM_NODE.decode(line)
    except msgspec.DecodeError as error:
        raise NoMessage(str(error)) from None


def split(received: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines of what was received, and the beginning of the next.

    Raises: NoMessage where a line is too long, finished or not.
    """
    *lines, rest = received.split(b"\n")
    longest = max(map(len, (*lines, rest)))
    if longest >= MESSAGE_BYTES:
        raise NoMessage(f"{longest} bytes, and a message has at most {MESSAGE_BYTES}")
    return lines, rest


def prove(secret: str, nonce: str, node: str) -> str:
    """That a node of this name knows the secret, without saying it. Source: RFC 2104, with SHA-256."""
    return hmac.new(secret.encode(), f"{nonce}\n{node}".encode(), hashlib.sha256).hexdigest()


class Member(NamedTuple):
    """A node that has joined. heard: when it last said anything, seconds of the host's clock."""

    node: str
    devices: int
    device: str
    joined: float
    heard: float


class Wanted(NamedTuple):
    """What is asked of a run's nodes. ranks: on each; alike: as many devices on each, where nobody said how many."""

    nodes: Span
    ranks: Span
    alike: bool = False


def refusal(join: Join, recipe: str, proof: str, members: Sequence[Member], wanted: Wanted) -> Refused | None:
    """Why a node does not take part; None where it does. recipe, proof: what they should be."""
    if not hmac.compare_digest(join.proof.encode(), proof.encode()):
        return Refused(
            f"{join.node} does not see the run folder of the other nodes.",
            "it does not know what the host wrote there, and every node reads and writes checkpoints in it",
            "give a run folder (run = ...) on a file system that all nodes share",
        )
    if join.recipe != recipe:
        return Refused(
            f"{join.node} was started with another recipe.",
            f"its digest is {join.recipe}, and the host's is {recipe}",
            "give every node the same recipe and the same --set",
        )
    if any(one.node == join.node for one in members):
        return Refused(
            f"A node {join.node} takes part already.",
            "names of nodes tell them apart",
            "give each its own --node-name, or wait until the host has given the other up",
        )
    if wanted.alike and (devices := _others(str(join.devices), [str(one.devices) for one in members])):
        return Refused(
            f"{join.node} has {join.devices} devices; the others have {devices}.",
            "a mesh has as many ranks on every node, and nobody said how many",
            "give every node the same --devices N, or MIN:MAX",
        )
    if join.devices < wanted.ranks.least:
        return Refused(
            f"{join.node} has {join.devices} devices, and train.devices asks for at least {wanted.ranks.least}.",
            "a mesh has as many ranks on every node",
            "give every node a smaller --devices",
        )
    if kinds := _others(join.device, [one.device for one in members]):
        return Refused(
            f"{join.node} has {join.device}; the others have {kinds}.",
            "a plan splits the work evenly, so every device must be of one kind",
            "start one run for each kind of device",
        )
    if len(members) >= (most := wanted.nodes.most):
        return Refused(
            f"{most} nodes take part already.", f"--nodes asks for at most {most}", "raise it, on every node"
        )
    return None


def _others(own: str, theirs: Sequence[str]) -> str:
    """What the others say that is not this node's own; empty where all say the same."""
    return ", ".join(sorted({*theirs} - {own}))


def begins(members: Sequence[Member], span: Span, now: float) -> bool:
    """Whether the nodes that are there begin: as many as may come, or enough and no other since SETTLE_SECONDS."""
    if len(members) >= span.most:
        return True
    return len(members) >= span.least and now - max(one.joined for one in members) >= SETTLE_SECONDS


def silent(members: Sequence[Member], now: float, lost_seconds: float) -> tuple[str, ...]:
    """The nodes that the host gives up."""
    return tuple(one.node for one in members if now - one.heard >= lost_seconds)


def alone(heard: float, now: float, lost_seconds: float) -> bool:
    """Whether a node, which last heard the host at `heard`, ends its ranks and itself."""
    return now - heard >= lost_seconds / 2


def cut_off(lost_seconds: float) -> Over:
    """What a node ends with that is `alone`: the queue may put it where the host is heard."""
    return Over(EXIT_REQUEUE, f"nothing was heard of the host for {lost_seconds / 2:g} s")


def parts(
    members: Sequence[Member],
    per_node: int,
    attempt: int,
    address: str,
    port: int,
    plan: bytes,
    leave_out: Collection[Device] = (),
) -> dict[str, Begin]:
    """Each node's part of an attempt, in the order in which they joined: the host's is the first.

    per_node: ranks on every node, as a mesh wants it; ranks are numbered through, node after node.
    """
    return {
        one.node: Begin(
            attempt=attempt, node_rank=index, nodes=len(members), address=address, port=port,
            first_rank=index * per_node, ranks=per_node, world=len(members) * per_node, plan=msgspec.Raw(plan),
            leave_out=tuple(sorted(device.place for device in leave_out if device.node == one.node)),
        )
        for index, one in enumerate(members)
    }  # fmt: skip


# What a node says of an attempt, the most telling first: an error of its own before what its peers make of it. A rank
# that is killed makes its peers crash; a stop that all agreed on is what remains where nothing went wrong.
TELLING: tuple[Cause, ...] = (
    *("interrupted", "bad_input", "out_of_memory", "diverged", "hang", "lost", "crash", "preempted", "done"),
)


def together(ends: Mapping[str, Ended], gone: Sequence[str], host: str, before: Exit, came: Sequence[str] = ()) -> Exit:
    """How an attempt ended, of how it did on every node. gone: nodes that were lost; came: for which it ended.

    before: where it stood, where the host has no end of its own. Where the run stands the host knows, whose first rank
    tells it. A lost node explains what the others then met. A stop that only another node was told is that node's:
    `elsewhere`.
    """
    own = ends[host].exit if host in ends else before
    if gone:
        return msgspec.structs.replace(
            own, cause="lost", code=EXIT_REQUEUE, error="", fix="", device=None, elsewhere=True,
            why=f"lost: {', '.join(gone)}: not heard of any more",
        )  # fmt: skip
    if not ends:
        return before
    name = min(ends, key=lambda node: _telling(ends[node].exit))
    end = ends[name].exit
    told = [node for node, one in ends.items() if one.told]
    elsewhere = end.cause == "preempted" and bool(told or came) and host not in told
    why = end.why
    if elsewhere:
        why = f"{', '.join(told)} was told to stop" if told else f"{', '.join(came)} came"
    return msgspec.structs.replace(
        own, cause=end.cause, code=end.code, error=end.error, why=why, fix=end.fix, elsewhere=elsewhere,
        step=own.step if end.step is None else end.step, device=end.device, node=name,
    )  # fmt: skip


def _telling(end: Exit) -> tuple[int, bool]:
    """Less is more telling: the cause, then an error that does not come of the network."""
    return TELLING.index(end.cause), passes(end.error)
