"""Where events go: a protocol, and the fan-out that stamps them and outlives a broken sink."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from shardwise.events.values import UNSTAMPED, Event, Fallback


class EventSink(Protocol):
    """Takes events: a file, a live line, a tracker."""

    def emit(self, event: Event) -> None: ...


class Events:
    """Hands every event to all sinks, stamped with the time.

    A sink that raises must not end the training: it is dropped, and the others are told once, as a Fallback.
    """

    def __init__(self, sinks: Iterable[EventSink] = (), *, clock: Callable[[], float] = time.time) -> None:
        self._sinks = list(sinks)
        self._clock = clock

    @property
    def sinks(self) -> tuple[EventSink, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def emit(self, event: Event) -> None:
        if event.time == UNSTAMPED:
            event = msgspec.structs.replace(event, time=self._clock())
        broken: list[tuple[EventSink, Exception]] = []
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception as error:
                broken.append((sink, error))
        if broken:
            self._drop(broken)

    def _drop(self, broken: list[tuple[EventSink, Exception]]) -> None:
        gone = {id(sink) for sink, _ in broken}
        self._sinks = [sink for sink in self._sinks if id(sink) not in gone]
        for sink, error in broken:
            name = type(sink).__name__
            self.emit(Fallback(what=f"events no longer go to {name}", why=f"{type(error).__name__}: {error}"))
