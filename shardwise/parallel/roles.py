"""Who does what under tensor parallel: which layers are split by columns, which by rows, found by looking.

A region is a module that holds column layers and the row layer that follows them (an attention, a feed-forward
network): what lies between them is split, and its sum leaves through the row layer. What is not known to be one stays
whole on every rank, and `why` says so.
"""

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.models.decoder import Attention, Decoder, FeedForward
from shardwise.names import canonical
from shardwise.torch_private import parameter_slots

ROLES = ("column", "row", "embedding", "head", "replicated")
# Names of layers as Llama, Qwen, Mistral, GPT-NeoX, OPT, BERT, torch and nanoGPT-like models write them.
ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("wq", "wk", "wv"), ("wo",)),
    (("query", "key", "value"), ("out", "dense", "output")),
    (("to_q", "to_k", "to_v"), ("to_out",)),
)
FUSED = ("qkv_proj", "qkv", "Wqkv", "c_attn")
FUSED_ROW = ("o_proj", "out_proj", "proj", "c_proj", "dense", "wo")
FEED_FORWARD = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("up_proj",), ("down_proj",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
    (("linear1",), ("linear2",)),
    (("fc_in",), ("fc_out",)),
    (("dense_h_to_4h",), ("dense_4h_to_h",)),
    (("up",), ("down",)),
)


class Region(NamedTuple):
    """A module between whose column layers and row layer the work is split; paths are canonical.

    `parts`: of a fused column layer, the sizes of the pieces (q, k, v) along its outputs, each split by itself.
    `head_dim`: in an attention, what a split may not cut.
    """

    path: str
    columns: tuple[str, ...]
    row: str
    head_dim: int = 1
    parts: tuple[int, ...] = ()


class Roles(NamedTuple):
    """What is split. `sequence`: whether all with weights outside the regions works position by position.

    `known`: whether what has no weights does so too; that is known of our decoder alone, and else the user's word.
    """

    regions: tuple[Region, ...]
    embedding: str
    head: str
    sequence: bool
    known: bool
    why: tuple[str, ...]


def of(module: nn.Module, blocks: Sequence[nn.Module], given: Mapping[str, str] | None = None) -> Roles:
    """The roles of a whole module: those given by a pattern of a path, else guessed for known names.

    Raises: ModelError for a pattern or a role that does not exist, or a column layer without its row layer.
    """
    named = _by_pattern(module, given or {})
    regions, why = _given_regions(module, named), []
    for region in regions:
        _require_splits(module, region)
    taken = {path for region in regions for path in (*region.columns, region.row)}
    paths = {inner: canonical(name) for name, inner in module.named_modules()}
    for block in blocks:
        for inner in block.modules():
            region, reason = _guess(inner, paths[inner])
            layers = {*region.columns, region.row} if region is not None else set()
            if layers & taken or layers & named.keys():
                continue
            if region is not None and not isinstance(inner, Attention | FeedForward):
                reason = _doubt(module, region)
            if region is not None and not reason:
                regions.append(region)
            why += [reason] if reason else []
    embedding, head, reason = _ends(module, blocks, named, paths)
    why += [reason] if reason else []
    sequence, reason = _position_wise(module, blocks, regions, embedding, head, paths)
    why += [reason] if reason else []
    known = any(isinstance(inner, Decoder) for inner in module.modules())
    if sequence and not known:
        why.append("no sequence parallel unless asked for: what has no weights may look at several positions")
    return Roles(tuple(regions), embedding, head, sequence, known, tuple(dict.fromkeys(why)))


def _doubt(module: nn.Module, region: Region) -> str:
    """Why a guess is not taken; empty where it was tried and holds."""
    holds = splits(module, region)
    if holds is None:
        return (
            f"{region.path} stays whole: it could not be tried by itself, on a hidden tensor alone; "
            "model.roles says what is known of it"
        )
    return "" if holds else f"{region.path} stays whole: split in two it computes something else"


def _require_splits(module: nn.Module, region: Region) -> None:
    """Raises: ModelError for a region of given roles that was tried and computes something else when it is split."""
    holds = splits(module, region)
    count = _own_count(module.get_submodule(region.path))
    if holds is None and count:
        raise ModelError(
            f"model.roles: {region.path} counts its heads by {count}, and could not be tried when split.",
            why="tensor parallel gives it fewer heads, and its own count stays",
            fix="'replicated' for its layers, or a forward that takes the number of heads from the width",
        )
    if holds is False:
        raise ModelError(
            f"model.roles: {region.path or 'the model'} computes something else when it is split as given.",
            why="tried in two parts on a random hidden tensor; it may count its heads by itself, cut its width into "
            "pieces, or mix what lies between its layers",
            fix="'replicated' for its layers, or a forward that takes its sizes from what it is given",
        )


