"""Conversations in a token file: which there are, which are held out, and which lie together in a row. No torch."""

import bisect
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.data.chat import SEPARATOR
from shardwise.data.order import Ints, Permutation, seed_of
from shardwise.data.token_file import TokenFile
from shardwise.errors import DataError

TooLong = Literal["refuse", "leave_out", "cut"]


class Documents(NamedTuple):
    """Where each begins in the stream, and how many of its tokens are inputs: all but the last one."""

    starts: Ints
    lengths: Ints

    def some(self, chosen: Any) -> "Documents":
        return Documents(self.starts[chosen], self.lengths[chosen])


def stream(token_file: TokenFile) -> NDArray[np.uint32]:
    """`2 * id + counted` of each token, a separator behind each conversation; mapped."""
    return np.memmap(Path(token_file.path), dtype=token_file.header.dtype, mode="r")


def read(token_file: TokenFile) -> Documents:
    """The conversations of a token file, in its order."""
    stops = np.flatnonzero(stream(token_file) == SEPARATOR).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1])
    return Documents(starts, stops - starts - 1)


def split(
    found: Documents, sequence_length: int, too_long: TooLong, valid_fraction: float, tokens: NDArray[np.uint32]
) -> tuple[Documents, Documents | None]:
    """Those to train on, and from the tail those held out (None where none are).

    Raises: DataError for conversations that are too long, or too few.
    """
    fitting = _fitting(found, sequence_length, too_long, tokens)
    count = len(fitting.starts)
    if count < (2 if valid_fraction else 1):
        raise DataError(
            f"There are {count} conversations.",
            why="one to train on" + (", and one held out" if valid_fraction else ""),
            fix="give more" + (", or valid_fraction = 0" if valid_fraction else ""),
        )
    valid = min(count - 1, max(1, round(count * valid_fraction))) if valid_fraction else 0
    held = fitting.some(slice(count - valid, None)) if valid else None
    return fitting.some(slice(0, count - valid)), held


def _fitting(found: Documents, longest: int, too_long: TooLong, tokens: NDArray[np.uint32]) -> Documents:
    over = found.lengths > longest
    if not over.any():
        return found
    if too_long == "refuse":
        raise DataError(
            f"{int(over.sum())} of {len(over)} conversations are longer than sequence_length = {longest}.",
            why=f"the longest one has {int(found.lengths.max()) + 1} tokens; a conversation is not shared out",
            fix=f'sequence_length = {int(found.lengths.max())}, or too_long = "leave_out" or "cut" (the end of it)',
        )
    if too_long == "leave_out":
        return found.some(~over)
    kept = [
        not long or bool((tokens[start + 1 : start + longest + 1] & 1).any())
        for start, long in zip(found.starts.tolist(), over.tolist(), strict=True)
    ]
    cut = Documents(found.starts, np.minimum(found.lengths, longest))
    return cut.some(np.array(kept, dtype=bool))


class Packs(NamedTuple):
    """Pack i holds the documents `order[offsets[i] : offsets[i + 1]]`."""

    order: Ints
    offsets: Ints


def packed(lengths: Ints, room: int) -> Packs:
    """Documents in as few rows of `room` tokens as the best-fit-decreasing rule finds: the longest first, each where
    it leaves the least room. The same for the same lengths. No document is cut.

    Source: Johnson et al., SIAM J. Comput. 3(4), 1974: at most 11/9 of the fewest, and 4 more.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left
    rooms: list[int] = []  # the keys of it, sorted
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            rows.append([document])
            row, left = len(rows) - 1, room - length
        else:
            left = rooms[at] - length
            row = open_rows[rooms[at]].pop()
            if not open_rows[rooms[at]]:
                del open_rows[rooms.pop(at)]
            rows[row].append(document)
        if left:
            if left not in open_rows:
                bisect.insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    order = np.array([document for row in rows for document in row], dtype=np.int64)
    return Packs(order, np.cumsum([0, *map(len, rows)]).astype(np.int64))


def grouped(ks: Ints, n: int, group: int, seed: int, epoch: int) -> Ints:
    """Places in an order by length, of the k-th samples of an epoch: whole groups of neighbours, in random order.

    What is left over after whole groups comes last, from a place that changes with the epoch. A bijection of 0..n-1.
    Shapes: [m] -> [m].
    """
    groups, rest = divmod(n, group)
    gap = seed_of("left over", seed, epoch) % (groups + 1)
    places = gap * group + ks - groups * group
    inside = ks < groups * group
    if inside.any():
        chosen = Permutation(groups, seed, epoch)(ks[inside] // group)
        places[inside] = chosen * group + np.where(chosen >= gap, rest, 0) + ks[inside] % group
    return places
