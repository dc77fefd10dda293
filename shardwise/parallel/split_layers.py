"""What each kind of split layer does around its forward: regions with their column and row layers, embedding, head."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import ModelError
from shardwise.parallel.collectives import Copied, Gathered, Joined, Scattered, Summed
from shardwise.parallel.local_forward import Around, Course, Crossing, Inputs, random_states


def shares(size: int, ranks: int) -> tuple[int, ...]:
    """The sizes of each rank's part of a dim, by torch.chunk's rule."""
    share = -(-size // ranks)
    return tuple(max(0, min(share, size - rank * share)) for rank in range(ranks))


class InBlock(Around):
    """A block under sequence parallel: when it runs again in backward, the sequence's length is that of its input."""

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        found = args[0] if args else kwargs.get(self.hidden)
        if isinstance(found, torch.Tensor) and torch.is_grad_enabled():
            course = self.course
            course.length = course.lengths.setdefault(found, course.length)
        return args, kwargs


class InRegion(Around):
    """Under sequence parallel all positions are gathered at its entry; else nothing is done here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        course, crossing = self.course, Crossing(self.path, self.course.here)
        course.crossings.append(crossing)
        try:
            outputs = super().__call__(*args, **kwargs)
        except RuntimeError as error:
            if course.sequence and "size" in str(error):
                error.add_note(
                    f"Under sequence parallel {self.path or 'the model'} is given all positions and gives this rank's: "
                    "the two cannot be added. model.sequence_parallel = false splits its weights alone."
                )
            raise
        finally:
            crossing.draw_alike()
            course.crossings.pop()
        if crossing.open:
            raise ModelError(
                f"{self.path or 'The model'} ends between its split layers: its row layer did not run after them.",
                why="what column layers give is a part on each rank until the row layer adds it up",
                fix="the role 'replicated' for the layers of this module",
            )
        for name in crossing.weights.values():
            if name not in course.split:
                course.settle(name, partial=name in crossing.partial)
        return outputs

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        course = self.course
        if not course.sequence:
            return args, kwargs
        x, _ = self.first_tensor(args, kwargs)
        crossing = course.crossings[-1]
        crossing.length = course.whole_length(x.shape[1])
        crossing.at_entry = random_states(x.device) if self.owners[0].training else []
        gathered: dict[int, torch.Tensor] = {}

        def whole(value: Any) -> Any:
            # A query, a key and a value: every tensor like the first; what comes twice crosses once.
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape != x.shape:
                return value
            if id(value) not in gathered:
                gathered[id(value)] = Gathered.apply(value, course.group, crossing.length)
            return gathered[id(value)]

        return tuple(whole(value) for value in args), {key: whole(value) for key, value in kwargs.items()}

    def after(self, outputs: Any) -> Any:
        course = self.course
        hidden = outputs[0] if isinstance(outputs, tuple | list) else outputs
        if course.sequence and hidden.shape[1] != -(-course.crossings[-1].length // course.ranks):
            raise ModelError(
                f"{self.path or 'The model'} gives {hidden.shape[1]} positions, and its row layer "
                f"{-(-course.crossings[-1].length // course.ranks)} to each rank.",
                why="under sequence parallel its inputs have all positions: they cannot be added to its outputs",
                fix="model.sequence_parallel = false",
            )
        return outputs


class Column(Around):
    """Its outputs are this rank's. `parts`: of a fused layer that every rank holds whole, the sizes of its pieces."""

    def __init__(self, module: nn.Module, path: str, course: Course, region: str, parts: tuple[int, ...] = ()) -> None:
        super().__init__(module, path, course)
        self.region, self.parts = region, parts

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        crossing = self.course.crossing(self.region, self.path)
        x, replaced = self.first_tensor(args, kwargs)
        return replaced(self._by_position(crossing, x) if self.course.sequence else self._copied(crossing, x))

    def _copied(self, crossing: Crossing, x: torch.Tensor) -> torch.Tensor:
        for before, copied in crossing.entered:
            if before is x:
                return copied
        made: torch.Tensor = Copied.apply(x, self.course.group)
        crossing.entered.append((x, made))
        return made

    def _by_position(self, crossing: Crossing, x: torch.Tensor) -> torch.Tensor:
        """Raises: ModelError for an input that sequence parallel does not know to be whole and alike on all ranks."""
        if x.ndim < 2 or x.shape[1] != crossing.length:
            raise ModelError(
                f"{self.path} was given shape {tuple(x.shape)}, and the sequence has {crossing.length} positions.",
                why="under sequence parallel a region gathers the positions of its first argument alone",
                fix="model.sequence_parallel = false",
            )
        now = random_states(x.device) if crossing.at_entry else []
        if any(not torch.equal(a, b) for (_, a), (_, b) in zip(crossing.at_entry, now, strict=True)):
            raise ModelError(
                f"{self.region} draws random numbers before its column layers.",
                why="under sequence parallel each rank draws its own, and here they must be alike",
                fix="model.sequence_parallel = false, or the dropout before the module instead of in it",
            )
        crossing.at_entry = []
        return x

    def local(self, name: str, master: DTensor) -> torch.Tensor | None:
        whole = super().local(name, master)
        if not self.parts or whole is None:
            return whole
        here, pieces = self.course.here, []
        for part, size in zip(whole.split(self.parts), self.parts, strict=True):
            sizes = shares(size, self.course.ranks)
            pieces.append(part.narrow(0, sum(sizes[:here]), sizes[here]))
        return torch.cat(pieces)

    def after(self, outputs: Any) -> Any:
        crossing = self.course.crossing(self.region, self.path)
        crossing.open = True
        if not self.course.sequence and self.owners[0].training:
            crossing.draw_apart(outputs.device)
        return outputs


