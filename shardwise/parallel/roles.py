"""Who does what under tensor parallel: which layers are split by columns, which by rows, found by looking.

A region is a module that holds column layers and the row layer that follows them (an attention, a feed-forward
network): what lies between them is split, and its sum leaves through the row layer. What is not known to be one stays
whole on every rank, and `why` says so.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from shardwise.errors import ModelError
from shardwise.models.decoder import Attention, Decoder, FeedForward
from shardwise.models.hf import small
from shardwise.models.linear import Linear
from shardwise.names import canonical
from shardwise.parallel.trial import Region, splits
from shardwise.torch_private import Dropout, buffer_slots, parameter_slots

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
# How modules call a number of heads that they would apply to a part of the heads.
COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
# Classes that work number by number, by a part of their names.
ELEMENTWISE = ("act", "elu", "silu", "swish", "sigmoid", "tanh", "mish", "identity", "dropout")


class Roles(NamedTuple):
    """What is split. `sequence`: whether all with weights or tables outside the regions works position by position.

    `known`: whether what has none does so too; that is known of our decoder alone, and else the user's word.
    """

    regions: tuple[Region, ...]
    embedding: str
    head: str
    sequence: bool
    known: bool
    why: tuple[str, ...]
    blocks: tuple[str, ...] = ()


def of(module: nn.Module, blocks: Sequence[nn.Module], given: Mapping[str, str] | None = None) -> Roles:
    """The roles of a whole module: those given by a pattern of a path, else guessed for known names.

    Raises: ModelError for a pattern or a role that does not exist, a column layer without its row layer, or a role that
    its module cannot have.
    """
    named = _by_pattern(module, given or {})
    regions, why = _given_regions(module, named), []
    taken = set(named)
    paths = {inner: canonical(name) for name, inner in module.named_modules()}
    for inner in dict.fromkeys(inner for block in blocks for inner in block.modules()):
        region, reason = _guess(inner, paths[inner])
        if region is not None and taken & {region.path, *region.columns, region.row}:
            continue
        if region is not None and not isinstance(inner, Attention | FeedForward):
            reason = _doubt(module, region)
        if region is not None and not reason:
            regions.append(region)
        why += [reason] if reason else []
    embedding, head, reason = _ends(module, blocks, named, paths)
    why += [reason] if reason else []
    sequence, reason = _position_wise(module, regions, embedding, head, paths)
    why += [reason] if reason else []
    known = any(isinstance(inner, Decoder) for inner in module.modules())
    if sequence and not known:
        why.append("no sequence parallel unless asked for: what has no weights may look at several positions")
    at = tuple(paths[block] for block in blocks)
    return Roles(tuple(regions), embedding, head, sequence, known, tuple(dict.fromkeys(why)), at)


def _doubt(module: nn.Module, region: Region) -> str:
    """Why a guess is not taken; empty where it was tried and holds."""
    holds = splits(module, region)
    if holds is None:
        holds = _splits_alike(module, region)
    if holds is None:
        return (
            f"{region.path} stays whole: it could not be tried by itself, on a hidden tensor alone; "
            "model.roles says what is known of it"
        )
    return "" if holds else f"{region.path} stays whole: split in two it computes something else"


def is_linear(module: nn.Module) -> bool:
    """Whether it is known to compute `x @ weight.T + bias` and nothing else: no subclass with more to it."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward in (nn.Linear.forward, Linear.forward)
        and "forward" not in vars(module)
        and set(parameter_slots(module)) == {"weight", "bias"}
        and not any(True for _ in module.children())
    )


def is_norm(module: nn.Module) -> bool:
    """By its class's name: a norm works position by position, unless it is of batches, groups or instances."""
    name = type(module).__name__
    return "Norm" in name and not any(other in name for other in ("Batch", "Group", "Instance"))


