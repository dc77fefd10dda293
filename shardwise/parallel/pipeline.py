"""A pipeline's forwards and backwards on this rank: its schedule's table, and the messages between the stages.

Between two ranks lies one channel each way. Both know from the tables in which order messages pass, so that a channel
needs no tags, and a receiver that wants a later one keeps the earlier ones. A send never waits for its receiver; its
tensor is let go where the tables' common clock says that it was taken.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from shardwise import ranks
from shardwise.errors import ModelError, PlanInfeasible
from shardwise.launch.heartbeat import waiting
from shardwise.parallel.device_mesh import Mesh
from shardwise.parallel.staging import Stage
from shardwise.plan import schedules
from shardwise.plan.schedules import Action, Message, Span, Table
from shardwise.torch_private import backward_to_input, backward_to_weights, tree_leaves, unsafe_view

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMS = 14

Call = Callable[[Stage, int, torch.Tensor | None], torch.Tensor | None]
BeforeBackward = Callable[[int, bool], None]
Signature = Callable[[int], Hashable]


class Shape(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    size: tuple[int, ...]
    dtype: torch.dtype


def signature_of(batch: Any) -> Hashable:
    """The shapes and dtypes of a batch's tensors: where they are equal, so are the shapes of the hidden tensors."""
    return tuple((tuple(t.shape), t.dtype) for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


class Wire:
    """Tensors between this rank and the others of its pipeline, in order; by coordinates on the pipeline's axis.

    Each direction has a group of its own: a backend with one queue a pair of ranks would else wait crosswise.
    Making one is collective over the pipeline's ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.here, up = mesh.index("pp"), mesh.group("pp")
        self.ranks: list[int] = dist.get_process_group_ranks(up)
        # Only members call it: the pipelines of other data-parallel coordinates do the same for themselves.
        self.groups = {True: up, False: dist.new_group(self.ranks, use_local_synchronization=True)}

    def send(self, tensor: torch.Tensor, receiver: int) -> Any:
        return dist.isend(tensor, self.ranks[receiver], self.groups[receiver > self.here])

    def receive(self, tensor: torch.Tensor, sender: int) -> Any:
        return dist.irecv(tensor, self.ranks[sender], self.groups[self.here > sender])

    def send_shape(self, shape: Shape, receiver: int) -> tuple[Any, torch.Tensor]:
        """Through the CPU where the backend allows it, so that no device is waited for."""
        words = [DTYPES.index(shape.dtype), len(shape.size), *shape.size, *[0] * (MOST_DIMS - len(shape.size))]
        header = torch.tensor(words, dtype=torch.int64, device=ranks.wire_device())
        return self.send(header, receiver), header

    def receive_shape(self, sender: int) -> Shape:
        header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=ranks.wire_device())
        with waiting(f"shape from rank {self.ranks[sender]}"):
            self.receive(header, sender).wait()
        dtype, dims, *size = header.tolist()
        return Shape(tuple(size[:dims]), DTYPES[dtype])


class Route(NamedTuple):
    """All that the tables say before a step begins."""

    tables: tuple[Table, ...]
    clock: dict[Action, Span]
    channels: dict[tuple[int, int], tuple[Message, ...]]


class Pipeline:
    """This rank's stages, and the runs through them.

    first, last: whether this rank holds the first stage, the last one. Making one is collective over the pipeline.
    """

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, schedule: str, stages_per_rank: int) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.schedule, self.stages_per_rank = schedule, stages_per_rank
        self.pp, self.here = mesh.degree("pp"), mesh.index("pp")
        self.count = self.pp * stages_per_rank
        self.first, self.last = 0 in self.stages, self.count - 1 in self.stages
        self.wire = Wire(mesh)
        self.device = ranks.device()
        self.routes: dict[tuple[int, bool], Route] = {}
        self.shapes: dict[Hashable, Shape] = {}  # of hidden tensors, by receiving stage, signature and mode

    def train(
        self, count: int, call: Call, before_backward: BeforeBackward, signature: Signature | None = None
    ) -> None:
        """Forward and backward of `count` micro-batches, in the schedule's order; gradients add up in `.grad`.

        `call(stage, micro, received)` gives the hidden tensor, or the scalar to differentiate on the last stage.
        `before_backward(stage, last)` comes right before each backward of a stage; `last`: none follows in this step.
        `signature(micro)`: equal for micro-batches of equal shapes, the same on every rank; a shape then crosses once
        for each, and without it with every tensor.
        Collective over the pipeline. Raises: PlanInfeasible for a number of micro-batches that the schedule cannot run.
        """
        _Run(self, self._route(count, training=True), call, before_backward, signature).run()

    @torch.no_grad()
    def forward_only(self, count: int, call: Call, signature: Signature | None = None) -> None:
        """Forward alone, of any number of micro-batches; `call` gives None on the last stage. Collective."""
        _Run(self, self._route(count, training=False), call, None, signature).run()

    def _route(self, count: int, *, training: bool) -> Route:
        if training and self.schedule in schedules.SPLIT_BACKWARD:
            self._refuse_sharded_stages()
        if (count, training) not in self.routes:
            shape = (self.schedule, self.pp, self.stages_per_rank, count)
            if training and (problem := schedules.requires(*shape)):
                raise PlanInfeasible(f"{count} micro-batches: {problem}.", fix=f"accumulation = {self.pp * 2}")
            tables = schedules.actions(*shape) if training else schedules.forward_actions(*shape)
            channels = schedules.channels(tables, self.schedule, self.count)
            self.routes[count, training] = Route(tables, schedules.timeline(tables, self.count), channels)
        return self.routes[count, training]

    def _refuse_sharded_stages(self) -> None:
        if any(isinstance(inner, FSDPModule) for stage in self.stages.values() for inner in stage.modules()):
            raise PlanInfeasible(
                f"{self.schedule} with a sharded stage.",
                why="its backward to the weights runs none of the hooks by which sharded gradients are reduced",
                fix='train.plan.schedule = "1f1b", or dp_replicate in place of dp_shard',
            )

    def shares_weights(self) -> bool:
        """Whether two of this rank's stages hold one parameter."""
        seen = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        return len(seen) != len(set(seen))


class _Held:
    """A micro-batch in a stage between its forward and its backward."""

    def __init__(self, received: torch.Tensor | None, output: torch.Tensor) -> None:
        self.received, self.output = received, output
        self.gradient: torch.Tensor | None = None
        self.rest: list[Any] = []


class _Run:
    """One run of micro-batches through this rank's stages. Dropped afterwards, with all that it held."""

    def __init__(
        self, pipeline: Pipeline, route: Route, call: Call, before_backward: BeforeBackward | None,
        signature: Signature | None,
    ) -> None:  # fmt: skip
        self.pipeline, self.route, self.wire = pipeline, route, pipeline.wire
        self.call, self.before_backward, self.signature = call, before_backward, signature
        self.table = route.tables[pipeline.here]
        self.coming = {a: deque(route.channels[a, b]) for a, b in route.channels if b == pipeline.here}
        self.inbox: dict[Message, tuple[Any, torch.Tensor]] = {}
        self.held: dict[tuple[int, int], _Held] = {}
        self.sent: deque[tuple[int, Any, torch.Tensor]] = deque()
        self.final = self._final_backwards()

    def run(self) -> None:
        do = {"F": self._forward, "B": self._backward, "I": self._to_input, "W": self._to_weights}
        for action in self.table:
            self._let_go(self.route.clock[action].start - 2 * self.pipeline.count)
            do[action.kind](action, self.pipeline.stages[action.stage])
        for _, work, _ in self.sent:
            work.wait()

    def _final_backwards(self) -> set[Action]:
        """The last announced backward of each stage; of all stages where they share a weight."""
        announced = [a for a in self.table if a.kind == "B" or a.kind == ("I" if a.stage > 0 else "W")]
        if self.pipeline.shares_weights():
            return set(announced[-1:])
        return set({a.stage: a for a in announced}.values())

    def _announce(self, action: Action) -> None:
        if self.before_backward is not None:
            self.before_backward(action.stage, action in self.final)

    # The four actions.

    def _forward(self, action: Action, stage: Stage) -> None:
        received = None
        if not stage.first:
            received = self._take(action).detach()
            received.requires_grad_(self.before_backward is not None)
        # A leaf may not be changed in place, and a block's first layer may do that with its input.
        given = unsafe_view(received, tuple(received.shape)) if received is not None else None
        output = self.call(stage, action.micro, given)
        if self.before_backward is not None:
            self.held[action.stage, action.micro] = _Held(received, output)
        if not stage.last:
            self._give(action, output.detach())

    def _backward(self, action: Action, stage: Stage) -> None:
        gradient = None if stage.last else self._take(action)
        held = self.held.pop((action.stage, action.micro))
        self._announce(action)
        if held.output.requires_grad:
            torch.autograd.backward(held.output, gradient)
        if held.received is not None:
            self._give(action, _gradient_of(held.received))

    def _to_input(self, action: Action, stage: Stage) -> None:
        held = self.held[action.stage, action.micro]
        held.gradient = None if stage.last else self._take(action)
        if held.received is None:
            return  # the first stage: nobody waits for it, and its whole backward comes with the weights
        self._announce(action)
        held.rest = backward_to_input(held.output, held.gradient, held.received, _weights(stage))
        held.output = held.gradient = None
        self._give(action, _gradient_of(held.received))
        held.received.grad = None

    def _to_weights(self, action: Action, stage: Stage) -> None:
        held = self.held.pop((action.stage, action.micro))
        if held.received is not None:
            backward_to_weights(_weights(stage), held.rest)
            return
        self._announce(action)
        if held.output.requires_grad:
            torch.autograd.backward(held.output, held.gradient)

    # Messages.

    def _give(self, action: Action, tensor: torch.Tensor) -> None:
        message = schedules.sent_by(action, self.pipeline.count)
        receiver = self._rank_of(message.stage)
        if receiver == self.pipeline.here:
            self.inbox[message] = (None, tensor.clone())  # the stage that made it may need it as it was
            return
        taken = self._taken_at(message)
        if message.kind == "hidden" and self._shape_is_news(message, tensor):
            self.sent.append((taken, *self.wire.send_shape(Shape(tuple(tensor.shape), tensor.dtype), receiver)))
        tensor = tensor.contiguous()
        self.sent.append((taken, self.wire.send(tensor, receiver), tensor))

    def _take(self, action: Action) -> torch.Tensor:
        message = schedules.taken_by(action, self.pipeline.count)
        sender = self._rank_of(message.stage + (-1 if message.kind == "hidden" else 1))
        while message not in self.inbox:
            self._receive_next(sender)
        work, tensor = self.inbox.pop(message)
        if work is not None:
            with waiting(f"{message.kind} of stage {message.stage}, micro-batch {message.micro}"):
                work.wait()
            # The next one of the channel crosses while this one is worked on.
            if self.coming[sender] and self._known_shape(self.coming[sender][0]) is not None:
                self._receive_next(sender)
        return tensor

    def _receive_next(self, sender: int) -> None:
        message = self.coming[sender].popleft()
        shape = self._known_shape(message)
        if shape is None:
            shape = self.wire.receive_shape(sender)
            if self.signature is not None:
                self.pipeline.shapes[self._key(message)] = shape
        tensor = torch.empty(shape.size, dtype=shape.dtype, device=self.pipeline.device)
        self.inbox[message] = (self.wire.receive(tensor, sender), tensor)

    def _known_shape(self, message: Message) -> Shape | None:
        """A gradient has its hidden tensor's shape, once that is there; a hidden tensor the shape that crossed."""
        if message.kind == "gradient":
            held = self.held.get((message.stage, message.micro))
            return Shape(tuple(held.output.shape), held.output.dtype) if held is not None else None
        return self.pipeline.shapes.get(self._key(message)) if self.signature is not None else None

    def _shape_is_news(self, message: Message, tensor: torch.Tensor) -> bool:
        """Whether the receiver waits for a shape first. Raises: ModelError."""
        shape = Shape(tuple(tensor.shape), tensor.dtype)
        if shape.dtype not in DTYPES or len(shape.size) > MOST_DIMS:
            raise ModelError(
                f"Stage {message.stage - 1} gives a {shape.dtype} tensor of {len(shape.size)} dims to the next one.",
                fix=f"{', '.join(map(str, DTYPES))} can cross, with at most {MOST_DIMS} dims",
            )
        if self.signature is None:
            return True
        known = self.pipeline.shapes.setdefault(self._key(message), shape)
        if known is not shape and known != shape:
            raise ModelError(
                f"Stage {message.stage - 1} gives {shape.size}, and gave {known.size} for a batch of the same shapes.",
                why="the next stage takes a hidden tensor's shape from the batch's",
                fix="make the hidden tensor's shape depend on the batch's shapes alone",
            )
        return known is shape

    def _key(self, message: Message) -> Hashable:
        signature = self.signature(message.micro) if self.signature is not None else None
        return message.stage, self.before_backward is None, signature

    def _let_go(self, now: int) -> None:
        """Drop what was taken before `now` on the tables' clock. Waiting for it cannot block for ever: an action of the
        receiver that comes earlier on that clock waits for nothing that comes later."""
        while self.sent and self.sent[0][0] <= now:
            self.sent.popleft()[1].wait()

    def _taken_at(self, message: Message) -> int:
        kinds = "F" if message.kind == "hidden" else "BI"
        actions = (Action(kind, message.stage, message.micro) for kind in kinds)
        return next(self.route.clock[action].end for action in actions if action in self.route.clock)

    def _rank_of(self, stage: int) -> int:
        return schedules.rank_of_stage(self.pipeline.schedule, stage, self.pipeline.pp)


def _weights(stage: Stage) -> list[torch.nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


def _gradient_of(received: torch.Tensor) -> torch.Tensor:
    return received.grad if received.grad is not None else torch.zeros_like(received)
