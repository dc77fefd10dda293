"""One module over the ranks of a pipeline, by holes: the root stays one object with its names, and each rank drops what
is not its own.

A stage runs the root's own forward. What lies before its blocks and is another stage's is a `Stub` that gives tensors
without data; other stages' blocks are `Hole`s that pass them on; the stage's first block gets the received hidden
tensor in their place, and after its last one forward ends. So masks and rotary tables are computed on every stage, by
the model's own code. Whatever a stage cannot know (a value that depends on data of another stage) has no data either,
so that it is an error where it would be used, never a wrong number.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from shardwise.errors import ModelError
from shardwise.parallel.outline import SPLIT_FIX, Outline, Place, Tie, outline, ties_across
from shardwise.plan.schedules import Sizes
from shardwise.torch_private import active_without_data, lacks_data, tree_leaves, without_data


class Split(nn.Module):
    """A model as three parts, for one whose own forward cannot be cut.

    `before(*args, **kwargs)` of the batch's inputs gives the hidden tensor, each block takes and gives it, and
    `after(hidden)` gives the outputs. Trained and evaluated like any module, on one rank or many.
    """

    def __init__(
        self, before: Callable[..., torch.Tensor], blocks: Sequence[nn.Module], after: Callable[[torch.Tensor], Any]
    ) -> None:
        super().__init__()
        self.before, self.blocks, self.after = before, nn.ModuleList(blocks), after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.before(*args, **kwargs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.after(hidden)


class _NotOnThisStage(ModelError, AttributeError):
    """Also an AttributeError, so that `hasattr` says no."""


class _BlocksPassed(Exception):
    """Ends the root's forward behind a stage's last block."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


_imagined = [0]


@contextmanager
def imagined() -> Iterator[None]:
    """Around what is computed for its shapes alone, without data: a dry run, which counts bytes, leaves it out."""
    _imagined[0] += 1
    try:
        yield
    finally:
        _imagined[0] -= 1


def is_imagined() -> bool:
    return _imagined[0] > 0


class Passage:
    """The forward that is under way in a root, for the holes, stubs and gates in it."""

    def __init__(self, root: nn.Module, ties: Sequence[Tie]) -> None:
        self.root = (root,)  # in a tuple: a Module attribute would make it a child
        self.tied = {name: tie.names for tie in ties for name in tie.names}
        self.own_mode: Any = without_data()
        self.mode: Any = self.own_mode
        self.in_tuples: bool | None = None  # whether blocks give (hidden, ...): learned at the first junction
        self.stage: Stage | None = None
        self.received: torch.Tensor | None = None
        self.expected: Any = None
        self.entered = False

    def unknown(self, values: Any) -> bool:
        """Whether another stage's data went into any of these; a dry run, where nothing has data, cannot tell."""
        return self.mode is self.own_mode and any(lacks_data(leaf, self.mode) for leaf in tree_leaves(values))

    def copy_here(self, name: str) -> torch.Tensor | None:
        """What is tied to `name` and lies on this rank; None where nothing does. Raises: ModelError if it is untied."""
        if name not in self.tied:
            raise _NotOnThisStage(
                f"{name} is used outside its module's forward, on a rank of the pipeline that does not hold it.",
                why="a stage holds its own blocks and modules only",
                fix="give the place that uses it a module of its own, and tie the two weights (head.weight = "
                f"embedding.weight); or {SPLIT_FIX}",
            )
        here = dict(self.root[0].named_parameters(remove_duplicate=False))
        return next((here[other] for other in self.tied[name] if other in here), None)


class Hole(nn.Module):
    """In a block's place on other stages. `forward(hidden, ...)` gives another tensor of its shape, without data."""

    def __init__(self, passage: Passage, path: str) -> None:
        super().__init__()
        self.passage, self.path = passage, path
        self.cached: dict[tuple[Any, ...], torch.Tensor] = {}

    def forward(self, *args: Any, **_kwargs: Any) -> Any:
        passage = self.passage
        if passage.stage is None or passage.entered or not args or not isinstance(args[0], torch.Tensor):
            raise _unstaged(self.path, "its blocks do not run once each, in their order, hidden tensor first")
        key = (args[0].shape, args[0].dtype, args[0].device, passage.mode)
        if key not in self.cached:
            self.cached.clear()
            with passage.mode, imagined(), torch.no_grad():
                self.cached[key] = torch.empty(key[0], dtype=key[1], device=key[2])
        passage.expected = self.cached[key]
        return (passage.expected,) if passage.in_tuples else passage.expected


