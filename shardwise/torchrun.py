"""torchrun, with the ranks' store at one address: torch's own rendezvous listens on all interfaces of the first node.

`python -m shardwise.torchrun` takes torchrun's arguments. With --rdzv-backend=shardwise it is known beforehand who
takes part, as in torch's static rendezvous: --rdzv-endpoint=ADDRESS:PORT is the first node's, and --rdzv-conf=rank=N
this one's place among them. Port 0 is any that is free, for one node alone.
"""

import datetime
import socket
import sys
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main

from shardwise.launch.address import Address, family_of, parts_of

BACKEND = "shardwise"
# How long the nodes' launchers wait for each other. As torch's static rendezvous.
TIMEOUT = datetime.timedelta(seconds=600)


class Meeting(RendezvousHandler):
    """The first node's launcher serves the store, all others and every rank are its clients."""

    def __init__(self, address: Address, rank: int, nodes: int, run: str) -> None:
        self.address, self.rank, self.nodes, self.run = address, rank, nodes, run
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._serve() if self.rank == 0 else self._reach()
        met = RendezvousStoreInfo(self.address[0], self._store.port)
        return RendezvousInfo(PrefixStore(self.run, self._store), self.rank, self.nodes, met)

    def _serve(self) -> TCPStore:
        """Raises: OSError where somebody listens there already."""
        listener = socket.create_server(self.address, family=family_of(self.address[0]), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        # The store closes it.
        return TCPStore(self.address[0], port, self.nodes, True, TIMEOUT, master_listen_fd=listener.detach())

    def _reach(self) -> TCPStore:
        return TCPStore(self.address[0], self.address[1], self.nodes, False, TIMEOUT)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody joins later: there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run

    def shutdown(self) -> bool:
        return True


def meeting(asked: RendezvousParameters) -> Meeting:
    """What torchrun asks for. Raises: ValueError for an endpoint that is no ADDRESS:PORT."""
    address = parts_of(asked.endpoint)
    if address is None:
        raise ValueError(f"--rdzv-endpoint={asked.endpoint} is no ADDRESS:PORT")
    return Meeting(address, int(asked.config["rank"]), asked.max_nodes, asked.run_id)


def run(arguments: list[str]) -> Any:
    """Start this node's ranks and stand by them, as torchrun does."""
    rendezvous_handler_registry.register(BACKEND, meeting)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
