"""How many numbers of a model a rank holds: dense ones, split over a tensor group or not, and experts'. No torch."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.candidates import Candidates, Flags
from shardwise.cost.workload import Workload
from shardwise.inputs.arch import Arch

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Numbers:
    """Counts of one rank's dense parameters and of its experts', which different groups share. Shapes: [n]."""

    dense: Floats
    expert: Floats

    @property
    def whole(self) -> Floats:
        return np.asarray(self.dense + self.expert)

    def share(self, shards: "Shards") -> Floats:
        """What is left where the ranks that hold the same share it out."""
        return np.asarray(self.dense / shards.dense + self.expert / shards.expert)

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(self.dense + other.dense, self.expert + other.expert)

    def times(self, count: Floats | Flags | float) -> "Numbers":
        return Numbers(np.asarray(self.dense * count), np.asarray(self.expert * count))


@dataclass(frozen=True)
class Shards:
    """Over how many ranks the states of dense parameters and of experts are shared out, were they. Shapes: [n]."""

    dense: Floats
    expert: Floats

    @classmethod
    def of(cls, candidates: Candidates) -> Self:
        """Context-parallel ranks hold the same parameters, so they share too. Experts are spread over ep of the ranks.

        Where ep is above 1, ranks of a tensor group hold whole experts, different ones.
        """
        dense = (candidates.dp_shard * candidates.cp).astype(np.float64)
        return cls(dense, np.maximum(dense * np.where(candidates.ep > 1, candidates.tp, 1) / candidates.ep, 1.0))


@dataclass(frozen=True)
class Units:
    """The parts that are gathered and reduced one by one, as one rank has them, whole."""

    dense_block: Numbers
    moe_block: Numbers
    embedding: Numbers
    head: Numbers
    norm: Numbers

    @classmethod
    def of(cls, arch: Arch, candidates: Candidates) -> Self:
        """Norms, routers and latents' ways down are on every rank. Source: Megatron-LM's layers, our own roles."""
        tp, ep = candidates.tp, candidates.ep
        nothing = np.zeros(len(candidates))

        def dense(split: int, whole: int) -> Numbers:
            return Numbers(split / tp + whole, nothing)

        down = _whole_in_attention(arch)
        attention, norms = arch.attention_parameters() - down, arch.norm_parameters()
        shared, router = arch.shared_expert_parameters(), arch.router_parameters()
        experts = arch.experts.count * arch.expert_parameters() if arch.experts else 0
        of_experts = np.asarray(experts / np.where(ep > 1, ep, tp), dtype=np.float64)
        vocabulary = arch.vocab_size * arch.hidden_size
        positions = arch.embedding_parameters() - vocabulary
        sparse = dense(attention + shared, norms + down + router)
        final = arch.hidden_size * (2 if arch.norm == "layer" else 1)
        return cls(
            dense_block=dense(attention + arch.ffn_parameters(), norms + down),
            moe_block=Numbers(sparse.dense, of_experts),
            embedding=dense(vocabulary, positions),
            head=dense(vocabulary, 0),
            norm=dense(0, final),
        )


def _whole_in_attention(arch: Arch) -> int:
    """The ways down to latents are not split."""
    if arch.latent is None:
        return 0
    latent = arch.latent
    return arch.hidden_size * (latent.query_rank + latent.key_value_rank + latent.rope_head_dim)


def adapters(workload: Workload) -> int:
    """Numbers of one block's low-rank factors. Source: Hu et al., arXiv 2106.09685."""
    trainable, arch = workload.trainable, workload.arch
    if trainable.kind != "lora":
        return 0
    hidden, query = arch.hidden_size, arch.num_heads * arch.head_dim
    key = arch.num_kv_heads * arch.head_dim
    sides = {
        "query": hidden + query, "key": hidden + key, "value": hidden + key, "output": query + hidden,
        "gate": hidden + arch.ffn_size, "up": hidden + arch.ffn_size, "down": arch.ffn_size + hidden,
    }  # fmt: skip
    return sum(trainable.rank * sides.get(target.removesuffix("_proj"), 2 * hidden) for target in trainable.targets)