def is_elementwise(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return isinstance(module, Dropout) or any(word in name for word in ELEMENTWISE)


def _splits_alike(module: nn.Module, region: Region) -> bool | None:
    """The answer of the same place in a small model of the same make, which has numbers, and what is called with more
    than a hidden tensor; None where there is none such."""
    alike = small.alike(module)
    # Of blocks in a row the first stands for all: what a region computes does not depend on which of them it is in.
    path = re.sub(r"(^|\.)\d+(\.|$)", r"\g<1>0\2", region.path, count=1)
    if alike is None or path not in alike.calls:
        return None
    if path not in alike.said:
        found, _ = _guess(alike.module.get_submodule(path), path)
        alike.said[path] = None if found is None else splits(alike.module, found, alike.calls[path])
        if found is not None and bool(found.parts) != bool(region.parts):
            alike.said[path] = None
    return alike.said[path]


def inside(path: str, root: str) -> bool:
    return not root or path == root or path.startswith(f"{root}.")


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
                raise ModelError(
                    f"model.roles: {path} is {role}, and no plain nn.Linear.",
                    why="of another class it is not known what a part of its weights computes",
                    fix=f"model.roles = {{ {path!r} = 'replicated' }}",
                )
            by_parent.setdefault(path.rpartition(".")[0], {"column": [], "row": []})[role].append(path)
    regions = []
    for parent, layers in by_parent.items():
        if not layers["column"] or len(layers["row"]) != 1:
            raise ModelError(
                f"model.roles: {parent or 'the model'} has {len(layers['column'])} column layers and "
                f"{len(layers['row'])} row layers.",
                why="what column layers split, one row layer of the same module adds up again",
                fix="give one row layer beside the column layers, or all of them 'replicated'",
            )
        regions.append(_given_region(module, parent, tuple(layers["column"]), layers["row"][0]))
    return regions


def _given_region(module: nn.Module, path: str, columns: tuple[str, ...], row: str) -> Region:
    """The way of cutting its column layers that was tried and holds; where none can be tried, the known one.

    Raises: ModelError where a cut of the outputs is not, or may not be, a cut of what they mean.
    """
    ways = _ways(module, path, columns, row)
    tried = [splits(module, way) for way in ways]
    if True in tried:
        return ways[tried.index(True)]
    untried = [way for way, holds in zip(ways, tried, strict=True) if holds is None]
    reason = _untried(module, untried[0]) if untried else ""
    if untried and not reason:
        return untried[0]
    raise ModelError(
        f"model.roles: {path or 'the model'} computes something else when it is split as given."
        if not untried
        else f"model.roles: {path or 'the model'} could not be tried when split.",
        why=reason
        or "tried in parts on a random hidden tensor; it may count its heads by itself, cut its width into pieces, or "
        "mix what lies between its layers",
        fix=f"model.roles = {{ {columns[0]!r} = 'replicated' }}, and so for the layers beside it; or a forward that "
        "takes its sizes from what it is given",
    )


def _ways(module: nn.Module, path: str, columns: tuple[str, ...], row: str) -> list[Region]:
    """How column layers may be cut: a single one whose width is not the row layer's holds several things in one.

    These lie one after another (`parts`), or head by head: then what may not be cut is a head of each of them.
    """
    head_dim = getattr(module.get_submodule(path), "head_dim", 1)
    head_dim = head_dim if isinstance(head_dim, int) else 1
    plain = Region(path, columns, row, head_dim)
    width, taken = module.get_submodule(columns[0]).out_features, module.get_submodule(row).in_features
    if len(columns) > 1 or width == taken:
        return [plain]
    found = [plain._replace(parts=(taken, taken))] if width == 2 * taken and head_dim == 1 else []
    if parts := _fused(width, taken, head_dim) if head_dim > 1 else ():
        found.append(plain._replace(parts=parts))
    heads = taken // head_dim
    if head_dim > 1 and width % heads == 0:
        found.append(plain._replace(head_dim=width // heads))
    return found or [plain]


def _untried(module: nn.Module, region: Region) -> str:
    """Why a region that cannot be tried is not known to be split rightly; empty where it is."""
    owner = module.get_submodule(region.path)
    layers = [module.get_submodule(path) for path in (*region.columns, region.row)]
    last = region.columns[0].rpartition(".")[2]
    if len(layers) > 3 or last in FUSED or region.head_dim > 1:
        found, reason = _attention(owner, region.path, layers)
        of_one = len(layers) > 2 or region.parts
        return reason if not found or of_one else f"{last} is not q, k and v one after another"
    if any(layer.out_features != layers[-1].in_features for layer in layers[:-1]):
        return "its first layers' outputs are not its last one's inputs: how parts lie is unknown"
    return ""


def _guess(module: nn.Module, path: str) -> tuple[Region | None, str]:
    """The region that a module is, by its layers' names; or why one that looks like it is not split."""
    layers = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}

    def region(columns: Sequence[str], row: str, head_dim: int = 1, parts: tuple[int, ...] = ()) -> Region:
        at = f"{path}." if path else ""
        return Region(path, tuple(f"{at}{name}" for name in columns), f"{at}{row}", head_dim, parts)

    for columns, rows in ATTENTION:
        row = next((name for name in rows if name in layers), None)
        if row is not None and all(name in layers for name in columns):
            found, why = _attention(module, path, [layers[name] for name in (*columns, row)])
            return (region(columns, row, found), "") if found else (None, why)
    fused = next((name for name in FUSED if name in layers), None)
    row = next((name for name in FUSED_ROW if name in layers), None)
    if fused is not None and row is not None:
        found, why = _attention(module, path, [layers[fused], layers[row]])
        parts = _fused(layers[fused].out_features, layers[row].in_features, found) if found else ()
        if parts:
            return region([fused], row, found, parts), ""
        return None, why or f"{path} stays whole: {fused} is not q, k and v one after another"
    for columns, rows in FEED_FORWARD:
        row = next((name for name in rows if name in layers), None)
        if row is not None and all(name in layers for name in columns) and len(columns) + 1 == len(layers):
            why = _feed_forward(module, path, [layers[name] for name in (*columns, row)])
            return (None, why) if why else (region(columns, row), "")
    return None, ""


def _fused(width: int, queries: int, head_dim: int) -> tuple[int, ...]:
    """The sizes of q, k and v in a fused layer that has them one after another; none where they cannot be that."""
    keys, rest = divmod(width - queries, 2)
    return () if rest or keys <= 0 or keys % head_dim or queries % head_dim else (queries, keys, keys)


def _attention(module: nn.Module, path: str, layers: Sequence[nn.Module]) -> tuple[int, str]:
    """The size of a head where an attention counts its heads from the width that it is given; else 0 and why not."""
    stays = f"{path or 'the model'} stays whole:"
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        return 0, f"{stays} it has no head_dim, so it may count its heads by itself"
    for inner in module.modules():
        counts = [name for name in COUNTS if isinstance(getattr(inner, name, None), int)]
        if counts:
            return 0, f"{stays} it counts its heads by {counts[0]}"
    if not all(is_linear(layer) for layer in layers):
        return 0, f"{stays} its layers are no plain nn.Linear"
    others = [inner for inner in module.modules() if inner not in layers]
    weights = [p for inner in others for p in parameter_slots(inner).values() if p is not None]
    if any(p.numel() != 1 and (p.numel() != head_dim or p.shape[-1] != head_dim) for p in weights):
        return 0, f"{stays} it has weights across heads"
    if any(is_norm(inner) and not _by_head(inner, head_dim) for inner in others):
        return 0, f"{stays} it has a norm that may be across heads"
    return head_dim, ""


def _by_head(norm: nn.Module, head_dim: int) -> bool:
    weights = [p for p in parameter_slots(norm).values() if p is not None]
    return bool(weights) or tuple(getattr(norm, "normalized_shape", ())) == (head_dim,)


def _feed_forward(module: nn.Module, path: str, layers: Sequence[nn.Module]) -> str:
    """Why a feed-forward network is not split; empty where it is."""
    stays = f"{path or 'the model'} stays whole:"
    if not all(is_linear(layer) for layer in layers):
        return f"{stays} its layers are no plain nn.Linear"
    if any(layer.out_features != layers[-1].in_features for layer in layers[:-1]):
        return f"{stays} its first layers' outputs are not its last one's inputs"
    others = [inner for inner in module.modules() if inner is not module and inner not in layers]
    if any(p is not None for inner in (module, *others) for p in parameter_slots(inner).values()):
        return f"{stays} there are other weights between its layers"
    strange = next((inner for inner in others if not is_elementwise(inner)), None)
    return "" if strange is None else f"{stays} {type(strange).__name__} may not work number by number"


def _ends(
    module: nn.Module, blocks: Sequence[nn.Module], named: Mapping[str, str], paths: Mapping[nn.Module, str]
) -> tuple[str, str, str]:
    """The vocabulary's embedding and head, which are split by vocabulary, and why not where they look like it.

    Raises: ModelError for one that was given and cannot be.
    """
    within = {inner for block in blocks for inner in block.modules()}
    outer = [inner for inner in module.modules() if inner not in within]
    given = {role: [path for path, found in named.items() if found == role] for role in ("embedding", "head")}
    if given["embedding"] or given["head"]:
        _require_ends(module, given)
        return "".join(given["embedding"]), "".join(given["head"]), ""
    tables = [m for m in outer if isinstance(m, nn.Embedding) and paths[m] not in named]
    if not tables:
        return "", "", ""
    table = max(tables, key=lambda m: m.num_embeddings)
    linears = [m for m in outer if is_linear(m) and m.out_features == table.num_embeddings and paths[m] not in named]
    head = linears[-1:]
    if reason := _apart(table):
        return "", "", f"{paths[table]} stays whole: {reason}"
    if other := _tied_to_another([table, *head], paths):
        return "", "", f"{paths[table]} stays whole: it is tied to {other}"
    return paths[table], "".join(paths[m] for m in head), ""


def _require_ends(module: nn.Module, given: Mapping[str, Sequence[str]]) -> None:
    for role, found in given.items():
        if len(found) > 1:
            raise ModelError(
                f"model.roles: {', '.join(found)} have the role {role!r}.",
                why="one vocabulary is split",
                fix="give it to one of them, and the others 'replicated'",
            )
        for path in found:
            one = module.get_submodule(path)
            plain = type(one) is nn.Embedding if role == "embedding" else is_linear(one)
            reason = "it is of a class of its own" if not plain else _apart(one) if role == "embedding" else ""
            if reason:
                raise ModelError(
                    f"model.roles: {path} cannot be {'an' if role == 'embedding' else 'a'} {role}.",
                    why=reason,
                    fix=f"model.roles = {{ {path!r} = 'replicated' }}",
                )


def _apart(table: nn.Module) -> str:
    """Why an embedding's rows are not alike; empty where they are."""
    if type(table) is not nn.Embedding:
        return "it is of a class of its own"
    options = ("padding_idx", "max_norm", "sparse", "scale_grad_by_freq")
    # Row 0 may be the padding: by identity, since 0 equals False.
    used = [name for name in options if getattr(table, name) is not None and getattr(table, name) is not False]
    return f"{used[0]} treats some rows apart" if used else ""


def _tied_to_another(ends: Iterable[nn.Module], paths: Mapping[nn.Module, str]) -> str:
    """A module that shares a weight with the ends and is none of them."""
    shared = {parameter_slots(one)["weight"] for one in ends}
    others = [inner for inner in paths if inner not in ends and shared & set(parameter_slots(inner).values())]
    return paths[others[0]] if others else ""


def _position_wise(
    module: nn.Module, regions: Sequence[Region], embedding: str, head: str, paths: Mapping[nn.Module, str]
) -> tuple[bool, str]:
    """Whether everything with weights or tables outside the regions is a norm, an embedding or a head.

    Tables of rotary positions are used inside the regions, where all positions are.
    """
    if not (regions and embedding and head):
        return False, "no sequence parallel: it needs a split embedding, split blocks and a split head"
    roots = [region.path for region in regions]
    nested = next((one for one in roots for other in roots if one != other and inside(one, other)), None)
    if nested is not None:
        return False, f"no sequence parallel: {nested} is split inside a split module"
    for region in regions:
        layers = [module.get_submodule(path) for path in (*region.columns, region.row)]
        if region.head_dim == 1 and (why := _feed_forward(module.get_submodule(region.path), region.path, layers)):
            return False, f"no sequence parallel: {why.replace('stays whole', 'does more than its split layers')}"
    for inner, path in paths.items():
        if any(inside(path, root) for root in roots) or path in (embedding, head) or is_norm(inner):
            continue
        rotary = "rotary" in f"{path}.{type(inner).__name__}".lower() or "rope" in type(inner).__name__.lower()
        if parameter_slots(inner) and any(p is not None for p in parameter_slots(inner).values()):
            return False, f"no sequence parallel: {path or 'the model'} may look at several positions"
        if any(b is not None and b.numel() > 1 for b in buffer_slots(inner).values()) and not rotary:
            return False, f"no sequence parallel: {path or 'the model'} may have a table of positions"
    return True, ""
