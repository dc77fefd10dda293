"""A save's thread: it ends with an answer, never outlives the process by more than a bound, and no fork has it."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")

# How long a process that ends otherwise, by an exception or sys.exit, waits for a save that is under way.
EXIT_SECONDS = 30.0

_under_way: "weakref.WeakSet[Work[Any]]" = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


class Work(Generic[Answer]):
    """`act(given_up)` in a thread of its own, from now on, and `then(answer)` once its answer can be had. `given_up` is
    set when nobody waits for it any more: then it should come to an end, and must begin nothing new.
    """

    def __init__(self, act: Callable[[threading.Event], Answer], then: Callable[[Answer], None], name: str) -> None:
        """Neither must raise: what goes wrong is part of the answer."""
        self.given_up, self._done = threading.Event(), threading.Event()
        self._answers: list[Answer] = []
        self._process = os.getpid()
        # What `act` holds is let go by the thread at its end.
        self._thread = threading.Thread(target=self._run, args=(act, then), name=name, daemon=True)
        _follow(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    @property
    def over(self) -> bool:
        """Whether the thread itself is gone: one that still lets tensors go while the interpreter ends aborts the
        process ("terminate called without an active exception").
        """
        return not self._thread.is_alive()

    @property
    def inherited(self) -> bool:
        """Whether a fork brought this here: the thread did not come with it."""
        return os.getpid() != self._process

    def answer(self, timeout: float | None = None) -> Answer | None:
        """Waits for the answer, signals are handled meanwhile; None where it has not come within `timeout` seconds, or
        never will, in a fork.
        """
        if self.inherited or not self._done.wait(timeout):
            return None
        return self._answers[0] if self._answers else None

    def end(self, timeout: float | None = None) -> None:
        """Waits until the thread has nothing left to do; in a fork it has not."""
        if not self.inherited:
            self._thread.join(timeout)

    def _run(self, act: Callable[[threading.Event], Answer], then: Callable[[Answer], None]) -> None:
        try:
            answer = act(self.given_up)
            self._answers.append(answer)
            self._done.set()
            if not self.given_up.is_set():
                then(answer)
        finally:
            self._done.set()


def _follow(work: Work[Any]) -> None:
    """Registered at the first work, thus after what joined the group: at exit this comes before the group is left."""
    global _registered
    with _lock:
        _under_way.add(work)
        if not _registered:
            atexit.register(leave)
            _registered = True


def leave(seconds: float | None = None) -> bool:
    """Waits for all that is under way, together at most so long (default: EXIT_SECONDS), then gives it up.

    True where all came to its end.
    """
    deadline = time.monotonic() + (EXIT_SECONDS if seconds is None else seconds)
    left = [work for work in list(_under_way) if not work.inherited and not work.over]
    for work in left:
        work.end(max(0.0, deadline - time.monotonic()))
    for work in left:
        work.given_up.set()
    return all(work.over for work in left)
