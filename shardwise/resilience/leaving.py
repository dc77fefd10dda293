"""How a for loop over one of our generators was left: in an orderly way (break, return), or by an exception.

Both close the generator, and a generator is not told which. It matters: after `break` all ranks left together and can
save together, after an exception the others have not, and saving would wait for them.
"""

import dis
import sys
from types import FrameType

# The instruction that drops the loop's iterator: after an exception it is whatever raised instead.
ORDERLY = frozenset({"POP_TOP", "POP_ITER", "END_FOR", "SWAP", "RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR"})


def in_order(own_file: str) -> bool:
    """Called while a generator of `own_file` is being closed: whether its consumer left by break or return.

    Anything unknown counts as an exception: then a save is missed, and no rank waits for another.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == own_file:
        frame = frame.f_back
    if frame is None or frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in ORDERLY
