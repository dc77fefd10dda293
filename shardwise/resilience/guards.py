"""Guards: every so many steps a cheap look at what must be the same on several ranks, so that no fault stays silent.

Replicated weights have equal bits; tied weights are still one; what was counted is what the loss was divided by; the
gradient norm is one number. Everything here decides but `Guards`, which gathers.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ranks
from shardwise.errors import RanksDiverged
from shardwise.names import canonical
from shardwise.plan.mesh import AXES, MeshShape
from shardwise.regions import whole
from shardwise.torch_private import held_region

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_SPAN = 4096
_COLUMN, _ROW = 0x1E3779B97F4A7C15, 0x32B2AE3D27D4EB4F
# Counts are added in another order than the step adds them; whole numbers are exact in any.
_ROUNDING = 1e-12


class Seen(msgspec.Struct, frozen=True):
    """What one rank says at a guard.

    `bits`: of each family of replicated parts that it holds, one fingerprint. `gone`: a part that it no longer holds.
    `untied`: names that were one weight and are not. `counted` by loss, {} where this rank has none; `divided` by loss.
    `alike`: numbers that must be the same on every rank.
    """

    bits: dict[str, int] = {}
    gone: str = ""
    untied: list[str] = []
    counted: dict[str, float] = {}
    divided: dict[str, float] = {}
    alike: dict[str, float] = {}


class Fault(NamedTuple):
    """What is wrong, its likely cause, and what to do besides going back to a checkpoint."""

    what: str
    why: str
    fix: str


class Guards:
    """Compares the ranks of a module that is split already; look again every `every_steps` steps, 0 is never.

    `aliases`: names that this rank holds of a weight whose first name lies on another rank, as under a pipeline.
    `ties`: those that must hold, where they were looked at earlier. Collective: one gather of 16 characters a
    parameter, once.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: MeshShape,
        *,
        every_steps: int,
        aliases: Mapping[str, str] = MappingProxyType({}),
        ties: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.module, self.mesh, self.every_steps, self.aliases = module, mesh, every_steps, aliases
        self.passed = 0
        self.ties = ties_of(module) if ties is None else ties
        parts = parts_of(module, aliases) if every_steps else {}
        self.families = families(parts, ranks.gather_json(list(parts)) if every_steps else [])

    def due(self, step: int) -> bool:
        return self.every_steps > 0 and step % self.every_steps == 0

    def check(
        self, step: int, *, counted: Mapping[str, float], divided: Mapping[str, float], alike: Mapping[str, float]
    ) -> None:
        """After the optimizer's step, with the module's weights at rest.

        `counted`: what this rank's micro-batches counted, by loss, whether or not its sums are the ones that are added
        up; {} on a rank without losses. `divided`: what the gradients were divided by. `alike`: what must be one number
        everywhere, the gradient norm above all. Collective: one small gather, a second one where bits differ.
        Raises: RanksDiverged, the same on every rank.
        """
        prints = self._fingerprints()
        gone = next((part for family in self.families.values() for part in family if part not in prints), "")
        bits = {} if gone else {n: combined(prints[part] for part in each) for n, each in self.families.items()}
        untied = untied_names(self.ties, self.module)
        said = Seen(bits, gone, untied, dict(counted), dict(divided), dict(alike))
        seen = [msgspec.convert(each, Seen) for each in ranks.gather_json(msgspec.to_builtins(said))]
        fault = fault_of(seen, self.mesh)
        if fault is None and (apart := differing(seen)):
            wanted = {part for name in apart & self.families.keys() for part in self.families[name]}
            mine = {part: value for part, value in prints.items() if part in wanted}  # in the module's order
            fault = difference(ranks.gather_json(mine), self.mesh)
        if fault is not None:
            since = f"go on from a checkpoint of step {self.passed} or before; " if self.passed else ""
            raise RanksDiverged(f"At step {step} {fault.what}", why=fault.why, fix=since + fault.fix)
        self.passed = step

    def _fingerprints(self) -> dict[str, int]:
        compared = {part for family in self.families.values() for part in family}
        parts = parts_of(self.module, self.aliases)
        return fingerprints({part: tensor for part, tensor in parts.items() if part in compared})


