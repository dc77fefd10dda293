"""Which part of a module goes to which stage of a pipeline, found by looking: nothing is run and nothing changed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from shardwise.errors import ModelError
from shardwise.names import canonical
from shardwise.plan.schedules import Sizes, cannot_share, stage_blocks

SPLIT_FIX = "describe the model as sw.Split(before, blocks, after)"


class Place(NamedTuple):
    """Where a module stands in the root: its parent, its name there, its canonical path, and its stage."""

    parent: nn.Module
    name: str
    path: str
    stage: int

    def put(self, module: nn.Module) -> None:
        setattr(self.parent, self.name, module)


class Outline(NamedTuple):
    """What of a root belongs to which stage: its blocks in their order, and the modules with parameters around them."""

    blocks: list[Place]
    before: list[Place]
    after: list[Place]

    @property
    def places(self) -> list[Place]:
        return [*self.blocks, *self.before, *self.after]

    def stage_of(self, name: str) -> int:
        """The stage of a parameter by its canonical name."""
        return next(place.stage for place in self.places if name.startswith(f"{place.path}."))


def outline(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    stages: int,
    sizes: Sizes = "even",
    *,
    why_none: str = "",
) -> Outline:
    """Where each part of a whole module goes; nothing is changed, and nothing is run.

    `sizes`: the number of blocks of each stage. `why_none`: why there are no blocks, for the error. What is registered
    before the blocks is the first stage's, the rest the last one's; the first forward refuses another order. Raises:
    ModelError for a module that cannot be cut.
    """
    of_block = _stage_of_each_block(len(blocks), stages, sizes, why_none)
    container, names = _container(module, blocks)
    paths = {inner: canonical(path) for path, inner in module.named_modules()}
    inside = [
        Place(container, name, paths[b], of_block[i]) for i, (name, b) in enumerate(zip(names, blocks, strict=True))
    ]
    before: list[Place] = []
    after: list[Place] = []
    _walk(module, container, paths, before, after, last=stages - 1)
    return Outline(inside, before, after)


def _stage_of_each_block(blocks: int, stages: int, sizes: Sizes, why_none: str) -> list[int]:
    if blocks < stages:
        raise ModelError(
            f"The model has {blocks} blocks, and the pipeline {stages} stages.",
            why="each stage holds at least one block" + (f"; {why_none}" if why_none else ""),
            fix=f"train.plan.pp x train.plan.stages_per_rank of at most {blocks}"
            if blocks
            else f'model.blocks = "the.path" of an nn.ModuleList of them; or {SPLIT_FIX}',
        )
    problem = cannot_share(blocks, stages, sizes)
    if problem:
        raise ModelError(
            f"{problem[0].upper()}{problem[1:]}.",
            fix=f'train.plan.stage_blocks: {stages} numbers, each at least 1, that sum to {blocks}; or "even"',
        )
    return [stage for stage, held in enumerate(stage_blocks(blocks, stages, sizes)) for _ in held]


def _container(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Module, list[str]]:
    """The module whose children the blocks are, and their names in it."""
    for candidate in module.modules():
        children = dict(candidate.named_children())
        if len(children) == len(blocks) and all(a is b for a, b in zip(children.values(), blocks, strict=True)):
            return candidate, list(children)
    raise ModelError(
        "The blocks are not the children of one container, each once and in order.",
        why="a pipeline gives each stage a contiguous part of them",
        fix=f"put them into one nn.ModuleList and give blocks = its path; or {SPLIT_FIX}",
    )


def _walk(
    parent: nn.Module, container: nn.Module, paths: Mapping[nn.Module, str], before: list[Place], after: list[Place],
    *, last: int, passed: bool = False,
) -> bool:  # fmt: skip
    """Collect the outermost modules with parameters around the container; whether it was passed."""
    own = [name for name, _ in parent.named_parameters(recurse=False)]
    if own:
        where = f"{paths[parent]}.{own[0]}" if paths[parent] else own[0]
        raise ModelError(
            f"{where} is a parameter of a module that holds the blocks.",
            why="every stage runs this module's forward, and a parameter has one stage",
            fix="put it into a module of its own, called before or after the blocks",
        )
    for name, child in parent.named_children():
        if child is container:
            passed = True
        elif container in set(child.modules()) or isinstance(child, nn.ModuleList | nn.ModuleDict):
            passed = _walk(child, container, paths, before, after, last=last, passed=passed)
        elif any(True for _ in child.parameters()):
            side = after if passed else before
            side.append(Place(parent, name, paths[child], last if passed else 0))
    return passed


class Tie(NamedTuple):
    """One weight under several names that lie on several stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def ties_across(module: nn.Module, blocks: Sequence[nn.Module], stages: int, sizes: Sizes = "even") -> tuple[Tie, ...]:
    """The ties of a whole module that cross stages, in its order. Raises: ModelError."""
    plan = outline(module, blocks, stages, sizes)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(canonical(name))
    found = [Tie(tuple(group), tuple(plan.stage_of(name) for name in group)) for group in names.values()]
    return tuple(tie for tie in found if len(set(tie.stages)) > 1)
