"""TokenData: text as fixed-length sequences of tokens, out of a memory-mapped token file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data.loader import Ordered
from shardwise.data.order import Ints, Last
from shardwise.data.rows import Texts
from shardwise.data.token_file import Progress, TokenFile, prepare, split_samples
from shardwise.errors import DataError

IGNORED = -100  # the label that counts for nothing


class TokenData(Ordered):
    """Sample i is `{"tokens": tokens[i*L : i*L+L], "labels": the same, one later}`, both int64 of length L.

    text: globs, folders, files, .jsonl, "stdlib:**/*.py"; or rows, as a list or a `datasets` object has them.
    tokenizer, text_key: see `token_file.prepare`, which makes the token file or finds it.
    valid_fraction: this part of the tokens, the tail of an order of documents by hash, is held out: `.valid`.
    last: "wrap" (a batch may run on into the next epoch), "short", "drop", or "pad" (repeats with labels
        -100).

    Documents are packed: a sequence may hold the end of one, the separator (an ordinary target), and the next
    one.

    Raises: DataError where there is no text, or less than a sequence of it in each part.
    """

    deterministic = True

    def __init__(
        self,
        text: Texts,
        *,
        tokenizer: str = "bytes",
        sequence_length: int = 256,
        text_key: str = "text",
        valid_fraction: float = 0.01,
        split: Literal["train", "valid"] = "train",
        shuffle: bool = True,
        last: Last = "wrap",
        progress: Progress | None = None,
    ) -> None:
        made = prepare(text, tokenizer=tokenizer, text_key=text_key, progress=progress)
        self._view(made, sequence_length, valid_fraction, split, shuffle, last)

    @classmethod
    def of(
        cls,
        token_file: TokenFile,
        *,
        sequence_length: int = 256,
        valid_fraction: float = 0.01,
        split: Literal["train", "valid"] = "train",
        shuffle: bool = True,
        last: Last = "wrap",
    ) -> "TokenData":
        """The same from a token file that is there."""
        data = cls.__new__(cls)
        data._view(token_file, sequence_length, valid_fraction, split, shuffle, last)
        return data

    def _view(
        self,
        token_file: TokenFile,
        sequence_length: int,
        valid_fraction: float,
        split: Literal["train", "valid"],
        shuffle: bool,
        last: Last,
    ) -> None:
        self.token_file = token_file
        self.sequence_length = sequence_length
        self.valid_fraction = valid_fraction
        self.split = split
        self.shuffle = shuffle
        self.last = last
        train, valid = split_samples(token_file.header.tokens, sequence_length, valid_fraction)
        if split == "valid" and not valid:
            raise DataError("Nothing is held out.", why="valid_fraction = 0", fix="valid_fraction = 0.01")
        self._samples = train if split == "train" else valid
        # The label of the last training token is no token of the held-out part.
        self._first_token = 0 if split == "train" else train * sequence_length + 1
        self._mapped: NDArray[Any] | None = None

    @property
    def vocab_size(self) -> int:
        return self.token_file.header.vocab_size

    @property
    def tokens_per_sample(self) -> int:
        return self.sequence_length

    @property
    def has_valid(self) -> bool:
        return self.valid_fraction > 0

    @property
    def train(self) -> "TokenData":
        """The part for training."""
        return self._split("train")

    @property
    def valid(self) -> "TokenData":
        """The held-out part. Raises: DataError where valid_fraction is 0."""
        return self._split("valid")

    def _split(self, split: Literal["train", "valid"]) -> "TokenData":
        return TokenData.of(
            self.token_file,
            sequence_length=self.sequence_length,
            valid_fraction=self.valid_fraction,
            split=split,
            shuffle=self.shuffle,
            last=self.last,
        )

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return {key: rows[0] for key, rows in as_batch(self.rows(np.array([sample])), 0).items()}

    def fetch(self, samples: Ints, seeds: Sequence[int], extra: int) -> dict[str, torch.Tensor]:
        """Shapes: [m] -> two of [m, L]."""
        return as_batch(self.rows(samples), extra)

    def rows(self, samples: Ints) -> NDArray[np.int64]:
        """The tokens of each sample and the one after them. Shapes: [m] -> [m, L+1]. Raises: IndexError."""
        if len(samples) and (samples.min() < 0 or samples.max() >= len(self)):
            raise IndexError(f"samples {samples.min()}..{samples.max()} are outside 0..{len(self) - 1}")
        starts = self._first_token + samples * self.sequence_length
        at = starts[:, None] + np.arange(self.sequence_length + 1)  # [m, L+1]
        rows: NDArray[np.int64] = self._tokens()[at].astype(np.int64)
        return rows

    def _tokens(self) -> NDArray[Any]:
        """Mapped when first used, in each process."""
        if self._mapped is None:
            self._mapped = np.memmap(Path(self.token_file.path), dtype=self.token_file.header.dtype, mode="r")
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # a copy for a worker maps the file, it does not carry it


def as_batch(rows: NDArray[np.int64], extra: int) -> dict[str, torch.Tensor]:
    """Tokens, and labels one later; the labels of the last `extra` rows do not count.

    Shapes: [m, L+1] -> [m, L].
    """
    both = torch.from_numpy(rows)
    # Copies: of a single row both would be views of one storage, and the labels' -100 would be read as tokens.
    tokens, labels = both[:, :-1].clone(), both[:, 1:].clone()
    if extra:
        labels[-extra:] = IGNORED
    return {"tokens": tokens, "labels": labels}
