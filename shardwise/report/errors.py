"""Errors as a person reads them: what, why, fix; and the one traceback of a run that broke."""

import json

from shardwise.errors import ShardwiseError
from shardwise.launch.outcome import FirstFailure


def text(error: ShardwiseError) -> str:
    return f"error: {error}"


def as_json(error: ShardwiseError) -> str:
    """One line for a program."""
    return json.dumps(
        {
            "error": type(error).__name__,
            "what": error.what,
            "why": error.why,
            "fix": error.fix,
            "exit_code": error.exit_code,
        }
    )


def failure(first: FirstFailure, logs: str) -> str:
    """The first failing rank, where it stood, and what it said; the others' words are in the logs."""
    where = f"rank {first.rank}"
    if first.step is not None:
        where += f", step {first.step}"
    if first.phase:
        where += f" ({first.phase})"
    said = first.expected or not first.text.startswith("Traceback")
    head = f"error: {where}: {first.text}" if said else f"{first.text}\nerror: {where} failed"
    return f"{head}\n  logs of all ranks: {logs}"
