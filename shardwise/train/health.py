"""Whether a run is well: losses that are not finite, spikes, and when to go back from which. The same on every rank.

An update that is not finite is skipped on all ranks. Three in a row, or a spike that lasts, are more than a hard
sample, and `train.on_spike` says what then. "tell": a spike is told, what is not finite ends the run. "roll_back": it
goes back to a checkpoint from before it and reads the same samples again, which mends what a machine did wrong.
"pass_over": as that, but the samples from the onset on are passed over, which mends what the data did.
"""

from typing import Any, Literal, NamedTuple

from shardwise.errors import NonFinite
from shardwise.train.journal import Journal
from shardwise.train.spikes import Spikes

NON_FINITE_LIMIT = 3
# What comes again and again is not mended by going back.
MOST_RETURNS = 3
OnSpike = Literal["tell", "roll_back", "pass_over"]


class Seen(NamedTuple):
    """A step as the ranks agreed on it. `first` to before `end` are its samples; `overflow`: fp16's, and no fault."""

    step: int
    first: int
    end: int
    loss: float
    norm: float
    applied: bool
    overflow: bool


class Onset(NamedTuple):
    """Where something went wrong: the step, and its first sample."""

    step: int
    first: int


class Bad(NamedTuple):
    """From this step and sample on, to before sample `end`, the run was not well: it should go back."""

    since: Onset
    end: int
    why: str


class Health:
    """Looks at every step. Its state goes into checkpoints, but for what was tried already."""

    def __init__(self, on_spike: OnSpike, journal: Journal) -> None:
        self.on_spike, self._journal = on_spike, journal
        self._spikes = Spikes()
        self._in_a_row = 0
        self._onset: Onset | None = None
        self._spiked_at: Onset | None = None
        self._returned_from: list[Onset] = []

    def look(self, seen: Seen) -> Bad | None:
        """What the run should go back from; None where all is well, or is only to be told.

        Raises: NonFinite where nothing helps.
        """
        if seen.overflow:
            self._journal.fallback(
                f"step {seen.step} was skipped: fp16 gradients overflowed", "the loss scale is halved"
            )
            return None
        return self._spike(seen) if seen.applied else self._non_finite(seen)

    def returned(self, bad: Bad) -> None:
        """The run went back from it: if it comes again from the same samples, that was no help."""
        self._returned_from.append(bad.since)

    def state_dict(self) -> dict[str, Any]:
        onsets = {"onset": self._onset, "spiked_at": self._spiked_at}
        held = {name: None if onset is None else list(onset) for name, onset in onsets.items()}
        return {"spikes": self._spikes.state_dict(), "in_a_row": self._in_a_row, **held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spikes.load_state_dict(state["spikes"])
        self._in_a_row = state["in_a_row"]
        self._onset = None if state["onset"] is None else Onset(*state["onset"])
        self._spiked_at = None if state["spiked_at"] is None else Onset(*state["spiked_at"])

    def _non_finite(self, seen: Seen) -> Bad | None:
        self._onset = Onset(seen.step, seen.first) if self._onset is None else self._onset
        self._in_a_row += 1
        self._journal.non_finite(seen.step, seen.loss, seen.norm, self._in_a_row)
        if self._in_a_row < NON_FINITE_LIMIT:
            return None
        if self.on_spike == "tell" or self._hopeless(self._onset):
            raise self._error(seen, self._onset)
        return Bad(self._onset, seen.end, f"not finite {self._in_a_row} steps in a row, since step {self._onset.step}")

    def _spike(self, seen: Seen) -> Bad | None:
        self._in_a_row, self._onset = 0, None
        spike = self._spikes.look(seen.step, seen.loss)
        if spike is None:
            self._spiked_at = None
            return None
        if self._spiked_at is None:
            self._spiked_at = Onset(seen.step, seen.first)
            self._journal.spike(spike)
        if not spike.lasting or self.on_spike == "tell" or self._hopeless(self._spiked_at):
            return None
        return Bad(self._spiked_at, seen.end, f"a spike of the loss since step {self._spiked_at.step}")

    def _hopeless(self, onset: Onset) -> bool:
        again = any(onset.first == earlier.first for earlier in self._returned_from)
        return again or len(self._returned_from) >= MOST_RETURNS

    def _error(self, seen: Seen, onset: Onset) -> NonFinite:
        what = f"The loss or the gradient was not finite {self._in_a_row} steps in a row, to step {seen.step}."
        why = f"loss {seen.loss}, gradient norm {seen.norm}; none of these updates was applied"
        if any(onset.first == earlier.first for earlier in self._returned_from):
            why += "; the run went back, and the same samples gave the same again: it is not the machine"
        elif self._returned_from:
            why += f"; the run went back {len(self._returned_from)} times, and it came again"
        fix = "go on from the last checkpoint (the same command) with a lower optimizer.lr or longer warm-up"
        if self.on_spike != "pass_over":
            fix += ', or train.on_spike = "pass_over"'
        return NonFinite(what, why=why, fix=fix)
