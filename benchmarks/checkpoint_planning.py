"""How long the ranks of a large job need to work out who writes what: 1,024 ranks, 70 billion parameters.

Run: python -m benchmarks.checkpoint_planning [--world 1024]

A fake process group stands for the job; tensors have shapes and no values. In the job the ranks plan at the same time
and ask nobody, so the time that counts is the slowest rank's. Ranks that differ only in where their even shards begin
plan alike: one of each kind is planned. What all ranks would say before a save is held against each other as well.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.checkpoint.layout import disagreeing
from shardwise.checkpoint.snapshot import Layout, Subject, parts, snapshot
from shardwise.regions import Split, part
from shardwise.torch_private import fake_store, forget_layouts

LIMIT_SECONDS = 2.0
# Llama 3 70B: layers, hidden, feed-forward, heads' and key-value heads' widths, vocabulary.
LAYERS, HIDDEN, INNER, QUERIES, KEYS, VOCABULARY = 80, 8192, 28672, 8192, 1024, 128256
# Of each split its axes, and how a weight is placed on them; the last axis may be cut unevenly.
SPLITS: dict[str, tuple[dict[str, int], list[Any]]] = {
    "fully sharded": ({"dp_shard": 1024}, [Shard(0)]),
    "8 replicas of 128 shards": ({"dp_replicate": 8, "dp_shard": 128}, [Replicate(), Shard(0)]),
    "128 shards of 8 tp": ({"dp_shard": 128, "tp": 8}, [Shard(0), Shard(1)]),
    "1,024 replicas": ({"dp_replicate": 1024}, [Replicate()]),
}


def weights() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embedding", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in (
            ("q", (QUERIES, HIDDEN)), ("k", (KEYS, HIDDEN)), ("v", (KEYS, HIDDEN)), ("o", (HIDDEN, QUERIES)),
            ("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER)),
            ("norm1", (HIDDEN,)), ("norm2", (HIDDEN,)),
        ):  # fmt: skip
            yield f"layer{layer}_{name}", shape
    yield "norm", (HIDDEN,)
    yield "head", (VOCABULARY, HIDDEN)


def tensor(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> DTensor:
    """Of the right shape everywhere, and of four bytes."""
    placed = [one if not isinstance(one, Shard) or one.dim < len(shape) else Replicate() for one in placements]
    coordinate = mesh.get_coordinate()
    splits = [
        Split(one.dim, mesh.size(axis), coordinate[axis]) for axis, one in enumerate(placed) if isinstance(one, Shard)
    ]
    local = torch.zeros(1).expand(part(shape, splits).shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride)


def subject(world: int, axes: dict[str, int], placements: Sequence[Any]) -> Subject:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    module = nn.Module()
    for name, shape in weights():
        module.register_parameter(name, nn.Parameter(tensor(shape, mesh, placements)))
    optimizer = torch.optim.AdamW(module.parameters())
    for (_, shape), parameter in zip(weights(), module.parameters(), strict=True):
        moments = {name: tensor(shape, mesh, placements) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return Subject({"": module}, {"": optimizer}, None, {}, "rank", world=world)


def planned(rank: int, world: int, axes: dict[str, int], placements: Sequence[Any]) -> tuple[float, Layout, int]:
    """Seconds of this rank, what it holds, and the bytes that it would write."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=fake_store())
    try:
        made = subject(world, axes, placements)
        nothing: list[dict[str, str]] = [{} for _ in range(world)]
        began = time.perf_counter()
        kept = snapshot(made)
        layout = kept.layout()
        mine, _ = parts(kept, layout, nothing, rank=rank)
        return time.perf_counter() - began, layout, sum(one.content.bytes for one in mine)
    finally:
        dist.destroy_process_group()
        forget_layouts()  # torch takes equal meshes for one, and this process is another rank next


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=1024, choices=[1024])
    world = parser.parse_args().world
    torch.set_num_threads(1)
    worst = 0.0
    for name, (axes, placements) in SPLITS.items():
        # The first, one in the middle, and the last, whose shards may be short or empty.
        told = [planned(rank, world, axes, placements) for rank in (0, world // 2 + 3, world - 1)]
        began = time.perf_counter()
        same = disagreeing([told[0][1].alike()] * world) if len(told[0][1].alike()) == 1 else None
        held = time.perf_counter() - began
        slowest = max(seconds for seconds, _, _ in told)
        worst = max(worst, slowest + held)
        print(
            f"{name}: {len(told[0][1].regions)} tensors a rank planned in {slowest:.3f} s, what {world:,} ranks say "
            f"compared in {held:.3f} s{'' if same is None else ' (they differ)'}; "
            f"{told[0][2] / 1e9:.3f} to {told[-1][2] / 1e9:.3f} GB a rank"
        )
    print(f"slowest: {worst:.3f} s, {worst / LIMIT_SECONDS:.2f} of the limit of {LIMIT_SECONDS:g} s")
    return 0 if worst < LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
