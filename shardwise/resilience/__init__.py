"""Inside the process: what keeps a run alive, or ends it in order."""

from shardwise.resilience.signals import StopSignals

__all__ = ["StopSignals"]
