"""One block's forward, run a second time when backward needs what it did not keep.

"full" keeps the block's inputs. "selective" also keeps what matrix products and attention gave, most of the arithmetic,
and makes the rest anew (norms, activations, rotations, dropout). Random numbers are those of the first forward. torch's
checkpoint does it, without re-entering autograd: the second forward gives the bits of the first, so gradients have the
bits of a block that kept everything.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.torch_private import selective_contexts

Kind = Literal["selective", "full"]
Context = Callable[[], AbstractContextManager[Any]]


class Recomputed:
    """A block's forward whose activations are made anew in backward; in the place of `block.forward`.

    `during`: contexts around the second forward, for what hooks on the block do around the first one. Hooks run with
    the block's call, and the second forward is none.
    """

    def __init__(self, forward: Callable[..., Any], kind: Kind) -> None:
        self.forward, self.kind = forward, kind
        self.during: list[Context] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(
            self.forward, *args, use_reentrant=False, preserve_rng_state=True, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first forward and around the second."""
        if self.kind == "full":
            return nullcontext(), self._again(nullcontext())
        first, second = selective_contexts()
        return first, self._again(second)

    @contextmanager
    def _again(self, kept: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            # The contexts first: what they compute is none of the block's own, of which results were kept.
            for context in self.during:
                stack.enter_context(context())
            stack.enter_context(kept)
            yield


def wrap(block: nn.Module, kind: Kind) -> None:
    """Make anew in backward what the block's forward does not keep; in place. Before compile and data parallel."""
    block.forward = Recomputed(block.forward, kind)


def compile_block(block: nn.Module) -> None:
    """Compile a block; in place. Of a wrapped one what is run twice, for all blocks of one shape the same once."""
    if isinstance(block.forward, Recomputed):
        block.forward.forward = torch.compile(block.forward.forward)
    else:
        block.compile()


def during(block: nn.Module, context: Context) -> None:
    """Enter a context around the second forward of a wrapped block; nothing for one that is not wrapped.

    For what a hook on the block itself does around its forward. Hooks on modules inside it run in both forwards, and
    must undo with `always_call=True`: the second one ends by an exception once it has what backward needs.
    """
    if isinstance(block.forward, Recomputed):
        block.forward.during.append(context)
