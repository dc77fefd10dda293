"""Where a run's nodes meet: the address as it is written, whose it is, and by which interface it is reached. IPv4."""

import errno
import fcntl
import re
import socket
import struct

from shardwise.errors import RecipeError

SIOCGIFADDR = 0x8915  # Source: linux/sockios.h
# Connections that wait to be accepted: all nodes of a job may come while the host still prepares.
BACKLOG = 1024
Address = tuple[str, int]


def parse(text: str) -> Address:
    """HOST:PORT as it is written. Raises: RecipeError."""
    found = re.fullmatch(r"([A-Za-z0-9._-]+):([0-9]{1,5})", text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise RecipeError(
            f"--rendezvous {text} is no HOST:PORT.", fix="--rendezvous node-0:29400, the same on all nodes"
        )
    return found[1], int(found[2])


def resolve(address: Address) -> Address:
    """The address with its host as an IPv4 number.

    Raises: RecipeError where it has none, or one that other nodes cannot reach.
    """
    host, port = address
    try:
        number = str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise RecipeError(
            f"--rendezvous {host}:{port}: {host} has no IPv4 address.",
            why=error.strerror or str(error),
            fix="give a name that all nodes resolve, or a number such as 10.0.0.1",
        ) from None
    if number == "0.0.0.0":
        raise RecipeError(
            f"--rendezvous {host}:{port} is no one node's address.", fix="give that of one node, which the others reach"
        )
    if number.startswith("127.") and host not in ("localhost", number):
        raise RecipeError(
            f"--rendezvous {host}:{port}: {host} is {number} on this node.",
            why="no other node reaches that; /etc/hosts often names a machine so for itself",
            fix="give its number in the nodes' network, such as 10.0.0.1",
        )
    return number, port


def is_here(number: str) -> bool:
    """Whether this machine has the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asked:
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
        return socket.create_server(address, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RecipeError(
            f"Nobody can listen at {address[0]}:{address[1]}.",
            why=error.strerror or str(error),
            fix="--rendezvous with a port above 1023",
        ) from None


def free_port(number: str) -> int:
    """A port of this address that is free now."""
    with socket.create_server((number, 0)) as found:
        port: int = found.getsockname()[1]
    return port


def interface_of(number: str) -> str:
    """The interface of this machine that has this IPv4 address; empty where none has. Source: netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(said[20:24]) == number:
                return name
    return ""
