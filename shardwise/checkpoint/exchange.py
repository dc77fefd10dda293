"""How the ranks of a save hear of each other while training goes on: through torch's store, without a collective."""

import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from shardwise import ranks
from shardwise.checkpoint.manifest import Record
from shardwise.checkpoint.store_errors import StoreError
from shardwise.torch_private import store_connection

# Between two looks at the store, doubled from the first to the last.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.005, 0.25


class Unheard(StoreError):
    """A rank did not report in time, or the store of the process group is gone."""

    def __init__(self, what: str, why: str) -> None:
        fix = "see which rank or host is gone, and start again: what was committed before is whole"
        super().__init__(errno.ETIMEDOUT, what, why=why, fix=fix)


class Exchange:
    """The reports of one save and its outcome, under the save's name. Made in the main thread, used in another.

    `limit`: seconds until a rank that says nothing is taken for lost.
    """

    def __init__(self, name: str, limit: float) -> None:
        self.rank, self.world = ranks.rank(), ranks.world()
        self._name, self._limit = name, limit
        self._store: Any = store_connection() if self.world > 1 else None
        self._own: dict[str, bytes] = {}

    def report(self, value: Record) -> None:
        """Raises: Unheard."""
        self._put(str(self.rank), value)

    def reports(self, kind: type[Any], given_up: threading.Event) -> list[Any]:
        """All ranks' reports, in rank order, once the last has come; they are taken out of the store.

        Raises: Unheard naming the ranks that did not report.
        """
        keys = [str(rank) for rank in range(self.world)]
        return [msgspec.json.decode(raw, type=kind) for raw in self._take(keys, given_up, "Ranks {} did not report")]

    def publish(self, outcome: Record) -> None:
        """Raises: Unheard."""
        self._put("outcome", outcome)

    def outcome(self, kind: type[Any], given_up: threading.Event) -> Any:
        """Raises: Unheard."""
        self._wait(["outcome"], given_up, "Rank 0 did not say how it ended")
        return msgspec.json.decode(self._asked(lambda: self._get("outcome")), type=kind)

    def forget(self) -> None:
        """Takes the outcome out of the store, once every rank has read it."""
        if self._store is not None:
            self._asked(lambda: self._store.delete_key(self._key("outcome")))

    def _put(self, key: str, value: Record) -> None:
        raw = msgspec.json.encode(value)
        if self._store is None:
            self._own[key] = raw
        else:
            self._asked(lambda: self._store.set(self._key(key), raw))

    def _get(self, key: str) -> bytes:
        return self._own[key] if self._store is None else bytes(self._store.get(self._key(key)))

    def _take(self, keys: list[str], given_up: threading.Event, lost: str) -> list[bytes]:
        self._wait(keys, given_up, lost)
        found = [self._asked(partial(self._get, key)) for key in keys]
        for key in keys if self._store is not None else ():
            self._asked(partial(self._store.delete_key, self._key(key)))
        return found

    def _wait(self, keys: list[str], given_up: threading.Event, lost: str) -> None:
        """Looks again and again: a wait inside the store could be neither given up nor bounded without a warning."""
        deadline, pause = time.monotonic() + self._limit, _FIRST_PAUSE_SECONDS
        left = keys
        while self._store is not None:
            left = [key for key in left if not self._asked(partial(self._store.check, [self._key(key)]))]
            if not left:
                return
            if given_up.wait(pause) or time.monotonic() > deadline:
                why = "nobody waits any more" if given_up.is_set() else f"after {self._limit:.0f} s"
                raise Unheard(f"{lost.format(', '.join(left))}.", why)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def _asked(self, act: Callable[[], Any]) -> Any:
        """torch's errors of a store that is gone are RuntimeErrors."""
        try:
            return act()
        except RuntimeError as error:
            raise Unheard("The store of the process group does not answer.", str(error)) from error

    def _key(self, key: str) -> str:
        return f"shardwise/save/{self._name}/{key}"
