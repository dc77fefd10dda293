"""Where a run's nodes meet: the address as it is written, whose it is, and by which interface it is reached."""

import errno
import fcntl
import re
import socket
import struct
from pathlib import Path

from shardwise.errors import RecipeError

SIOCGIFADDR = 0x8915  # Source: linux/sockios.h
# Connections that wait to be accepted: all nodes of a job may come while the host still prepares.
BACKLOG = 1024
Address = tuple[str, int]


_WRITTEN = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})")
# What no other node reaches, and what is no one node's address.
_LOOPBACK, _ANY = ("127.", "::1"), ("0.0.0.0", "::")


def parse(text: str) -> Address:
    """HOST:PORT as it is written. Raises: RecipeError."""
    found = parts_of(text)
    if found is None or found[1] == 0:
        raise RecipeError(
            f"--rendezvous {text} is no HOST:PORT.",
            fix="--rendezvous node-0:29400, the same on all nodes; a number of IPv6 as [fd00::1]:29400",
        )
    return found


def parts_of(text: str) -> Address | None:
    """The host and the port of a text; None where it has not both. The inverse of `written`."""
    found = _WRITTEN.fullmatch(text)
    return (found[1] or found[2], int(found[3])) if found is not None and int(found[3]) < 65536 else None


def written(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(number: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in number else socket.AF_INET


def resolve(address: Address) -> Address:
    """The address with its host as a number, of IPv4 where it has one.

    Raises: RecipeError where it has none, or one that other nodes cannot reach.
    """
    host, port = address
    where = f"--rendezvous {written(address)}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise RecipeError(
            f"{where}: {host} has no address.",
            why=error.strerror or str(error),
            fix="give a name that all nodes resolve, or a number such as 10.0.0.1",
        ) from None
    number = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
    if number in _ANY:
        raise RecipeError(f"{where} is no one node's address.", fix="give that of one node, which the others reach")
    if number.startswith(_LOOPBACK) and host not in ("localhost", number):
        raise RecipeError(
            f"{where}: {host} is {number} on this node.",
            why="no other node reaches that; /etc/hosts often names a machine so for itself",
            fix="give its number in the nodes' network, such as 10.0.0.1",
        )
    return number, port


def is_here(number: str) -> bool:
    """Whether this machine has the address."""
    with socket.socket(family_of(number), socket.SOCK_STREAM) as asked:
        try:
            asked.bind((number, 0))
        except OSError:
            return False
    return True


def listen(address: Address) -> socket.socket | None:
    """Listen at an address of this machine, and nowhere else; None where somebody does already.

    Raises: RecipeError where this user may not.
    """
    try:
        return socket.create_server(address, family=family_of(address[0]), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RecipeError(
            f"Nobody can listen at {written(address)}.",
            why=error.strerror or str(error),
            fix="--rendezvous with a port above 1023",
        ) from None


def free_port(number: str) -> int:
    """A port of this address that is free now."""
    with socket.create_server((number, 0), family=family_of(number)) as found:
        port: int = found.getsockname()[1]
    return port


def interface_of(number: str) -> str:
    """The interface of this machine that has this address; empty where none has. Source: netdevice(7), proc_net(5)."""
    if family_of(number) == socket.AF_INET6:
        packed = socket.inet_pton(socket.AF_INET6, number).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.split()[0] == packed), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(said[20:24]) == number:
                return name
    return ""
