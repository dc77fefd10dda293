"""Where a run reads: its place in the global order, what is passed over, and the ledger of what was trained on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwise.data import ledger
from shardwise.data.ledger import Ledger
from shardwise.data.loader import Loader
from shardwise.data.micros import Micros
from shardwise.errors import RanksDiverged
from shardwise.train.health import Bad


class Reading:
    """Step after step of the data. Its state is the place in the global order that a checkpoint keeps: the loader's,
    less a step that was dropped.

    `open_loader`: a loader that reads from a position on.
    """

    def __init__(self, open_loader: Callable[[int], Any], attempt: int) -> None:
        self._open = open_loader
        self._loader = open_loader(0)
        self._dropped: int | None = None
        self._over: list[Bad] = []
        self.ledger = Ledger(attempt)

    @property
    def samples(self) -> int:
        """The place in the global order, counted over epochs."""
        return int(self._loader.position) if self._dropped is None else self._dropped

    def steps(self) -> Iterator[Micros]:
        """Step after step of the loader; of the next one, where the run goes back or passes samples over."""
        reads = None
        while reads is not self._loader:
            reads = self._loader
            for micros in reads:
                yield micros
                self._pass_over()
                if reads is not self._loader:
                    break

    def sums(self, micros: Micros, counts: bool) -> tuple[int, int, int]:
        """What this rank adds to the agreement on what was read; nothing where another rank speaks for it."""
        return ledger.read_sums(micros) if counts else (0, 0, 0)

    def require_once(self, micros: Micros, read: Sequence[float]) -> None:
        """`read`: the sums of all ranks. Raises: RanksDiverged, on all of them, where they are not of this step."""
        if isinstance(self._loader, Loader) and not ledger.agrees(micros, read):
            raise RanksDiverged(
                f"The ranks did not read samples {micros.first} to {micros.next_position - 1} once each.",
                why="two ranks take themselves for the same part of the data, or one is at another step",
                fix="start every rank by one launcher (shardwise train, torchrun), and leave the loader to the Trainer",
            )

    def trained(self, step: int, micros: Micros) -> None:
        """The update of this step is made: it is in the ledger."""
        self.ledger.add(step, micros.first, micros.samples, micros.next_position)

    def drop(self, micros: Micros) -> bool:
        """Give a step back that was read and not applied; False where the loader cannot (a Stream)."""
        if isinstance(self._loader, Loader):
            self._dropped = micros.first
        return self._dropped is not None

    def begin_again(self) -> None:
        """Before a checkpoint is loaded: a loader that has begun cannot be moved."""
        self._read_from(0)

    def pass_over(self, bad: Bad) -> int:
        """From now on these samples are left out when they come; returns how many they are."""
        self._over.append(bad)
        return bad.end - bad.since.first

    def resumed(self) -> None:
        """A checkpoint was loaded: what is to be passed over may begin right here."""
        self._pass_over()

    def close(self) -> None:
        """End the loader's workers. Idempotent."""
        self._loader.close()

    def state_dict(self) -> Any:
        return self._loader.state_dict() if self._dropped is None else {"position": self._dropped}

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)

    def _pass_over(self) -> None:
        """Where samples begin that are to be passed over, read on behind them."""
        while bad := next((one for one in self._over if one.since.first == self.samples), None):
            self.ledger.pass_over(bad.since.first, bad.end, bad.why)
            self._read_from(bad.end)

    def _read_from(self, position: int) -> None:
        self._loader.close()
        self._loader, self._dropped = self._open(position), None
