"""What turns a document into tokens, and the bytes that do for any text. No torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.inputs import hub

Tokens = NDArray[np.unsignedinteger]


class BadRow(Exception):
    """Why a row of JSON lines is no document; whoever reads the file says which line it is."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


class Tokenizer(NamedTuple):
    """`encode` gives the tokens of a document; `separator` is the token after each document.

    name: what token files are told apart by. source: what makes it again in another process. cuts_anywhere: whether
    pieces of a text that are encoded apart have the tokens of the whole. row: in place of `encode`, the tokens of a
    whole row of JSON lines; raises BadRow.
    """

    name: str
    vocab_size: int
    separator: int
    encode: Callable[[bytes], Tokens]
    source: str = "bytes"
    cuts_anywhere: bool = True
    row: Callable[[dict[str, Any]], Tokens] | None = None

    @property
    def dtype(self) -> str:
        return "uint16" if max(self.vocab_size, self.separator + 1) <= 2**16 else "uint32"


def of_bytes() -> Tokenizer:
    """The 256 byte values, and 256 after each document."""
    return Tokenizer("bytes", 257, 256, lambda raw: np.frombuffer(raw, dtype=np.uint8))


def require_rows(tokenizer: Tokenizer, rows: int | None, model: str) -> None:
    """Raises: DataError where the model's embedding has fewer rows than the tokenizer has ids; None is not known."""
    if rows is None or tokenizer.vocab_size <= rows:
        return
    reasons = {
        "bytes": ("256 bytes and a separator between documents", 'data.tokenizer = "auto", the model\'s own'),
        model.removeprefix(hub.PREFIX): (
            "tokens were added to it, or these files are not of one model",
            "resize_token_embeddings(len(tokenizer)), and save model and tokenizer; or give files that belong together",
        ),
    }
    other = (f"{tokenizer.source} is of another model", 'data.tokenizer = "auto", the model\'s own')
    why, fix = reasons.get(tokenizer.source, other)
    raise DataError(
        f"{model} embeds {rows} token ids, and the tokenizer has ids up to {tokenizer.vocab_size - 1}.",
        why=why, fix=fix,
    )  # fmt: skip
