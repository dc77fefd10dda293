"""What a rank holds under each ZeRO stage, and when: the one table of it. No torch.

Counted in numbers of parameters, gradients and of one optimizer state of that size (AdamW has two); not counted are
compute copies of mixed precision and buffers of communication. With a pipeline the same holds of each stage of a rank,
whose root is what the stage has beside its blocks. tests/distributed/test_zero.py measures every cell, of a stage too.
"""

from typing import Literal, NamedTuple, get_args

Moment = Literal["rest", "forward", "in_flight", "between", "backward"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


class Sizes(NamedTuple):
    """Numbers of a rank's part of a model (of a stage of a pipeline), which is its blocks and the root: all else.

    whole: of all parameters. share: of this rank's shards of them. root: in the root. root_late: those of the root that
    are used after the blocks alone, so that their gradients come first. block: in the block that runs.
    other_shares: of this rank's shards of the other blocks.
    """

    whole: int
    share: int
    root: int
    root_late: int
    block: int
    other_shares: int


class Held(NamedTuple):
    """Numbers that a rank holds at once."""

    parameters: int
    gradients: int
    states: int


def held(zero: int, moment: Moment, sizes: Sizes) -> Held:
    """What a rank holds.

    rest: between steps, gradients dropped. forward: in the last block's forward of a step's first micro-batch.
    in_flight: after forwards, before their backwards (pipeline). between: after a backward that is not the step's
    last, whatever still flies. backward: in the last one, in the first block, whose gradients are all there.
    """
    states = sizes.whole if zero == 0 else sizes.share
    return Held(_parameters(zero, moment, sizes), _gradients(zero, moment, sizes), states)


def _parameters(zero: int, moment: Moment, sizes: Sizes) -> int:
    """Shards stay where they are while what is gathered stands beside them."""
    if zero == 0:
        return sizes.whole
    if moment == "rest":
        return sizes.share
    if zero < 3:
        # Gathered once a step; in the last backward each block goes when it is done.
        gathered = sizes.root + sizes.block if moment == "backward" else sizes.whole
    else:
        gathered = {"between": 0, "in_flight": sizes.root}.get(moment, sizes.root + sizes.block)
    return sizes.share + gathered


def _gradients(zero: int, moment: Moment, sizes: Sizes) -> int:
    """zero 0 keeps its buffers for good."""
    if zero == 0:
        return sizes.whole
    if moment in ("rest", "forward", "in_flight"):
        return 0
    if moment == "between":
        return sizes.whole if zero == 1 else sizes.share
    if zero == 1:
        return sizes.other_shares + sizes.block + sizes.root
    return sizes.share + sizes.block + sizes.root_late
