"""The meeting of a run's nodes over TCP: the host's side and a node's. Thin: launch/meeting.py decides.

Neither side has a thread: whoever stands by ranks calls `turn` about as often as it looks at them, and at least every
BEAT_SECONDS. The host listens where it is told to and nowhere else.
"""

import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shardwise.errors import RunFolderError
from shardwise.launch.meeting import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    Beat,
    Challenge,
    Ended,
    FromHost,
    Join,
    Member,
    Message,
    NoMessage,
    Refused,
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
from shardwise.launch.supervise import Span

# Connections that have not joined: a port scanner must not take what nodes need.
STRANGERS = 64
CHUNK = 2**16
SECRET = "meeting.secret"
SIOCGIFADDR = 0x8915  # Source: linux/sockios.h
Address = tuple[str, int]


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

    Raises: OSError where the address is another's, or cannot be listened at.
    """

    def __init__(
        self, address: Address, secret: str, recipe: str, span: Span, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._listener = socket.create_server(address, backlog=STRANGERS)
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        self._secret, self._recipe, self._span, self._clock = secret, recipe, span, clock
        self._lines: list[_Line] = []
        self._beaten = clock()
        self.members: list[Member] = []

    def turn(self, seconds: float) -> tuple[list[tuple[str, Ended]], tuple[str, ...]]:
        """Serve whoever has something to say, for at most this long: how attempts ended, and who was given up."""
        ended = [(node, said) for line in self._ready(seconds) for node, said in self._listen(line)]
        now = self._clock()
        gone = silent(self.members, now)
        self.members = [one for one in self.members if one.node not in gone]
        for line in self._lines:
            if line.node in gone or (not line.node and now - line.since >= SILENCE_SECONDS):
                line.close()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            for one in self.members:
                self.tell(one.node, Beat())
        self._lines = [line for line in self._lines if line.open]
        return ended, gone

    def tell(self, node: str, message: Message) -> None:
        """Say this to a node; one whose connection has ended is given up later, and hears nothing."""
        for line in self._lines:
            if line.open and line.node == node:
                line.say(message)

    def close(self) -> None:
        self._listener.close()
        for line in self._lines:
            line.close()

    def _ready(self, seconds: float) -> list[_Line]:
        with selectors.DefaultSelector() as chosen:
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
        return ended

    def _join(self, line: _Line, said: Join) -> None:
        proof = prove(self._secret, line.nonce, said.node)
        no = refusal(said, self._recipe, proof, self.members, self._span.most)
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

    Raises: OSError where nobody listens there.
    """

    def __init__(self, address: Address, join: Join, secret: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = _Line(socket.create_connection(address, timeout=SILENCE_SECONDS), clock())
        self._join, self._secret, self._clock = join, secret, clock
        self._heard = self._beaten = clock()
        self.joined = False

    def turn(self, seconds: float) -> list[FromHost]:
        """What the host has said, waiting for at most this long; `cut_off()` is the last where it is not heard."""
        came = self._wait(seconds)
        now = self._clock()
        if came:
            self._heard = now
        if self.joined and now - self._beaten >= BEAT_SECONDS and self._line.open:
            self._beaten = now
            self._line.say(Beat())
        if any(isinstance(one, Refused) for one in came):
            return came
        return [*came, cut_off()] if alone(self._heard, now) else came

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
            self._line.close()
            return []
        for one in said:
            self._answer(one)
        return said

    def _answer(self, said: FromHost) -> None:
        if isinstance(said, Challenge):
            proof = prove(self._secret, said.nonce, self._join.node)
            self._line.say(msgspec.structs.replace(self._join, proof=proof))
        self.joined = self.joined or isinstance(said, Beat)


def interface_of(address: str) -> str:
    """The interface of this machine that has this IPv4 address; empty where none has. Source: netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(said[20:24]) == address:
                return name
    return ""
