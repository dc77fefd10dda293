"""Where a run stands in the global order of its data."""

from typing import Any

from shardwise.data.loader import Loader
from shardwise.data.micros import Micros


class Position:
    """The place in the global order that a checkpoint keeps: the loader's, less a step that was dropped."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dropped: int | None = None

    def drop(self, micros: Micros) -> bool:
        """Give a step back that was read and not applied; False where the loader cannot (a Stream)."""
        if isinstance(self.loader, Loader):
            self.dropped = micros.first
        return self.dropped is not None

    def moved(self, loader: Any) -> None:
        """Another loader reads on from here."""
        self.loader, self.dropped = loader, None

    @property
    def samples(self) -> int:
        return int(self.loader.position) if self.dropped is None else self.dropped

    def state_dict(self) -> Any:
        return self.loader.state_dict() if self.dropped is None else {"position": self.dropped}

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)
