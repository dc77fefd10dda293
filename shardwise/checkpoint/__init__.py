"""Checkpoints: committed or absent, verified before they are loaded, without pickle."""

from shardwise.checkpoint.checkpointer import Checkpointer, SavedCheckpoint, Skipped, agreed_signal, exit_code
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.retention import Committed
from shardwise.checkpoint.store import LocalStore, Store

__all__ = [
    "Checkpointer",
    "Committed",
    "LocalStore",
    "Manifest",
    "SavedCheckpoint",
    "Skipped",
    "Store",
    "agreed_signal",
    "exit_code",
]