class Row(Around):
    """Its output is the sum over the ranks; the bias is added once, after the sum."""

    def __init__(self, module: nn.Module, path: str, course: Course, region: str) -> None:
        super().__init__(module, path, course)
        self.region = region
        self.bias: list[torch.Tensor] = []

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        crossing = self.course.crossing(self.region, self.path)
        crossing.open = False
        crossing.draw_alike()
        x, _ = self.first_tensor(args, kwargs)
        if not self.course.sequence:
            self.course.walk(crossing, x)
        self.bias.clear()
        return args, kwargs

    def local(self, name: str, master: DTensor) -> torch.Tensor | None:
        part = super().local(name, master)
        if name != "bias" or part is None:
            return part
        self.bias[:] = [part]
        return None

    def after(self, outputs: Any) -> Any:
        leave = Scattered if self.course.sequence else Summed
        total: torch.Tensor = leave.apply(outputs, self.course.group)
        return total + self.bias.pop() if self.bias else total


class Beginning(Around):
    """Where token ids enter, on every stage of a pipeline, those without the embedding too. `staged`: there is one."""

    def __init__(self, module: nn.Module, path: str, course: Course, *, staged: bool) -> None:
        super().__init__(module, path, course)
        self.staged = staged

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        ids, replaced = self.first_tensor(args, kwargs)
        course = self.course
        if not course.sequence:
            return replaced(self.own_rows(ids))
        if ids.ndim < 2 or (self.staged and ids.shape[1] % course.ranks):
            raise ModelError(
                f"Token ids of shape {tuple(ids.shape)} do not divide by tp = {course.ranks} along the sequence.",
                why="sequence parallel gives each rank as many positions",
                fix="model.sequence_parallel = false, or sequences of a multiple of tp",
            )
        course.length = None if self.staged else ids.shape[1]
        return replaced(self.own_rows(ids))

    def own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return ids


class Embedding(Beginning):
    """Each rank looks up the ids of its own rows; the others are zero, and the sum is the whole."""

    def __init__(self, module: nn.Embedding, path: str, course: Course, *, staged: bool) -> None:
        super().__init__(module, path, course, staged=staged)
        sizes = shares(module.num_embeddings, course.ranks)
        self.rows = (sum(sizes[: course.here]), sum(sizes[: course.here + 1]))
        self.missing: list[torch.Tensor] = []

    def own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        begin, end = self.rows
        self.missing[:] = [(ids < begin) | (ids >= end)]
        return (ids - begin).masked_fill(self.missing[0], 0)

    def after(self, outputs: Any) -> Any:
        found = outputs.masked_fill(self.missing.pop().unsqueeze(-1), 0.0)
        leave = Scattered if self.course.sequence else Summed
        return leave.apply(found, self.course.group)


class Head(Around):
    """Each rank computes its part of the vocabulary: joined, or, where the loss takes `shards`, a DTensor."""

    def __init__(self, module: nn.Linear, path: str, course: Course, *, shards: bool) -> None:
        super().__init__(module, path, course)
        self.shards, self.sizes = shards, shares(module.out_features, course.ranks)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        x, replaced = self.first_tensor(args, kwargs)
        course = self.course
        if not course.sequence:
            return replaced(Copied.apply(x, course.group))
        return replaced(Gathered.apply(x, course.group, course.whole_length(x.shape[1])))

    def after(self, outputs: Any) -> Any:
        self.course.past_head = True
        if not self.shards:
            return Joined.apply(outputs, self.course.group, self.sizes)
        shape = (*outputs.shape[:-1], sum(self.sizes))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            outputs, self.course.mesh, [Shard(len(shape) - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        )
