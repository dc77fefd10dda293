"""Which bytes are live, of what kind, when: every storage from its birth to its death, counted once.

A `Watch` sees each operator's results, so it counts what tensors hold, on real and on fake ones
alike: no allocator's rounding, no workspace inside a kernel. What a storage is may show late (a result turns out to be
a gradient), so births and deaths are written down as they come and are added up by category at the end.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.parallel.staging import is_imagined
from shardwise.torch_private import (
    ASKS_DEVICE,
    NAMES_A_RANGE,
    READS_A_NUMBER,
    LayoutsWorkedOut,
    OperatorMode,
    below_modes,
    device_without_data,
    gathered,
    parameter_slots,
    storage_resizes,
    tree_leaves,
)
from shardwise.verify.repeats import Mark
from shardwise.verify.traffic import Traffic
from shardwise.verify.values import CATEGORIES, PHASES, LiveBytes, Phase, PhaseBytes

# Where a storage is several things, the first of these counts. Given: batches and buffers, saved for backward or not.
PRECEDENCE = ("given", "parameters", "gradients", "states", "gathered", "activations", "communication", "other")
_STANDS_AT_ITS_END = ("built", "rest")
_RANK = {kind: rank for rank, kind in enumerate(PRECEDENCE)}


class Ledger:
    """Births, resizes and deaths of storages in order, and the phases between them."""

    def __init__(self) -> None:
        self.phase: Phase = "built"
        self.changes: list[tuple[int, int]] = []  # (storage's number, bytes more or less)
        self.marks: list[tuple[int, Phase]] = [(0, "built")]  # (how many changes came before, phase)
        self.kinds: list[int] = []  # by storage's number: a position in PRECEDENCE
        self._first = 0  # of the marks that count
        self._sizes: list[int] = []
        self._numbers: dict[int, int] = {}  # of live storages, by identity
        self._watched: dict[int, weakref.ref[Any]] = {}  # the same storages: what tells of their death
        self.live = self.most = 0  # now, and the most since `most` was set back

    def enter(self, phase: Phase) -> None:
        if phase != self.phase:
            self.phase = phase
            self.marks.append((len(self.changes), phase))

    def begin(self) -> None:
        """Phases count from here on; of what came before, `built` alone."""
        self._first = len(self.marks)

    def see(self, tensor: torch.Tensor, kind: str = "other") -> None:
        """Count a tensor's storage from now on, unless it is known; `kind` counts if it comes first in PRECEDENCE."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():  # the part itself: with gradients to_local makes a view, by an operator
                tensor = tensor.to_local()
        storage, rank = tensor.untyped_storage(), _RANK[kind]
        identity = id(storage)
        number = self._numbers.get(identity)
        if number is None and tensor.device.type == "meta":
            return  # no memory anywhere
        if number is None:
            number, size = len(self.kinds), storage.nbytes()
            self._numbers[identity] = number
            self.kinds.append(rank)
            self._sizes.append(size)
            self._change(number, size)
            self._watched[identity] = weakref.ref(storage, lambda _gone: self._died(identity))
        elif rank < self.kinds[number]:
            self.kinds[number] = rank

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is counted already."""
        return id(tensor.untyped_storage()) in self._numbers

    def resized(self, storage: Any) -> None:
        number = self._numbers.get(id(storage))
        if number is not None and storage.nbytes() != self._sizes[number]:
            self._change(number, storage.nbytes() - self._sizes[number])
            self._sizes[number] = storage.nbytes()

    def _died(self, identity: int) -> None:
        del self._watched[identity]
        number = self._numbers.pop(identity)
        self._change(number, -self._sizes[number])

    def _change(self, number: int, more: int) -> None:
        self.changes.append((number, more))
        self.live += more
        if self.live > self.most:
            self.most = self.live

    def phases(self) -> tuple[PhaseBytes, ...]:
        """The fullest moment of each phase that was entered; of `built` and `rest` their last."""
        live, fullest = [0] * len(PRECEDENCE), dict[Phase, list[int]]()
        ends = [position for position, _ in self.marks[1:]] + [len(self.changes)]
        for index, ((start, phase), end) in enumerate(zip(self.marks, ends, strict=True)):
            best, top = list(live), sum(live)
            total = top
            for number, more in self.changes[start:end]:
                live[self.kinds[number]] += more
                total += more
                if total > top or phase in _STANDS_AT_ITS_END:
                    best, top = list(live), total
            if index < self._first and phase != "built":
                continue
            if phase not in fullest or top > sum(fullest[phase]) or phase in _STANDS_AT_ITS_END:
                fullest[phase] = best
        return tuple(PhaseBytes(phase, _named(fullest[phase])) for phase in PHASES if phase in fullest)


def _named(by_kind: list[int]) -> LiveBytes:
    sizes = {name: by_kind[PRECEDENCE.index(name)] for name in CATEGORIES}
    sizes["other"] += by_kind[PRECEDENCE.index("given")]
    return LiveBytes(**sizes)


class Watch(OperatorMode):
    """Writes down what operators make and what crosses between ranks, as long as it is entered.

    `number_for` answers a host read of a fake tensor's value (None: the tensor is real and is read).
    """

    def __init__(self, number_for: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.ledger, self.traffic, self.number_for = Ledger(), Traffic(), number_for
        self.marks: list[Mark] = []
        self._sharded: list[FSDPModule] = []
        self._layouts = LayoutsWorkedOut()
        self._hooked: Any = WeakIdKeyDictionary()  # tensors compare by value, so no WeakSet

    def __enter__(self) -> "Watch":
        self._layouts.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._layouts.__exit__(*error)

    def enter(self, phase: Phase) -> None:
        self.ledger.enter(phase)
        self.traffic.phase = phase

    def begin(self) -> None:
        """Forget what came before, but not what is live: the step that counts begins."""
        self.ledger.begin()
        self.traffic.calls.clear()
        self.marks.clear()
        self.enter("forward")

    def mark(self) -> None:
        """Here a forward or a backward of a micro-batch begins."""
        for unit in self._sharded:
            for gradient in gathered(unit)[1]:
                self.ledger.see(gradient, "gradients")
        ledger = self.ledger
        self.marks.append(Mark(len(self.traffic.calls), ledger.live, ledger.most))
        ledger.most = ledger.live

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is ASKS_DEVICE:
            return device_without_data(args[0])  # more than half of all calls, and it makes nothing
        if operator is NAMES_A_RANGE:
            return below_modes(operator, args, kwargs)
        if DTensor in types:
            return NotImplemented  # it takes itself apart, and its local operators come here
        if self.number_for is not None and operator is READS_A_NUMBER:
            return self.number_for(args[0])
        if self.number_for is not None and operator is torch.ops.aten.equal.default:
            return True
        result = operator(*args, **(kwargs or {}))
        if self._layouts.under_way or is_imagined():
            return result
        crossing = self.traffic.note(operator, args, result)
        # In a backward pass autograd records only where a forward is run again.
        again = self.ledger.phase == "backward" and torch.is_grad_enabled()
        # Memory that is only reserved is what it is filled with (a message to come, say), a view what it is a view of.
        again = again and operator is not torch.ops.aten.empty.memory_format
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                new = again and not self.ledger.knows(leaf)
                self.ledger.see(leaf, "communication" if crossing else "activations" if new else "other")
        for leaf in crossing:
            self.ledger.see(leaf, "communication")
        return result

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """What operators do not show: what is saved for backward, gathered weights, storages that change size."""
        with ExitStack() as stack:
            handle = register_module_forward_pre_hook(self._before_forward)
            stack.callback(handle.remove)
            stack.enter_context(storage_resizes(self.ledger.resized))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor))
            yield

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Apart from its graph: one that an operator gave and saved would hold that operator, and both stay for ever
        where a backward leaves its graph standing, as zero bubble's first half does."""
        self.ledger.see(tensor, "activations")
        return tensor if tensor.grad_fn is None else tensor.detach()

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        """What stands in a parameter's slot now: itself, or a copy that is whole or of another dtype."""
        if is_imagined():
            return
        for tensor in parameter_slots(module).values():
            if tensor is not None:
                self.ledger.see(tensor, "gathered")
                self.gradient_of(tensor)

    def built(self, module: nn.Module) -> None:
        """What stands before the first step; ends the phase of that name."""
        for parameter in module.parameters():
            self.ledger.see(parameter, "parameters")
            self.gradient_of(parameter)
        for buffer in module.buffers():
            self.ledger.see(buffer, "given")
        if self.ledger.phase == "built":
            self.enter("rest")

    def sharded(self, roots: Iterable[nn.Module]) -> None:
        """Whole gradients that their units add up from micro-batch to micro-batch are then known as such."""
        units = [unit for root in roots for unit in root.modules() if isinstance(unit, FSDPModule)]
        self._sharded = list(dict.fromkeys(units))

    def given(self, batch: Any) -> None:
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                self.ledger.see(leaf, "given")

    def gradient_of(self, tensor: torch.Tensor) -> None:
        """Count this leaf's gradient as one from where it is made."""
        if tensor.is_leaf and tensor.requires_grad and tensor not in self._hooked:
            self._hooked[tensor] = True
            tensor.register_hook(self._gradient)

    def _gradient(self, gradient: torch.Tensor) -> None:
        self.ledger.see(gradient, "gradients")

    def gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a step's backward: what lies in `.grad`."""
        for parameter in parameters:
            self.ledger.see(parameter, "parameters")  # FSDP2 pads shards before its first forward
            if parameter.grad is not None:
                self.ledger.see(parameter.grad, "gradients")

    def states(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.ledger.see(value, "states")
