"""Verbs only: parse, call one function, print. What a verb needs is imported when it is called."""

from shardwise.cli.main import main

__all__ = ["main"]
