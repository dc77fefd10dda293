"""An Arch as numbers that broadcast: what a layer multiplies, looks at and holds. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import numpy as np

from shardwise.cost.compute import Floats, numbers
from shardwise.inputs.arch import Arch


@dataclass(frozen=True)
class Projection:
    """A weight [n, k] that every token is multiplied with; n or k is divided by tensor parallelism (1) or not (0)."""

    n: Floats
    k: Floats
    n_split: Floats
    k_split: Floats

    @classmethod
    def of(cls, n: int, k: int, split: str) -> Self:
        """split: "n" (column), "k" (row) or "" (every rank has the whole)."""
        return cls(numbers(n), numbers(k), numbers(split == "n"), numbers(split == "k"))


@dataclass(frozen=True)
class Shape:
    """Of one model and sequence length. Widths in numbers a token; parameters of one layer."""

    sequence: Floats
    hidden: Floats
    vocab: Floats
    dense_layers: Floats
    moe_layers: Floats
    prediction_layers: Floats
    heads: Floats
    key_dim: Floats
    value_dim: Floats
    attended: Floats
    attention: tuple[Projection, ...]
    feed_forward: tuple[Projection, ...]
    shared: tuple[Projection, ...]
    head_width: Floats
    key_value_width: Floats
    ffn_width: Floats
    gated: Floats
    norms: Floats
    experts: Floats
    experts_per_token: Floats
    expert_width: Floats
    dense_parameters: Floats
    moe_parameters: Floats
    expert_parameters: Floats
    embedding_parameters: Floats
    head_parameters: Floats

    @classmethod
    def of(cls, arch: Arch, sequence_length: int) -> Self:
        """One row."""
        experts = arch.experts
        up = 2 if arch.gated_ffn else 1
        shared = experts.shared_ffn_size if experts else 0
        layers = arch.num_layers + arch.prediction_layers
        return cls(
            sequence=numbers(sequence_length),
            hidden=numbers(arch.hidden_size),
            vocab=numbers(arch.vocab_size),
            dense_layers=numbers(arch.dense_layers),
            moe_layers=numbers(arch.moe_layers),
            prediction_layers=numbers(arch.prediction_layers),
            heads=numbers(arch.num_heads),
            key_dim=numbers(arch.key_head_dim),
            value_dim=numbers(arch.value_head_dim),
            attended=numbers(arch.attended_positions(sequence_length) / layers),
            attention=_attention(arch),
            feed_forward=_feed_forward(arch.hidden_size, arch.ffn_size, up),
            shared=_feed_forward(arch.hidden_size, shared, up),
            head_width=numbers(arch.num_heads * arch.key_head_dim),
            key_value_width=numbers(_key_value_width(arch)),
            ffn_width=numbers(arch.ffn_size),
            gated=numbers(arch.gated_ffn),
            norms=numbers(arch.norms_per_block),
            experts=numbers(experts.count if experts else 0),
            experts_per_token=numbers(experts.per_token if experts else 0),
            expert_width=numbers(experts.ffn_size if experts else 0),
            dense_parameters=numbers(arch.block_parameters()),
            moe_parameters=numbers(_without_experts(arch)),
            expert_parameters=numbers(arch.expert_parameters()),
            embedding_parameters=numbers(arch.embedding_parameters()),
            head_parameters=numbers(arch.vocab_size * arch.hidden_size),
        )

    @property
    def layers(self) -> Floats:
        """Blocks, without those that predict later tokens."""
        return self.dense_layers + self.moe_layers


def _attention(arch: Arch) -> tuple[Projection, ...]:
    """Five, of which a model without latents has two: the others have no columns."""
    hidden, heads, latent = arch.hidden_size, arch.num_heads, arch.latent
    output = Projection.of(hidden, heads * arch.value_head_dim, "k")
    if latent is None:
        together = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        none = Projection.of(0, hidden, "")
        return (none, Projection.of(together, hidden, "n"), none, none, output)
    rank = latent.query_rank
    up = heads * (latent.nope_head_dim + latent.value_head_dim)
    return (
        Projection.of(rank, hidden, ""),
        Projection.of(heads * arch.key_head_dim, rank or hidden, "n"),
        Projection.of(latent.key_value_rank + latent.rope_head_dim, hidden, ""),
        Projection.of(up, latent.key_value_rank, "n"),
        output,
    )


def _feed_forward(hidden: int, width: int, up: int) -> tuple[Projection, ...]:
    return (Projection.of(up * width, hidden, "n"), Projection.of(hidden if width else 0, width, "k"))


def _key_value_width(arch: Arch) -> int:
    """Of keys and values as attention reads them; those of latent attention are made whole for all heads."""
    if arch.latent is not None:
        return arch.num_heads * (arch.key_head_dim + arch.value_head_dim)
    return 2 * arch.num_kv_heads * arch.head_dim


def _without_experts(arch: Arch) -> int:
    if arch.experts is None:
        return 0
    return arch.moe_block_parameters() - arch.experts.count * arch.expert_parameters()


def stacked(rows: Sequence[Any]) -> Any:
    """Many of one dataclass of arrays as one, a row each: what lets a fit or a score take all runs at once."""
    first = rows[0]
    if is_dataclass(first):
        kind: Any = type(first)
        return kind(**{f.name: stacked([getattr(row, f.name) for row in rows]) for f in fields(first)})
    if isinstance(first, tuple):
        return tuple(stacked(column) for column in zip(*rows, strict=True))
    return np.concatenate(rows)
