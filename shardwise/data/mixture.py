"""A weighted mixture of sources, in O(1) memory: a pure function of (seed, k)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shardwise.data.batches import Batches, Collate
from shardwise.data.chat_data import ChatData
from shardwise.data.from_recipe import coding_of
from shardwise.data.loader import Ordered
from shardwise.data.order import Ints, Last, Permutation, sample_order, seed_of
from shardwise.data.token_file import Progress, prepare_as
from shardwise.data.tokenize import Coding
from shardwise.data.tokens import TokenData, as_batch
from shardwise.errors import DataError
from shardwise.inputs.recipe import DataSpec

BLOCK = 4096


def quotas(weights: Sequence[float], block: int = BLOCK) -> tuple[int, ...]:
    """How many of each `block` samples come from each source: the weights by largest remainder, at least 1
    each.

    Raises: DataError where a weight is not positive, or there are more sources than samples in a block.
    """
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]
    if wrong or not 0 < len(weights) <= block:
        raise DataError(
            "The weights of the mixture do not fit.",
            why=f"{wrong[0]} is not positive" if wrong else f"{len(weights)} sources, and 1 to {block} are possible",
            fix="give each source a weight above 0, or leave the source out",
        )
    exact = [weight / math.fsum(weights) * block for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) != block:  # at most one turn for each source
        missing = [share - count for share, count in zip(exact, counts, strict=True)]
        if sum(counts) < block:
            counts[missing.index(max(missing))] += 1
        else:  # the least of 1 took too many: from the source that has most above its share
            counts[min((gap, at) for at, gap in enumerate(missing) if counts[at] > 1)[1]] -= 1
    return tuple(counts)


@functools.lru_cache(maxsize=16)
def _block(seed: int, shares: tuple[int, ...], block: int) -> tuple[Ints, Ints]:
    """Of each sample of a block: its source, and how many of that source came before it in all."""
    slots = Permutation(BLOCK, seed_of("mixture", seed), block)(np.arange(BLOCK))
    sources = np.searchsorted(np.cumsum(shares), slots, side="right")
    draws = np.empty(BLOCK, dtype=np.int64)
    for source, share in enumerate(shares):
        draws[sources == source] = block * share + np.arange(share)
    return sources, draws


def draws(positions: Ints, shares: tuple[int, ...], seed: int) -> tuple[Ints, Ints]:
    """The source at each position, and which draw of that source it is, from 0. Shapes: [m] -> two of [m]."""
    sources, counts = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(positions // BLOCK):
        here = positions // BLOCK == block
        of_block = _block(seed, shares, int(block))
        sources[here] = of_block[0][positions[here] % BLOCK]
        counts[here] = of_block[1][positions[here] % BLOCK]
    return sources, counts


class _Joined(Dataset[Any]):
    """The sources one after the other."""

    def __init__(self, sources: Sequence[Any], *, deterministic: bool) -> None:
        self.sources = sources
        self.deterministic = deterministic
        self.starts: NDArray[np.int64] = np.cumsum([0, *(len(source) for source in sources)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def where(self, samples: Ints) -> Ints:
        """The source of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def __getitem__(self, sample: int) -> Any:
        source = int(self.where(np.array(sample)))
        return self.sources[source][sample - int(self.starts[source])]


