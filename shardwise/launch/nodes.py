"""The meeting of a run's nodes over TCP: the host's side and a node's. Thin: launch/meeting.py decides.

Neither side has a thread: whoever stands by ranks calls `turn` about as often as it looks at them, and at least every
BEAT_SECONDS. The host listens where it is told to and nowhere else (launch/address.py).
"""

import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shardwise.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, RunFolderError
from shardwise.launch.meeting import (
    BEAT_SECONDS,
    Beat,
    Challenge,
    Ended,
    FromHost,
    Join,
    Leave,
    Member,
    Message,
    NoMessage,
    Over,
    Refused,
    Wanted,
    alone,
    cut_off,
    from_host,
    from_node,
    prove,
    refusal,
    silent,
    split,
    to_line,
)

# Connections that have not joined: a port scanner must not take what nodes need.
STRANGERS, STRANGER_SECONDS = 64, 10.0
CHUNK = 2**16
SECRET = "meeting.secret"
# How long the host waits at the end for nodes to hear that it is over.
FAREWELL_SECONDS = 3.0


def leave_secret(folder: str | Path) -> str:
    """Write a new secret into the run's folder, where every node must see it; only this user can read it."""
    path = Path(folder) / SECRET
    secret = secrets.token_hex(32)
    temporary = path.with_name(f".{SECRET}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secret)
    temporary.replace(path)
    return secret


def read_secret(folder: str | Path) -> str:
    """What the host left there; empty where this node sees nothing: the host then refuses it and says why.

    Raises: RunFolderError where it is there and cannot be read.
    """
    path = Path(folder) / SECRET
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read.", why=str(error), fix="run all nodes as one user") from None


def not_joined(strange: bool) -> Over:
    """What a node ends with whose connection ended before it took part. strange: what was heard is no message."""
    if not strange:
        return Over(EXIT_REQUEUE, "the host ended before this node took part")
    return Over(EXIT_BAD_INPUT, "what listens there is no run's host: give another port (--rendezvous)")


class _Line:
    """One connection: what came and is no whole line yet, and what could not be sent yet. It never blocks."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        self.socket, self.since, self.open = connection, now, True
        self.node = ""
        self.nonce = secrets.token_hex(16)
        self._came = b""
        self._leaves = bytearray()

    def say(self, message: Message) -> None:
        self._leaves += to_line(message)
        self.flush()

    def flush(self) -> None:
        while self.open and self._leaves:
            try:
                del self._leaves[: self.socket.send(self._leaves)]
            except BlockingIOError:
                return
            except OSError:
                self.close()

    def hear(self) -> list[bytes]:
        """The whole lines that have come. What is no message closes the connection, as its end does."""
        try:
            came = self.socket.recv(CHUNK)
            if not came:
                self.close()
            lines, self._came = split(self._came + came)
        except BlockingIOError:
            return []
        except (OSError, NoMessage):
            self.close()
            return []
        return lines

    def close(self) -> None:
        self.open = False
        self.socket.close()


class Host:
    """Holds the meeting. `members`: the nodes that take part, in the order in which they joined.

    A connection that ends is only silent: its node keeps its name until it is given up, since its ranks may yet write.
    Where the host is a node itself it comes first, joined from the start, and is never given up.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        recipe: str,
        wanted: Wanted,
        own: Sequence[Join] = (),
        lost_seconds: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._secret, self._recipe, self._wanted, self._clock = secret, recipe, wanted, clock
        self._lost_seconds = lost_seconds
        self._lines: list[_Line] = []
        self._left: list[str] = []
        self._beaten = clock()
        self.members = [Member(one.node, one.devices, one.device, clock(), float("inf")) for one in own]

    def turn(self, seconds: float) -> tuple[list[tuple[str, Ended]], tuple[str, ...]]:
        """Serve whoever has something to say, for at most this long: how attempts ended, and who is gone."""
        ended = [(node, said) for line in self._ready(seconds) for node, said in self._listen(line)]
        now = self._clock()
        gone = (*self._left, *silent(self.members, now, self._lost_seconds))
        self._left = []
        self.members = [one for one in self.members if one.node not in gone]
        for line in self._lines:
            if line.node in gone or (not line.node and now - line.since >= STRANGER_SECONDS):
                line.close()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            for one in self.members:
                self.tell(one.node, Beat())
        self._lines = [line for line in self._lines if line.open]
        return ended, gone

    def give_up(self, node: str) -> None:
        """From the next turn on this node does not take part any more."""
        self._left.append(node)

    def tell(self, node: str, message: Message) -> None:
        """Say this to a node; one whose connection has ended is given up later, and hears nothing."""
        for line in self._lines:
            if line.open and line.node == node:
                line.say(message)

    def close(self, over: Over) -> None:
        """Tell all nodes that it is over, and give them the time to hear it; then nobody listens here any more."""
        for one in self.members:
            self.tell(one.node, over)
        self._listener.close()
        for line in self._lines:
            if not line.node:
                line.close()
        until = self._clock() + FAREWELL_SECONDS
        while any(line.open for line in self._lines) and self._clock() < until:
            for line in self._ready(BEAT_SECONDS / 10):
                line.hear()
        for line in self._lines:
            line.close()

    def _ready(self, seconds: float) -> list[_Line]:
        with selectors.DefaultSelector() as chosen:
            if self._listener.fileno() >= 0:
                chosen.register(self._listener, selectors.EVENT_READ)
            for line in self._lines:
                line.flush()
                if line.open:
                    chosen.register(line.socket, selectors.EVENT_READ, line)
            found = [key.data for key, _ in chosen.select(seconds)]
        if None in found:
            self._accept()
        return [line for line in found if line is not None]

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        if sum(not line.node for line in self._lines) >= STRANGERS:
            connection.close()
            return
        line = _Line(connection, self._clock())
        self._lines.append(line)
        line.say(Challenge(line.nonce))

    def _listen(self, line: _Line) -> list[tuple[str, Ended]]:
        ended = []
        for raw in line.hear():
            try:
                said = from_node(raw)
            except NoMessage:
                line.close()
                break
            if isinstance(said, Join) and not line.node:
                self._join(line, said)
            elif not line.node:
                line.close()
                break
            else:
                self._heard(line.node)
                if isinstance(said, Ended):
                    ended.append((line.node, said))
                if isinstance(said, Leave):
                    self._left.append(line.node)
        return ended

    def _join(self, line: _Line, said: Join) -> None:
        proof = prove(self._secret, line.nonce, said.node)
        no = refusal(said, self._recipe, proof, self.members, self._wanted)
        if no is not None:
            line.say(no)
            line.close()
            return
        line.node = said.node
        now = self._clock()
        self.members.append(Member(said.node, said.devices, said.device, now, now))
        line.say(Beat())

    def _heard(self, node: str) -> None:
        now = self._clock()
        self.members = [one._replace(heard=now) if one.node == node else one for one in self.members]


class Guest:
    """A node's side: it joins when it is challenged, beats, and hears what the host says.

    secret: reads what the host left in the run's folder, which it does before it challenges anybody.
    """

    def __init__(
        self,
        connection: socket.socket,
        join: Join,
        secret: Callable[[], str],
        lost_seconds: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line = _Line(connection, clock())
        self._join, self._secret, self._clock, self._lost_seconds = join, secret, clock, lost_seconds
        self._heard = self._beaten = clock()
        self.challenged = self.joined = self._strange = False

    def turn(self, seconds: float) -> list[FromHost]:
        """What the host has said, waiting for at most this long; `cut_off` is the last where it is not heard.

        A host may be long at its own preparations before it challenges anybody: that silence is the caller's to bound.
        """
        came = self._wait(seconds)
        now = self._clock()
        if came:
            self._heard = now
        if self.joined and now - self._beaten >= BEAT_SECONDS and self._line.open:
            self._beaten = now
            self._line.say(Beat())
        if any(isinstance(one, Refused | Over) for one in came):
            return came
        if not self.joined and not self._line.open:
            return [*came, not_joined(self._strange)]
        lost = self.challenged and alone(self._heard, now, self._lost_seconds)
        return [*came, cut_off(self._lost_seconds)] if lost else came

    def tell(self, message: Message) -> None:
        if self._line.open:
            self._line.say(message)

    def close(self) -> None:
        self._line.close()

    def _wait(self, seconds: float) -> list[FromHost]:
        self._line.flush()
        if not self._line.open:
            time.sleep(min(seconds, BEAT_SECONDS))
            return []
        with selectors.DefaultSelector() as chosen:
            chosen.register(self._line.socket, selectors.EVENT_READ)
            if not chosen.select(seconds):
                return []
        try:
            said = [from_host(raw) for raw in self._line.hear()]
        except NoMessage:
            self._strange = True
            self._line.close()
            return []
        for one in said:
            self._answer(one)
        return said

    def _answer(self, said: FromHost) -> None:
        if isinstance(said, Challenge):
            self.challenged = True
            self._heard = self._clock()
            proof = prove(self._secret(), said.nonce, self._join.node)
            self._line.say(msgspec.structs.replace(self._join, proof=proof))
        self.joined = self.joined or isinstance(said, Beat)
