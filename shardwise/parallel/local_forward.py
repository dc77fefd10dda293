"""A module's forward with this rank's part of its weights, and what is known while it runs.

`Around` stands in the place of `module.forward`. What several of them must know of the forward that is under way is
one `Course` a module: the length of the sequence, the regions that are being crossed, which whole weights saw a part
of the work.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import ModelError
from shardwise.parallel.foreign_weights import foreign, is_mixed
from shardwise.torch_private import parameter_slots

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Replaced = Callable[[Any], Inputs]


class Crossing:
    """One call of a region: whole up to its column layers, split from there to its row layer, whole after it.

    entered: inputs of column layers, and what they became. weights: the autograd node of each local weight, by name.
    """

    def __init__(self, path: str, here: int) -> None:
        self.path, self.here, self.length = path, here, 0
        self.entered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weights: dict[Any, str] = {}
        self.partial: set[str] = set()
        self.open = False  # between the column layers and the row layer
        self.shared: list[tuple[torch.device, torch.Tensor]] = []
        self.at_entry: list[tuple[torch.device, torch.Tensor]] = []

    def draw_apart(self, device: torch.device) -> None:
        """From here on this rank draws from a stream of its own, a function of the shared one.

        What is split must be dropped each part by itself. The shared stream moves on by one draw on all ranks alike, so
        that a recomputed forward finds it again.
        """
        if self.shared:
            return
        seed = int(torch.randint(0, 2**62, ()))
        self.shared = random_states(device)
        torch.manual_seed((seed + self.here + 1) % 2**63)

    def draw_alike(self) -> None:
        """Back to the shared stream: what is whole on every rank must be dropped alike."""
        for device, state in self.shared:
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
        self.shared = []


def random_states(device: torch.device) -> list[tuple[torch.device, torch.Tensor]]:
    states = [(torch.device("cpu"), torch.get_rng_state())]
    return [*states, (device, torch.cuda.get_rng_state(device))] if device.type == "cuda" else states


class Course:
    """What is known of the forward under way, and which whole weights' gradients are parts of a sum over the ranks.

    sequence: whether activations between regions are split by position. split: names of weights that are cut.
    outer: those of no block. first_names: of every name of a weight, its first. partial: first names, without sequence
    parallel as they are found.
    """

    def __init__(
        self, mesh: DeviceMesh, *,
        sequence: bool, split: Collection[str], outer: Collection[str], first_names: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.mesh, self.group, self.here, self.ranks = mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.sequence, self.split, self.outer, self.first_names = sequence, split, outer, first_names
        # Under sequence parallel every whole weight sees this rank's positions only.
        self.partial = {first for name, first in first_names.items() if name not in split} if sequence else set()
        self.alike: set[str] = set()
        self.crossings: list[Crossing] = []
        self.length: int | None = None  # None: positions divide by the ranks
        self.lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by a block's input, for recompute
        self.walked: set[tuple[str, frozenset[str]]] = set()
        self.past_head = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Course":
        return self  # a copied module (an average of weights) computes on the same ranks

    def begin(self, *_: Any) -> None:
        """The root, before its forward: of a pipeline's stage too, the embedding's or not."""
        self.past_head = False

    def whole_length(self, here: int) -> int:
        """The true number of positions of which this rank holds `here`, those that fill up included."""
        if self.length is None:
            return here * self.ranks
        if -(-self.length // self.ranks) != here:
            raise ModelError(
                f"A split module was given {here} positions, and {self.length} token ids over {self.ranks} ranks "
                f"are {-(-self.length // self.ranks)} each.",
                why="sequence parallel needs what lies between the split modules to keep every position",
                fix="model.sequence_parallel = false",
            )
        return self.length

    def crossing(self, region: str, layer: str) -> Crossing:
        """The call of `region` under way. Raises: ModelError where the layer is used outside it."""
        if not self.crossings or self.crossings[-1].path != region:
            raise ModelError(
                f"{layer} is split, and used outside the forward of {region or 'the model'}.",
                why="what column layers split, the row layer of the same module adds up again in its forward",
                fix=f"model.roles = {{ {layer!r} = 'replicated' }}, and so for the layers beside it",
            )
        return self.crossings[-1]

    def used(self, name: str, part: torch.Tensor) -> None:
        """A weight is about to be used by this rank. Raises: ModelError where its gradient would be neither."""
        name = self.first_names.get(name, name)
        if self.sequence:
            if self.past_head and name in self.outer and name in self.partial:
                raise ModelError(
                    f"{name} is used behind the head.",
                    why="under sequence parallel its gradient would be summed over ranks that all have it whole",
                    fix="model.sequence_parallel = false",
                )
        elif part.grad_fn is not None:
            if self.crossings:
                self.crossings[-1].weights[part.grad_fn] = name
            elif name not in self.split:
                self.settle(name, partial=False)

    def settle(self, name: str, *, partial: bool) -> None:
        """Raises: ModelError for a weight that is used whole in one place and in part in another."""
        (self.partial if partial else self.alike).add(name)
        if name in self.partial and name in self.alike:
            raise ModelError(
                f"{name} is used both where every rank computes alike and between split layers.",
                why="its gradient is whole in the one place and a part of a sum in the other",
                fix="give each place a weight of its own, or the layers around one of them the role 'replicated'",
            )

    def walk(self, crossing: Crossing, split: torch.Tensor) -> None:
        """Find out which weights went into what the row layer gets, without having passed a column layer's input.

        Their gradients are parts. Raises: ModelError where anything else did, whose gradient nobody would sum.
        """
        key = (crossing.path, frozenset(crossing.weights.values()))
        if split.grad_fn is None:
            return
        if key in self.walked:
            crossing.partial |= self.partial
            return
        entered = {copied.grad_fn for _, copied in crossing.entered}
        stack, seen = [split.grad_fn], set()
        while stack:
            node: Any = stack.pop()
            if node in seen or node in entered:
                continue
            seen.add(node)
            if node in crossing.weights:
                crossing.partial.add(crossing.weights[node])
                continue
            if hasattr(node, "variable"):
                raise ModelError(
                    f"{crossing.path or 'The model'} uses a trained value between its split layers that comes to it "
                    "from outside, or not through its column layers.",
                    why="each rank's gradient of it would be a part, and nothing sums them",
                    fix="the role 'replicated' for the layers of this module",
                )
            stack += [following for following, _ in node.next_functions if following is not None]
        self.walked.add(key)


class Around:
    """In the place of a module's forward: its weights are this rank's parts while it runs.

    `within`: modules whose own weights it reads without calling them.
    """

    def __init__(self, module: nn.Module, path: str, course: Course, within: tuple[nn.Module, ...] = ()) -> None:
        self.forward = module.forward
        self.owners = (module, *within)  # in a tuple: as an attribute of a module it would be its child
        self.path, self.course = path, course
        self.__signature__ = inspect.signature(module.forward)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.hidden = next((p.name for p in self.__signature__.parameters.values() if p.kind in positional), "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.before(args, kwargs)
        masters = [
            (parameter_slots(owner), name, p)
            for owner in self.owners
            for name, p in parameter_slots(owner).items()
            if isinstance(p, DTensor)
        ]
        try:
            for slots, name, master in masters:
                slots[name] = self.local(name, master)
            outputs = self.forward(*args, **kwargs)
        except RuntimeError as error:
            if is_mixed(error):
                raise foreign(self.path) from error
            raise
        finally:
            for slots, name, master in masters:
                slots[name] = master
        return self.after(outputs)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        return args, kwargs

    def local(self, name: str, master: DTensor) -> torch.Tensor | None:
        part = master.to_local()
        self.course.used(f"{self.path}.{name}" if self.path else name, part)
        return part

    def after(self, outputs: Any) -> Any:
        return outputs

    def first_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Replaced]:
        """The hidden tensor, forward's first argument, and a function that gives the inputs with another in its place.

        Raises: ModelError where there is none.
        """
        found = args[0] if args else kwargs.get(self.hidden)
        if not isinstance(found, torch.Tensor):
            raise ModelError(
                f"{self.path or 'The model'} is split, and was called with {type(found).__name__} for its first "
                f"argument{f' ({self.hidden})' if self.hidden else ''}.",
                why="the first argument of a split module is the hidden tensor",
                fix="give it first, or the module's layers the role 'replicated'",
            )

        def replaced(tensor: Any) -> Inputs:
            return ((tensor, *args[1:]), kwargs) if args else ((), {**kwargs, self.hidden: tensor})

        return found, replaced
