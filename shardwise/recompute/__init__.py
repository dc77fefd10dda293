"""Fewer activations kept: a block's are made anew in backward.

`wrap` replaces a block's own forward, so its name, class, parameters and hooks stay, and whatever wraps the block later
(FSDP2) stands outside; a compiled one is compiled within.
"""

from shardwise.recompute.blocks import compile_block, during, wrap

__all__ = ["compile_block", "during", "wrap"]