class Mixture(Batches):
    """Sources, each with a weight: of every 4096 samples in a row, each source has exactly its share.

    sources: pairs of (TokenData or map-style dataset, weight). Weights become whole numbers of 4096
        (`shares`), so each is met to within 1/4096.
    An epoch, for counting, is as many samples as all sources have together. A source goes through its own
    epochs: its t-th draw is item t % n of its own order of epoch t // n, so a small source with a large
    weight repeats sooner. The other keywords are those of Batches.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, float]],
        *,
        collate: Collate | None = None,
        workers: int | Literal["auto"] = "auto",
        shuffle: bool = True,
        last: Last = "wrap",
        pad: Callable[[Any], Any] | None = None,
    ) -> None:
        self.shares = quotas([weight for _, weight in sources])
        self.sources = [source for source, _ in sources]
        draws_nothing = [_draws_nothing(source) for source in self.sources]
        joined = _Joined(self.sources, deterministic=all(draws_nothing))
        text = all(isinstance(source, TokenData) for source in self.sources)
        self.all_text = text and collate is None
        super().__init__(
            joined,
            collate=collate,
            workers=workers,
            shuffle=shuffle,
            last=last,
            pad=pad or (_as_it_is if self.all_text else None),
        )
        if text:
            self.tokens_per_sample, self.vocab_size = _one_shape(self.sources)

    def order(self, positions: Ints, seed: int, shuffle: bool) -> Ints:
        sources, counts = draws(np.asarray(positions, dtype=np.int64), self.shares, seed)
        samples = np.empty_like(counts)
        for at, source in enumerate(self.sources):
            here = sources == at
            own = sample_order(counts[here], len(source), seed_of("source", seed, at), shuffle)
            samples[here] = self.dataset.starts[at] + own
        return samples

    def fetch(self, samples: Ints, seeds: Sequence[int], extra: int) -> Any:
        if not self.all_text:
            return super().fetch(samples, seeds, extra)
        rows = np.empty((len(samples), self.tokens_per_sample + 1), dtype=np.int64)
        where = self.dataset.where(samples)
        for at, source in enumerate(self.sources):
            rows[where == at] = source.rows(samples[where == at] - self.dataset.starts[at])
        return as_batch(rows, extra)


class EachOnce(Mixture):
    """The sources one after the other, each sample once an epoch, none weighted: what an evaluation averages over."""

    def __init__(self, sources: Sequence[Any]) -> None:
        super().__init__([(source, 1.0) for source in sources], last="short")

    def order(self, positions: Ints, seed: int, shuffle: bool) -> Ints:
        return sample_order(positions, len(self), seed, shuffle)


def recipe_data(
    spec: DataSpec, progress: Progress | None = None, *, hf: str | None = None, group: int = 64
) -> tuple[Ordered, Ordered | None]:
    """What a recipe's [data] says: the data for training, and the held-out part (None with valid_fraction = 0).

    hf: the recipe's model.hf, whose tokenizer "auto" means. group: samples of a batch, of similar lengths where they
    differ.
    Raises: DataError.
    """
    if spec.chat:
        return _conversations(spec, coding_of(spec, hf), progress, group)
    lists = [(spec.text, 1.0)] if spec.text else [(source.text, source.weight) for source in spec.mixture]
    if not lists:
        raise DataError("[data] names no data.", fix='text = ["corpus/**/*.txt"], or mixture = [...]')
    parts, coding = [], coding_of(spec, hf)
    for text, weight in lists:
        made = prepare_as(coding, text, spec.text_key, progress)
        data = TokenData.of(made, sequence_length=spec.sequence_length, valid_fraction=spec.valid_fraction)
        parts.append((data, weight))
    if len(parts) == 1:
        data = parts[0][0]
        return data, data.valid if data.has_valid else None
    valid = EachOnce([data.valid for data, _ in parts]) if spec.valid_fraction > 0 else None
    return Mixture(parts), valid


def _conversations(
    spec: DataSpec, coding: Coding, progress: Progress | None, group: int
) -> tuple[Ordered, Ordered | None]:
    data = ChatData.of(
        prepare_as(coding, spec.chat, spec.messages_key, progress), sequence_length=spec.sequence_length,
        packing=spec.packing, too_long=spec.too_long, valid_fraction=spec.valid_fraction, group=group,
    )  # fmt: skip
    return data, data.valid if data.has_valid else None


def _as_it_is(sample: Any) -> Any:
    return sample


def _draws_nothing(source: Any) -> bool:
    """Whether reading the source takes no random numbers. Raises: DataError where it cannot be a source."""
    if isinstance(source, Ordered) and not isinstance(source, TokenData):
        raise DataError(
            f"A {type(source).__name__} cannot be a source of a mixture.",
            why="a mixture makes its own batches",
            fix="Mixture([(dataset, weight), ...], collate=...), with the dataset itself",
        )
    return Batches(source, workers=0).deterministic  # refuses what is empty or an iterable


def _one_shape(sources: Sequence[TokenData]) -> tuple[int, int]:
    shapes = {(source.sequence_length, source.vocab_size) for source in sources}
    if len(shapes) > 1:
        raise DataError(
            "The sources of the mixture have different shapes.",
            why=f"(sequence_length, vocab_size): {sorted(shapes)}",
            fix="one sequence_length and one tokenizer for all",
        )
    return shapes.pop()