@torch.no_grad()
def splits(module: nn.Module, region: Region) -> bool | None:
    """Whether the parts of a region, one after another with their part of the weights, sum up to the whole.

    None where it cannot be tried: weights on meta, or a forward that takes more than a hidden tensor. It is tried on 8
    random positions in eval mode; the caller's generators are as before.
    """
    inner, row = module.get_submodule(region.path), module.get_submodule(region.row)
    columns = [module.get_submodule(path) for path in region.columns]
    weight = columns[0].weight
    if weight.is_meta or isinstance(weight, DTensor):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, columns[0].in_features, generator=generator).to(weight)
    parts = _smallest_split(region, columns)
    modes = [(one, one.training) for one in inner.modules()]
    with torch.random.fork_rng(devices=[]):
        inner.eval()
        try:
            try:
                whole = inner(x)
            except Exception:
                return None
            try:
                total = sum(_part(inner, columns, row, region, x, part, parts) for part in range(parts))
            except Exception:
                return False
        finally:
            for one, training in modes:
                one.training = training
    if not isinstance(whole, torch.Tensor) or not isinstance(total, torch.Tensor) or total.shape != whole.shape:
        return None
    if row.bias is not None:
        total = total + row.bias
    # Wrong splits are wrong by the size of the values; rounding is below 1e-3 of it in every dtype of a master.
    return bool((total - whole).norm() <= 1e-3 * whole.norm())


