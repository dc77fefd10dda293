"""What happened in a run, one JSON line each: values, writer, reader, sinks. Pure: no torch."""

from shardwise.events.reader import Tail, read
from shardwise.events.sinks import Events, EventSink
from shardwise.events.values import (
    AnyEvent,
    DataPrepared,
    Evaluated,
    Event,
    Failed,
    Fallback,
    Finished,
    NonFiniteLoss,
    Resumed,
    RunStarted,
    Saved,
    SaveFailed,
    SettingsChanged,
    Step,
    Stopped,
    from_line,
    to_line,
)
from shardwise.events.writer import EventWriter

__all__ = [
    "AnyEvent",
    "DataPrepared",
    "Evaluated",
    "Event",
    "EventSink",
    "EventWriter",
    "Events",
    "Failed",
    "Fallback",
    "Finished",
    "NonFiniteLoss",
    "Resumed",
    "RunStarted",
    "SaveFailed",
    "Saved",
    "SettingsChanged",
    "Step",
    "Stopped",
    "Tail",
    "from_line",
    "read",
    "to_line",
]
