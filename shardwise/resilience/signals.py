"""SIGINT, SIGTERM and SIGUSR1 as a flag that is set at once, also while the main thread waits in a collective."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from shardwise.errors import EXIT_INTERRUPTED, BadInput

# USR1: what SLURM sends ahead of a job's end (--signal=USR1@120).
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_END = 0  # no signal has this number
_Handler = Callable[[int, FrameType | None], object] | int | None

# Innermost last. A forked child (a data worker, say) must not tell its parent of the signals that it gets
# itself.
_active: list["StopSignals"] = []


class StopSignals:
    """While entered, the first SIGINT, SIGTERM or SIGUSR1 sets `received` and, in a thread, calls `told` with its
    number; a second SIGINT ends the process at once, with 130.

    Python runs a signal's handler only between two bytecodes of the main thread, which may be seconds away
    in a collective. So the signal's number comes through `signal.set_wakeup_fd`, written by the C handler,
    and a thread reads it. Signals that something else wants to see there (an event loop, an outer
    StopSignals) are passed on. Can be nested, and entered again after it was left. Main thread only.
    """

    def __init__(self, told: Callable[[int], None] | None = None) -> None:
        self._told = told
        self._received: int | None = None
        self._interrupts = 0
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        self._outer_fd = -1
        self._handlers: dict[int, _Handler] = {}
        self._thread: threading.Thread | None = None

    @property
    def received(self) -> int | None:
        """The number of the first signal, or None."""
        return self._received

    def __enter__(self) -> "StopSignals":
        """Raises: BadInput outside the main thread, and when it is already entered."""
        if threading.current_thread() is not threading.main_thread():
            raise BadInput(
                f"StopSignals was entered in thread {threading.current_thread().name!r}.",
                why="Python lets only the main thread say what a signal does",
                fix="enter it in the main thread, around what the other threads do",
            )
        if self._thread is not None:
            raise BadInput("This StopSignals is already entered.", fix="make another one: they can be nested")
        self._received, self._interrupts = None, 0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._listen, args=(self._reader,), daemon=True)
        self._outer_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        # A handler of ours, because without one Python's C handler, which writes the number, does not run.
        self._handlers = {number: signal.signal(number, _noted) for number in _STOPS}
        _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            # None: the handler before ours was not set from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._outer_fd)
        _active.remove(self)
        if self._thread is None or self._writer is None or self._reader is None:
            return
        self._writer.setblocking(True)
        self._writer.send(bytes([_END]))
        self._thread.join()
        self._thread = None
        self._writer.close()
        self._reader.close()

    def _listen(self, reader: socket.socket) -> None:
        """The thread: every number that the C handler writes, until ours that ends it."""
        while numbers := reader.recv(64):
            for number in numbers:
                if number == _END:
                    return
                self._note(number)

    def _note(self, number: int) -> None:
        if number in _STOPS and self._received is None:
            self._received = number
            if self._told is not None:
                self._told(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts == 2:
            os._exit(EXIT_INTERRUPTED)
        if self._outer_fd != -1:
            _pass_on(self._outer_fd, number)

    def _leave_in_child(self) -> None:
        """The child can be terminated as before; Ctrl-C stays the parent's to answer."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            before = self._handlers[number]
            signal.signal(number, signal.SIG_DFL if before is None else before)


def _noted(number: int, frame: FrameType | None) -> None:
    """The thread has it already."""


def _pass_on(fd: int, number: int) -> None:
    try:
        os.write(fd, bytes([number]))
    except OSError:
        return  # Its owner has closed it, or reads too slowly: what signal.set_wakeup_fd would do as well.


def _after_fork_in_child() -> None:
    while _active:
        _active.pop()._leave_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