def _smallest_split(region: Region, columns: Sequence[nn.Module]) -> int:
    """Into how many parts: the smallest number above one that cuts between heads."""
    sizes = region.parts or tuple(layer.out_features for layer in columns)
    units = [size // region.head_dim for size in sizes] if region.head_dim > 1 else [2]
    common = math.gcd(*units)
    return next((n for n in range(2, common + 1) if common % n == 0), 1)


def _part(
    inner: nn.Module,
    columns: Sequence[nn.Module],
    row: nn.Module,
    region: Region,
    x: torch.Tensor,
    part: int,
    parts: int,
) -> torch.Tensor:
    """One part's forward, with its pieces of the weights in their places."""
    held = [(layer, dict(parameter_slots(layer))) for layer in [*columns, row]]
    try:
        for layer in columns:
            slots = parameter_slots(layer)
            for name, whole in list(slots.items()):
                if whole is not None:
                    slots[name] = torch.cat(
                        [p.tensor_split(parts)[part] for p in whole.split(region.parts or len(whole))]
                    )
        slots = parameter_slots(row)
        slots["weight"] = slots["weight"].tensor_split(parts, dim=1)[part]
        slots["bias"] = None
        outputs: torch.Tensor = inner(x)
        return outputs
    finally:
        for layer, slots in held:
            parameter_slots(layer).update(slots)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def is_norm(module: nn.Module) -> bool:
    """By its class's name: a norm works position by position, unless it is of batches, groups or instances."""
    name = type(module).__name__
    return "Norm" in name and not any(other in name for other in ("Batch", "Group", "Instance"))


def _by_pattern(module: nn.Module, given: Mapping[str, str]) -> dict[str, str]:
    paths = [canonical(name) for name, _ in module.named_modules() if name]
    found: dict[str, str] = {}
    for pattern, role in given.items():
        if role not in ROLES:
            raise ModelError(f"model.roles: {role!r} is no role.", fix=f"use one of {', '.join(ROLES)}")
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
            raise ModelError(
                f"model.roles: no module is at {pattern!r}.", fix=f"a path such as {near[0]!r}" if near else ""
            )
        found.update(dict.fromkeys(matching, role))
    return found


def _given_regions(module: nn.Module, named: Mapping[str, str]) -> list[Region]:
    by_parent: dict[str, dict[str, list[str]]] = {}
    for path, role in named.items():
        if role in ("column", "row"):
            if not is_linear(module.get_submodule(path)):
                raise ModelError(f"model.roles: {path} is {role}, and no nn.Linear.", fix='"replicated"')
            by_parent.setdefault(path.rpartition(".")[0], {"column": [], "row": []})[role].append(path)
    regions = []
    for parent, layers in by_parent.items():
        if not layers["column"] or len(layers["row"]) != 1:
            raise ModelError(
                f"model.roles: {parent or 'the model'} has {len(layers['column'])} column layers and "
                f"{len(layers['row'])} row layers.",
                why="what column layers split, one row layer of the same module adds up again",
                fix="give one row layer beside the column layers, or neither",
            )
        head_dim = getattr(module.get_submodule(parent), "head_dim", 1)
        regions.append(Region(parent, tuple(layers["column"]), layers["row"][0], head_dim))
    return regions


def _guess(module: nn.Module, path: str) -> tuple[Region | None, str]:
    """The region that a module is, by its layers' names; or why one that looks like it is not split."""
    layers = {name: child for name, child in module.named_children() if is_linear(child)}

    def region(columns: Sequence[str], row: str, head_dim: int = 1, parts: tuple[int, ...] = ()) -> Region:
        return Region(path, tuple(f"{path}.{name}" for name in columns), f"{path}.{row}", head_dim, parts)

    for columns, rows in ATTENTION:
        row = next((name for name in rows if name in layers), None)
        if row is not None and all(name in layers for name in columns):
            found, why = _attention(module, path, [layers[name] for name in columns])
            return (region(columns, row, found), "") if found else (None, why)
    fused = next((name for name in FUSED if name in layers), None)
    row = next((name for name in FUSED_ROW if name in layers), None)
    if fused is not None and row is not None:
        found, why = _attention(module, path, [layers[fused]])
        queries = layers[row].in_features
        keys, rest = divmod(layers[fused].out_features - queries, 2)
        if found and not rest and keys % found == 0:
            return region([fused], row, found, (queries, keys, keys)), ""
        return None, why or f"{path} stays whole: {fused} is not q, k and v one after another"
    for columns, rows in FEED_FORWARD:
        row = next((name for name in rows if name in layers), None)
        if row is not None and all(name in layers for name in columns) and len(columns) + 1 == len(layers):
            if any(True for child in module.children() if child not in layers.values() for _ in child.parameters()):
                return None, f"{path} stays whole: there are other weights between its layers"
            if any(layers[name].out_features != layers[row].in_features for name in columns):
                return None, f"{path} stays whole: its layers' widths do not fit one another"
            return region(columns, row), ""
    return None, ""


def _attention(module: nn.Module, path: str, columns: Sequence[nn.Module]) -> tuple[int, str]:
    """The size of a head where an attention counts its heads from the width that it is given; else 0 and why not."""
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        return 0, f"{path} stays whole: it has no head_dim, so it may count its heads by itself"
    if count := _own_count(module):
        return 0, f"{path} stays whole: it counts its heads by {count}"
    inner = [child for child in module.children() if not is_linear(child)]
    if any(p.numel() != head_dim for child in inner for p in child.parameters()):
        return 0, f"{path} stays whole: it has weights across heads"
    return head_dim, ""


def _own_count(module: nn.Module) -> str:
    """The attribute by which an attention counts its heads itself, which a split does not change; empty without one."""
    names = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
    return next((name for name in names if hasattr(module, name)), "")


def _ends(
    module: nn.Module, blocks: Sequence[nn.Module], named: Mapping[str, str], paths: Mapping[nn.Module, str]
) -> tuple[str, str, str]:
    """The vocabulary's embedding and head, which are split by vocabulary, and why not where they look like it."""
    inside = {inner for block in blocks for inner in block.modules()}
    outer = [inner for inner in module.modules() if inner not in inside]
    heads = [paths[m] for m in outer if is_linear(m) and named.get(paths[m]) == "head"]
    embeddings = [paths[m] for m in outer if isinstance(m, nn.Embedding) and named.get(paths[m]) == "embedding"]
    if heads or embeddings:
        return "".join(embeddings[:1]), "".join(heads[:1]), ""
    tables = [m for m in outer if isinstance(m, nn.Embedding) and paths[m] not in named]
    if not tables:
        return "", "", ""
    table = max(tables, key=lambda m: m.num_embeddings)
    if table.padding_idx is not None or table.max_norm is not None or table.sparse or table.scale_grad_by_freq:
        return "", "", f"{paths[table]} stays whole: it treats some rows apart"
    linears = [m for m in outer if is_linear(m) and m.out_features == table.num_embeddings and paths[m] not in named]
    return paths[table], paths[linears[-1]] if linears else "", ""


def _position_wise(
    module: nn.Module, blocks: Sequence[nn.Module], regions: Sequence[Region], embedding: str, head: str,
    paths: Mapping[nn.Module, str],
) -> tuple[bool, str]:  # fmt: skip
    """Whether everything with weights outside the regions is a norm, an embedding or a head."""
    if not (regions and embedding and head):
        return False, "no sequence parallel: it needs a split embedding, split blocks and a split head"
    covered = {region.path for region in regions}
    for inner in module.modules():
        path = paths[inner]
        if any(path == root or path.startswith(f"{root}.") for root in covered) or path in (embedding, head):
            continue
        if any(True for _ in inner.parameters(recurse=False)) and not is_norm(inner):
            return False, f"no sequence parallel: {path or 'the model'} may look at several positions"
    return True, ""
