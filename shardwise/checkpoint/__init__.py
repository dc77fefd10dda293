"""Checkpoints: committed or absent, verified before they are loaded, without pickle.

Names load when they are used: what lists and verifies checkpoints needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.checkpointer import Checkpointer as Checkpointer
    from shardwise.checkpoint.checkpointer import agreed_signal as agreed_signal
    from shardwise.checkpoint.checkpointer import exit_code as exit_code
    from shardwise.checkpoint.loads import Skipped as Skipped
    from shardwise.checkpoint.manifest import Manifest as Manifest
    from shardwise.checkpoint.retention import Committed as Committed
    from shardwise.checkpoint.saves import SavedCheckpoint as SavedCheckpoint
    from shardwise.checkpoint.store import LocalStore as LocalStore
    from shardwise.checkpoint.store import Store as Store

_HOME = {
    "Checkpointer": "checkpointer", "SavedCheckpoint": "saves", "Skipped": "loads",
    "agreed_signal": "checkpointer", "exit_code": "checkpointer", "Manifest": "manifest", "Committed": "retention",
    "LocalStore": "store", "Store": "store",
}  # fmt: skip

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shardwise.checkpoint.{_HOME[name]}"), name)