def parts_of(module: nn.Module, aliases: Mapping[str, str] = MappingProxyType({})) -> dict[str, torch.Tensor]:
    """What this rank holds of each parameter, by name and region: `blocks.0.weight [0:4, 0:8]`. Empty parts are left
    out, and a weight of several names stands once.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        first = aliases.get(canonical(name), canonical(name))
        tensor = parameter.detach()
        region = held_region(tensor) if isinstance(tensor, DTensor) else whole(tensor.shape)
        if region.numel:
            found[f"{first} {region}"] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def families(parts: Iterable[str], held: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Those of this rank's parts that several ranks hold, put together where the same ranks hold them.

    `held`: every rank's parts, in rank order. A family's name is the same on all ranks that hold it, and no others'.
    """
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(held):
        for part in names:
            holders.setdefault(part, []).append(rank)
    together: dict[tuple[int, ...], list[str]] = {}
    for part in parts:
        if len(holders.get(part, ())) > 1:
            together.setdefault(tuple(holders[part]), []).append(part)
    # Ranks may hold what they share in other orders: a name or a fingerprint of several is of the sorted ones.
    return {xxhash.xxh3_64_hexdigest(repr(group).encode()): sorted(family) for group, family in together.items()}


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """64 bits of each tensor's bits. On a GPU they are summed there, and one read brings all to the host."""
    found = {name: hashed(tensor) for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    summed = {name: summed_bits(tensor) for name, tensor in tensors.items() if name not in found}
    if summed:
        found |= dict(zip(summed, torch.stack(list(summed.values())).tolist(), strict=True))
    return found


def hashed(tensor: torch.Tensor) -> int:
    """xxh3 of the bytes, as a signed number of 64 bits."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(raw.data) - 2**63


def summed_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers' bits as integers, each times a weight of its place, summed modulo 2^64: one number, on the device.

    Every weight is odd, so a change of one number always changes the sum. No memory but a number a row of 4,096.
    """
    flat = tensor.contiguous().reshape(-1)
    flat = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    rows, rest = divmod(flat.numel(), _SPAN)
    grid, tail = flat[: rows * _SPAN].view(rows, _SPAN), flat[rows * _SPAN :].to(torch.int64)
    at = torch.arange(max(rows + 1, _SPAN), dtype=torch.int64, device=flat.device)
    column, row = (2 * at[:_SPAN] + 1) * _COLUMN, 2 * (at[: rows + 1] + 1) * _ROW
    total = (grid.sum(0, dtype=torch.int64) * column).sum() + (grid.sum(1, dtype=torch.int64) * row[:rows]).sum()
    return total + (tail * (column[:rest] + row[rows])).sum()


def combined(prints: Iterable[int]) -> int:
    """One fingerprint of several, in their order."""
    return xxhash.xxh3_64_intdigest(b"".join(struct.pack("<q", one) for one in prints))


def ties_of(module: nn.Module) -> list[list[str]]:
    """The names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def untied_names(ties: Sequence[Sequence[str]], module: nn.Module) -> list[str]:
    """Of the first tie that is none any more, its first name and one that is another weight now; [] where all hold."""
    now = dict(module.named_parameters(remove_duplicate=False)) if ties else {}
    for first, *others in ties:
        for name in others:
            if now.get(name) is not now.get(first):
                return [canonical(first), canonical(name)]
    return []


def fault_of(seen: Sequence[Seen], mesh: MeshShape) -> Fault | None:
    """The first thing wrong in what the ranks said, but for the bits of weights; None where nothing is."""
    return _replaced(seen) or _miscounted(seen, mesh) or _unequal(seen)


def differing(seen: Sequence[Seen]) -> set[str]:
    """The families of which two ranks have other bits."""
    prints: dict[str, set[int]] = {}
    for each in seen:
        for family, value in each.bits.items():
            prints.setdefault(family, set()).add(value)
    return {family for family, values in prints.items() if len(values) > 1}


def difference(held: Sequence[Mapping[str, int]], mesh: MeshShape) -> Fault | None:
    """Which part differs first, on which ranks, and why that may be, from the fingerprints of the ranks' parts."""
    by_part: dict[str, dict[int, int]] = {}
    for rank, prints in enumerate(held):
        for part, value in prints.items():
            by_part.setdefault(part, {})[rank] = value
    wrong = [part for part, values in by_part.items() if len(set(values.values())) > 1]
    if not wrong:
        return None
    values = by_part[wrong[0]]
    odd, rest = _odd_ones(values)
    ways = f"the ranks along {' and '.join(_axes(list(values), mesh))}"
    what = f"{wrong[0]} has other bits on {_ranks(odd, mesh)} than on {_ranks(rest, mesh)}."
    alone = "code that changes it on some ranks only (under is_main, say)"
    many = f"{len(wrong)} of the {len(by_part)} tensors that these ranks share differ"
    if len(wrong) == 1 and len(odd) == 1 and len(by_part) > 1:
        return Fault(what, f"one tensor on one rank: a bit flipped in its memory, or {alone}", "test that machine")
    if 2 * len(wrong) > len(by_part):
        why = f"gradients that are not summed over {ways}, or an optimizer that is set otherwise on some"
        return Fault(what, f"{many}: {why}", "shardwise verify this plan")
    why = f"their gradients are not summed over {ways}, or {alone}"
    return Fault(what, f"{many}: {why}", "shardwise verify this plan, and look at what the loop's body does to weights")


def _replaced(seen: Sequence[Seen]) -> Fault | None:
    for rank, each in enumerate(seen):
        if each.untied:
            first, other = each.untied
            return Fault(
                f"{other} is no longer tied to {first} on rank {rank}.",
                "something put another weight in the place of one of the two",
                "tie weights before the module is split, and afterwards change them in place",
            )
        if each.gone:
            return Fault(
                f"rank {rank} no longer holds {each.gone}.",
                "its weight was taken out or replaced, or is not at rest as it was when the guards were made",
                "change weights in place, and look after the optimizer's step",
            )
    return None


def _miscounted(seen: Sequence[Seen], mesh: MeshShape) -> Fault | None:
    """Ranks that read the same samples count the same, and all of them together what each divided by."""
    of_samples: dict[tuple[str, int], tuple[int, float]] = {}
    for rank, each in enumerate(seen):
        for loss, count in each.counted.items():
            first, other = of_samples.setdefault((loss, mesh.data_coord(rank)), (rank, count))
            if count != other:
                return Fault(
                    f"rank {rank} counted {count:g} for {loss!r}, and rank {first} {other:g} of the same samples.",
                    "the loss function counts something that is split or drawn between them",
                    "return the number of items in the batch, from the batch alone",
                )
    for loss in dict.fromkeys(loss for loss, _ in of_samples):
        total = math.fsum(count for (name, _), (_, count) in of_samples.items() if name == loss)
        for rank, each in enumerate(seen):
            if not math.isclose(each.divided.get(loss, math.nan), total, rel_tol=_ROUNDING):
                return Fault(
                    f"the global batch counts {total:g} for {loss!r}, "
                    f"and rank {rank} divided by {each.divided.get(loss, math.nan):g}.",
                    "a rank's count was left out or added twice",
                    "shardwise verify this plan",
                )
    return None


def _unequal(seen: Sequence[Seen]) -> Fault | None:
    for name in dict.fromkeys(name for each in seen for name in each.alike):
        values = [struct.pack("<d", each.alike.get(name, math.nan)) for each in seen]
        if len(set(values)) > 1:
            odd, rest = _odd_ones(dict(enumerate(values)))
            return Fault(
                f"the {name} is {seen[odd[0]].alike.get(name, math.nan)!r} on rank {odd[0]} "
                f"and {seen[rest[0]].alike.get(name, math.nan)!r} on rank {rest[0]}.",
                "it comes out of one sum over all ranks, so one of them added or received something else",
                "shardwise verify this plan",
            )
    return None


def _odd_ones(values: Mapping[int, object]) -> tuple[list[int], list[int]]:
    """Ranks that do not have the most frequent value (of the lowest rank, where two are), and those that have it."""
    common = Counter(values.values()).most_common(1)[0][0]
    return [r for r, v in values.items() if v != common], [r for r, v in values.items() if v == common]


def _axes(held: Sequence[int], mesh: MeshShape) -> list[str]:
    """The axes of the mesh along which these ranks differ."""
    coords = [mesh.coord(rank) for rank in held]
    return [axis for index, axis in enumerate(AXES) if len({coord[index] for coord in coords}) > 1]


def _ranks(some: Sequence[int], mesh: MeshShape) -> str:
    """`rank 3 (dp_shard 1, tp 1)`, or the first few of several."""
    if len(some) == 1:
        coord = mesh.coord(some[0])._asdict()
        where = ", ".join(f"{axis} {coord[axis]}" for axis in AXES if getattr(mesh, axis) > 1)
        return f"rank {some[0]} ({where})"
    more = f" and {len(some) - 8} more" if len(some) > 8 else ""
    return f"ranks {', '.join(map(str, some[:8]))}{more}"
