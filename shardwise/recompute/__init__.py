"""Fewer activations kept: a block's are made anew in backward.

`wrap` replaces a block's own forward, so its name, class, parameters and hooks stay, and whatever wraps the block later
(compile, FSDP2) stands outside.
"""

from shardwise.recompute.blocks import during, wrap

__all__ = ["during", "wrap"]
