"""ChatData: conversations as rows of tokens, packed so that none sees another, or padded in groups of a length."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data import conversations
from shardwise.data.conversations import Documents, Packs, TooLong
from shardwise.data.loader import Ordered
from shardwise.data.order import Ints, Last, sample_order
from shardwise.data.rows import Texts
from shardwise.data.token_file import Progress, TokenFile, prepare_as
from shardwise.data.tokenize import Coding
from shardwise.data.tokens import IGNORED
from shardwise.errors import DataError

# Rows of a batch are padded to its longest one and then to a multiple of this, so that fewer shapes are seen.
MULTIPLE = 8


class ChatData(Ordered):
    """JSON lines with a conversation each; the assistant's turns are learned, all other labels are -100.

    chat: globs, folders, files, or rows, as a list or a `datasets` object has them.
    tokenizer: the folder of one that has a chat template, or `chat_template`, a file.
    messages_key: where a row has its messages, each with role and content.
    packing: a sample is a row of sequence_length with as many conversations as fit, `position_ids` counting from 0 in
        each: a model of Hugging Face makes its masks by them. Else a sample is one conversation, batches of similar
        lengths are `group` samples, and a batch is as long as its longest one.
    too_long: what has more tokens than sequence_length is an error, left out, or cut at its end.

    Raises: DataError.
    """

    deterministic = True

    def __init__(
        self,
        chat: Texts,
        *,
        tokenizer: str,
        sequence_length: int = 256,
        packing: bool = True,
        chat_template: str = "",
        messages_key: str = "messages",
        too_long: TooLong = "refuse",
        valid_fraction: float = 0.01,
        group: int = 64,
        split: Literal["train", "valid"] = "train",
        shuffle: bool = True,
        last: Last = "short",
        progress: Progress | None = None,
    ) -> None:
        made = prepare_as(Coding(tokenizer, chat=True, template=chat_template), chat, messages_key, progress)
        self._view(made, sequence_length, packing, too_long, valid_fraction, group, split, shuffle, last)

    @classmethod
    def of(
        cls,
        token_file: TokenFile,
        *,
        sequence_length: int,
        packing: bool = True,
        too_long: TooLong = "refuse",
        valid_fraction: float = 0.01,
        group: int = 64,
        split: Literal["train", "valid"] = "train",
        shuffle: bool = True,
        last: Last = "short",
    ) -> "ChatData":
        """The same from a token file that is there."""
        data = cls.__new__(cls)
        data._view(token_file, sequence_length, packing, too_long, valid_fraction, group, split, shuffle, last)
        return data

    def _view(
        self, token_file: TokenFile, sequence_length: int, packing: bool, too_long: TooLong, valid_fraction: float,
        group: int, split: Literal["train", "valid"], shuffle: bool, last: Last,
    ) -> None:  # fmt: skip
        self.token_file, self.sequence_length, self.packing = token_file, sequence_length, packing
        self.too_long, self.valid_fraction, self.group, self.split = too_long, valid_fraction, group, split
        self.shuffle, self.last = shuffle, last
        self._mapped: NDArray[np.uint32] | None = None
        train, valid = conversations.split(
            conversations.read(token_file), sequence_length, too_long, valid_fraction, self._tokens()
        )
        if split == "valid" and valid is None:
            raise DataError("Nothing is held out.", why="valid_fraction = 0", fix="valid_fraction = 0.01")
        self.documents: Documents = valid if split == "valid" and valid is not None else train
        lengths = self.documents.lengths
        self.packs: Packs | None = conversations.packed(lengths, sequence_length) if packing else None
        self._by_length = np.argsort(lengths, kind="stable")

    @property
    def vocab_size(self) -> int:
        return self.token_file.header.vocab_size

    @property
    def tokens_per_sample(self) -> int | None:
        return self.sequence_length if self.packing else None

    @property
    def has_valid(self) -> bool:
        return self.valid_fraction > 0

    @property
    def train(self) -> "ChatData":
        """The part for training."""
        return self._split("train")

    @property
    def valid(self) -> "ChatData":
        """The held-out part. Raises: DataError where valid_fraction is 0."""
        return self._split("valid")

    def _split(self, split: Literal["train", "valid"]) -> "ChatData":
        return ChatData.of(
            self.token_file, sequence_length=self.sequence_length, packing=self.packing, too_long=self.too_long,
            valid_fraction=self.valid_fraction, group=self.group, split=split, shuffle=self.shuffle, last=self.last,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.documents.starts) if self.packs is None else len(self.packs.offsets) - 1

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return {key: rows[0] for key, rows in self.fetch(np.array([sample]), (), 0).items()}

    def order(self, positions: Ints, seed: int, shuffle: bool) -> Ints:
        if self.packs is not None or not shuffle:
            return sample_order(positions, len(self), seed, shuffle)
        epochs, ks = np.divmod(np.asarray(positions, dtype=np.int64), len(self))
        places = np.empty_like(ks)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = conversations.grouped(ks[here], len(self), self.group, seed, int(epoch))
        return self._by_length[places]

    def fetch(self, samples: Ints, seeds: Sequence[int], extra: int) -> dict[str, torch.Tensor]:
        """Tokens, labels one later, and of packed rows positions. Shapes: [m] -> [m, L] each. Raises: IndexError."""
        if len(samples) and (samples.min() < 0 or samples.max() >= len(self)):
            raise IndexError(f"samples {samples.min()}..{samples.max()} are outside 0..{len(self) - 1}")
        rows = [self._documents_of(int(sample)) for sample in samples]
        width = self.sequence_length
        if self.packs is None:
            longest = max(int(self.documents.lengths[row].sum()) for row in rows)
            width = min(width, -(-longest // MULTIPLE) * MULTIPLE)
        tokens = np.zeros((len(rows), width), np.int64)
        labels = np.full_like(tokens, IGNORED)
        positions = np.empty_like(tokens)
        for at, row in enumerate(rows):
            self._fill(row, tokens[at], labels[at], positions[at])
        if extra:
            labels[-extra:] = IGNORED
        found = {"tokens": tokens, "labels": labels}
        if self.packs is not None:
            found["position_ids"] = positions
        return {key: torch.from_numpy(value) for key, value in found.items()}

    def _documents_of(self, sample: int) -> Ints:
        if self.packs is None:
            return np.array([sample])
        return self.packs.order[self.packs.offsets[sample] : self.packs.offsets[sample + 1]]

    def _fill(self, row: Ints, tokens: Ints, labels: Ints, positions: Ints) -> None:
        """One row: its documents one after the other; what is left is one more, of which nothing counts."""
        at, stream = 0, self._tokens()
        for document in row.tolist():
            start, length = int(self.documents.starts[document]), int(self.documents.lengths[document])
            raw = stream[start : start + length + 1].astype(np.int64)
            ids, counted = raw >> 1, raw & 1
            tokens[at : at + length] = ids[:-1]
            labels[at : at + length] = np.where(counted[1:] == 1, ids[1:], IGNORED)
            positions[at : at + length] = np.arange(length)
            at += length
        positions[at:] = np.arange(len(positions) - at)

    def _tokens(self) -> NDArray[np.uint32]:
        """Mapped when first used, in each process."""
        if self._mapped is None:
            self._mapped = conversations.stream(self.token_file)
        return self._mapped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # a copy for a worker maps the file, it does not carry it