class Stub(nn.Module):
    """In the place of a module of the first or the last stage: runs its forward without parameters and data."""

    def __init__(self, passage: Passage, place: Place, module: nn.Module, *, before: bool) -> None:
        super().__init__()
        self.passage, self.path, self.before = passage, place.path, before
        tensors = [*module.parameters(), *module.buffers()]
        # A copy on meta: tensors that deepcopy finds in its memo are not copied. In a tuple: it is no child.
        memo: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in tensors}
        memo.update({id(p): nn.Parameter(memo[id(p)], requires_grad=False) for p in module.parameters()})
        self.shell = (copy.deepcopy(module, memo),)
        self.cached: tuple[Any, Any] = (None, None)  # the last inputs' shapes, and its output for them
        self.absent = {name.split(".")[0] for name, _ in [*module.named_parameters(), *module.named_buffers()]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.passage.stage is None or self.passage.entered or not self.before:
            raise ModelError(
                f"{self.path} runs {'after' if self.before else 'before'} the blocks, and is registered "
                f"{'before' if self.before else 'after'} them.",
                why="a pipeline gives what is registered before the blocks to its first stage, the rest to its last",
                fix=f"assign the modules in __init__ in the order in which forward runs them, each on one side of the "
                f"blocks; or {SPLIT_FIX}",
            )
        key = self._seen(args, kwargs)
        if key is None or key != self.cached[0]:
            self.cached = (key, self._without_data(args, kwargs))
        return self.cached[1]

    def _seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """All that an output without data depends on; None where that cannot be told by tensors alone."""
        values = [*args, *kwargs.values()]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return None
        return self.passage.mode, tuple(kwargs), *((v.shape, v.dtype, v.device) for v in values)

    def _without_data(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        shell = self.shell[0]
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        with self.passage.mode, imagined(), torch.no_grad():
            tensors = {
                name: torch.empty(t.shape, dtype=t.dtype, device=device)
                for name, t in [*shell.named_parameters(), *shell.named_buffers()]
            }
            return functional_call(shell, tensors, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__.get("absent", ()):
                return self.passage.copy_here(f"{self.path}.{name}")
            raise


class Gate(nn.Module):
    """Around a stage's first and last block, while the stage runs."""

    def __init__(self, passage: Passage, path: str, block: nn.Module, *, enters: bool, leaves: bool) -> None:
        super().__init__()
        self.passage, self.path, self.block = passage, path, (block,)
        self.enters, self.leaves = enters, leaves

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.enters:
            args = self._entered(args, kwargs)
        self.passage.entered = True
        outputs = self.block[0](*args, **kwargs)
        if not self.leaves:
            return outputs
        hidden = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            raise _unstaged(self.path, f"it gives {type(hidden).__name__} and no hidden tensor first")
        if self.passage.unknown(hidden):
            raise _unstaged(self.path, "it uses something that another stage computes")
        raise _BlocksPassed(hidden)

    def _entered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        passage = self.passage
        if passage.stage is None or passage.entered:
            raise _unstaged(self.path, "it runs more than once in a forward")
        if not args or args[0] is not passage.expected:
            raise _unstaged(
                self.path, "its input is not what the block before it gives: something lies between the two"
            )
        if passage.unknown((args[1:], dict(kwargs))):
            raise _unstaged(self.path, "beside the hidden tensor it takes something that another stage computes")
        return (passage.received, *args[1:])


def _unstaged(path: str, why: str) -> ModelError:
    return ModelError(
        f"The model cannot be cut into stages at {path}.",
        why=f"{why}; one tensor crosses between stages, and all else must come from the batch",
        fix=SPLIT_FIX,
    )


class Stage(nn.Module):
    """One part of a root: `forward(received, args, kwargs)` gives its hidden tensor, or the outputs on the last stage.

    `args` and `kwargs` are the root's own inputs, the same batch's on every stage; `received` is what the stage before
    gave, None on the first. Its children are its blocks and modules, so that they can be wrapped as one unit; the root
    is none of them.
    """

    def __init__(self, passage: Passage, index: int, count: int) -> None:
        super().__init__()
        self.passage, self.index, self.count = passage, index, count
        self.first, self.last = index == 0, index == count - 1
        self.during: list[tuple[Place, nn.Module]] = []  # what stands where while this stage runs

    def forward(
        self, received: torch.Tensor | None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raises: ModelError for a model that cannot be cut."""
        passage = self.passage
        if passage.in_tuples is not None or self.first:
            return self._run(received, args, kwargs or {})
        try:
            passage.in_tuples = False
            return self._run(received, args, kwargs or {})
        except ModelError as error:
            if passage.entered:
                raise
            # Blocks may give (hidden, ...): tried once, and nothing of this stage has run yet.
            try:
                passage.in_tuples = True
                return self._run(received, args, kwargs or {})
            except ModelError:
                passage.in_tuples = None
                raise error from None

    def _run(self, received: torch.Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._active(received):
            try:
                outputs = self.passage.root[0](*args, **kwargs)
            except _BlocksPassed as passed:
                return passed.hidden
            except ModelError:
                raise
            except Exception as error:
                if self.passage.entered or self.first:
                    raise
                raise _unstaged(
                    self._first_block(), f"what runs before it failed without its data: {type(error).__name__}: {error}"
                ) from error
        if not self.last:
            raise _unstaged(self._first_block(), "forward ended before the stage's last block")
        if self.passage.unknown(outputs):
            raise _unstaged("its outputs", "they use something that another stage computes")
        return outputs

    @contextmanager
    def _active(self, received: torch.Tensor | None) -> Iterator[None]:
        passage = self.passage
        passage.stage, passage.received, passage.expected, passage.entered = self, received, None, False
        passage.mode = active_without_data() or passage.own_mode
        # What stands there now: a later pass may have wrapped it.
        at_rest = [getattr(place.parent, place.name) for place, _ in self.during]
        for (place, module), rests in zip(self.during, at_rest, strict=True):
            if isinstance(module, Gate):
                module.block = (rests,)
            place.put(module)
        try:
            yield
        finally:
            for (place, _), rests in zip(self.during, at_rest, strict=True):
                place.put(rests)
            passage.stage = passage.received = passage.expected = None  # `entered` stays: an error asks for it

    def _first_block(self) -> str:
        return next(module.path for _, module in self.during if isinstance(module, Gate) and module.enters)


def split(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    stages: int,
    mine: Sequence[int],
    sizes: Sizes = "even",
) -> tuple[Stage, ...]:
    """Cut `module` into stages, in place: it keeps its names and loses what the stages `mine` do not hold.

    Calling it afterwards is a ModelError; a Stage runs it. Works on a module on meta. Raises: ModelError.
    """
    plan = outline(module, blocks, stages, sizes)
    passage = Passage(module, ties_across(module, blocks, stages, sizes))
    whole = {place: getattr(place.parent, place.name) for place in plan.places}
    absent: dict[Place, nn.Module] = {place: Hole(passage, place.path) for place in plan.blocks}
    for side in (plan.before, plan.after):
        absent.update({place: Stub(passage, place, whole[place], before=side is plan.before) for place in side})
    at_rest = {place: whole[place] if place.stage in mine else absent[place] for place in plan.places}
    for place, part in at_rest.items():
        place.put(part)
    module.register_forward_pre_hook(_only_through_a_stage(passage))
    return tuple(_stage(passage, plan, index, stages, at_rest, absent) for index in mine)


def _stage(
    passage: Passage, plan: Outline, index: int, count: int,
    at_rest: Mapping[Place, nn.Module], absent: Mapping[Place, nn.Module],
) -> Stage:  # fmt: skip
    stage = Stage(passage, index, count)
    own = [place for place in plan.blocks if place.stage == index]
    during = {place: at_rest[place] if place.stage == index else absent[place] for place in plan.places}
    for place in plan.places:
        if place.stage == index:
            stage.add_module(place.path.replace(".", "/"), at_rest[place])
    for place in {own[0], own[-1]}:
        enters, leaves = place is own[0] and index > 0, place is own[-1] and index < count - 1
        during[place] = Gate(passage, place.path, at_rest[place], enters=enters, leaves=leaves)
    stage.during = [(place, module) for place, module in during.items() if module is not at_rest[place]]
    return stage


def _only_through_a_stage(passage: Passage) -> Callable[[nn.Module, Any], None]:
    def refuse(_module: nn.Module, _args: Any) -> None:
        if passage.stage is None:
            raise ModelError(
                "The model is cut into the stages of a pipeline, and was called as a whole.",
                why="this rank holds a part of it",
                fix="sw.forward_backward(model, micros, loss) to train, trainer.evaluate(data) to evaluate",
            )

    return refuse
