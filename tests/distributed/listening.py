"""At which addresses processes listen, from /proc: what another machine could reach. Source: proc_pid_net(5)."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"  # TCP_LISTEN. Source: linux/tcp_states.h


def listens(pids: Iterable[int]) -> set[str]:
    """The IP numbers at which any of these processes has a listening TCP socket."""
    held = {_target(entry.path) for pid in pids for entry in os.scandir(f"/proc/{pid}/fd")}
    found = set[str]()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in held:
                # Words of 32 bits in this machine's order.
                words = bytes.fromhex(fields[1].partition(":")[0])
                number = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, number))
    return found


def _target(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 (a name as "socket:[17]" is no path)
    except OSError:
        return ""  # closed meanwhile
