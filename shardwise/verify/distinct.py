"""Which ranks of a world are worth a dry run: one of each set whose local shapes are equal. No torch."""

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.data.order import cells
from shardwise.inputs.arch import Arch
from shardwise.plan.mesh import Coord
from shardwise.plan.plan import Plan


class Distinct(NamedTuple):
    """A rank, and all those of the world that it stands for (itself among them)."""

    rank: int
    stands_for: tuple[int, ...]


def split_lengths(arch: Arch) -> tuple[int, ...]:
    """The lengths of the dims of our decoder's parameters: what tp and dp_shard cut."""
    heads, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    lengths = {arch.vocab_size, arch.hidden_size, arch.ffn_size, heads, keys}
    experts = arch.experts
    if experts is not None:
        lengths |= {experts.count, experts.count * experts.ffn_size, experts.count * arch.hidden_size}
        lengths |= {experts.shared_ffn_size} if experts.shared_ffn_size else set()
        lengths |= {1} if experts.shared_gate else set()
    return tuple(sorted(lengths | ({arch.head_dim} if arch.qk_norm else set())))


def distinct_ranks(plan: Plan, lengths: Iterable[int]) -> tuple[Distinct, ...]:
    """One rank of each kind, the lowest: every rank of the world holds what one of them holds, in the same shapes.

    `lengths`: of all dims that may be split. Ranks differ by stage, by how long their shard of each length is, and by
    the samples of their micro-batches; a copy (dp_replicate) differs by the latter alone.
    """
    mesh, lengths = plan.decision.mesh, tuple(lengths)
    found: dict[tuple[object, ...], list[int]] = {}
    shards: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    samples = [micro_batch_sizes(plan, index) for index in range(mesh.data_parallel)]
    for rank in range(mesh.world):
        coord = mesh.coord(rank)
        place = (coord.dp_shard, coord.tp)
        if place not in shards:
            shards[place] = tuple(_shards(plan, coord, length) for length in lengths)
        key = (coord.pp, coord.cp, shards[place], samples[mesh.data_coord(rank)])
        found.setdefault(key, []).append(rank)
    return tuple(Distinct(ranks[0], tuple(ranks)) for ranks in found.values())


def micro_batch_sizes(plan: Plan, data_coord: int) -> tuple[int, ...]:
    """Samples of each micro-batch of a data-parallel rank, in the first step of an epoch."""
    decision = plan.decision
    own = cells(0, decision.global_batch, data_coord, decision.mesh.data_parallel, decision.accumulation)
    return tuple(cell.samples + cell.extra for cell in own)


def chunk(length: int, degree: int, index: int) -> int:
    """How long piece `index` of `degree` is. Source: torch.chunk's rule, which DTensor and FSDP2 cut by."""
    step = -(-length // degree)
    return max(0, min(length - index * step, step))


def _shards(plan: Plan, coord: Coord, length: int) -> tuple[int, ...]:
    """The ways in which a length may lie on a rank: cut by dp_shard, by tp, and by tp then dp_shard."""
    mesh, zero = plan.decision.mesh, plan.decision.zero
    shard = mesh.dp_shard if zero else 1
    by_tp = chunk(length, mesh.tp, coord.tp)
    return (
        chunk(length, shard, coord.dp_shard if zero else 0),
        by_tp,
        chunk(by_tp, shard, coord.dp_shard if zero else 0),
    )
