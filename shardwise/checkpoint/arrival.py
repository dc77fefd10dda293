"""Whether what was saved is what now lies in the training's own tensors: sums of them against the manifest's."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise import ranks
from shardwise.checkpoint.files import ITEM_BYTES
from shardwise.checkpoint.manifest import Manifest, TensorEntry
from shardwise.checkpoint.regions import region_of, to_bytes
from shardwise.checkpoint.root import LANES, lanes_of, region_sum, scaled, spelled
from shardwise.errors import CheckpointError


class Arrived(NamedTuple):
    """Of one tensor, over all ranks: the sum of every word as often as it is held, and how many values are held."""

    sum: str
    numel: int


def check_arrival(
    manifest: Manifest,
    entries: Mapping[str, TensorEntry],
    targets: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
) -> bool:
    """Compares what all ranks hold in `targets`, after the copy, with the manifest's sums; False where it has none.

    `entries`: of each target, what it was loaded from. `values`: what was verified and copied, to say on which rank it
    went wrong. Collective: one sum of three whole numbers a tensor. Raises: CheckpointError, on every rank.
    """
    if not manifest.root:
        return False
    order = {entry.name: at for at, entry in enumerate(manifest.tensors)}
    mine = torch.zeros(len(order), LANES + 1, dtype=torch.int64)
    for name, target in targets.items():
        entry = entries[name]
        mine[order[entry.name]] += _counted(entry, name, target)
    total = ranks.all_reduce_sum(mine.to(ranks.wire_device())).tolist()
    found = {name: Arrived(spelled([lane % 2**64 for lane in total[at][:LANES]]), total[at][-1])
             for name, at in order.items()}  # fmt: skip
    wrong = wrong_of(manifest, found)
    if wrong:
        _raise(wrong, entries, targets, values)
    return True


def wrong_of(manifest: Manifest, found: Mapping[str, Arrived]) -> list[str]:
    """The tensors that are not what was saved, or not held as often by all their values.

    A tensor that several ranks hold alike adds as many times its sum; one rank's fault changes that all the same, since
    a single word changes a sum by a number that is none modulo 2^64. A rank's own tensors are loaded by it alone, or by
    nobody where it is not there any more.
    """
    wrong = []
    for entry in manifest.tensors:
        arrived, numel = found[entry.name], _numel(entry)
        times, rest = divmod(arrived.numel, numel) if numel else (1, 0)
        missing = not times and entry.name.split("/")[0] not in ("own", "rng")
        if rest or missing or arrived.sum != scaled(entry.sum, times):
            wrong.append(entry.name)
    return wrong


def _numel(entry: TensorEntry) -> int:
    numel = 1
    for size in entry.shape:
        numel *= size
    return numel


def _counted(entry: TensorEntry, name: str, tensor: torch.Tensor) -> torch.Tensor:
    region = region_of(name, tensor)
    part = region_sum(to_bytes(tensor), ITEM_BYTES[entry.dtype], entry.shape, region)
    signed = [lane - 2**64 if lane >= 2**63 else lane for lane in lanes_of(part)]
    return torch.tensor([*signed, region.numel], dtype=torch.int64)


def _raise(
    wrong: Sequence[str],
    entries: Mapping[str, TensorEntry],
    targets: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
) -> None:
    """Raises: CheckpointError naming the ranks on which the copy is not what was read. Collective."""
    mine = [
        name for name in targets if entries[name].name in wrong and to_bytes(targets[name]) != to_bytes(values[name])
    ]
    held = ranks.gather_json(mine)
    where = [f"rank {rank}: {', '.join(names[:3])}" for rank, names in enumerate(held) if names]
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise CheckpointError(
        f"What was loaded is not what was saved: {', '.join(wrong[:3])}{more}.",
        why=f"the files are whole, and after the copy other values are there ({'; '.join(where)})"
        if where
        else "the files are whole and each copy is, and together they are not the tensor that was saved",
        fix="start again; where it comes back on one rank, test that machine's memory",
    )
