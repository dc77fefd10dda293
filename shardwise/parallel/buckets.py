"""Data parallel over plain parameters with buckets that never change: the same sums in the same order, every step.

torch's DDP rebuilds its buckets after the first step, so a resumed run adds in another order and loses its bits.
Here a bucket is a flat buffer whose slices are the parameters' gradients; buckets are reduced in one fixed order on
every rank, each as soon as it and all before it are full.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.launch.heartbeat import waiting

# torch DDP's own default; a smaller first bucket starts the wire early in the backward pass.
DEFAULT_CAP_BYTES = 25 * 2**20
FIRST_CAP_BYTES = 2**20


class Bucket:
    """A flat gradient buffer, fp32 or fp64, and the parameters whose gradients are its slices.

    A parameter that is a DTensor (tensor parallel) has its local part here, and a view that is a DTensor too.
    """

    def __init__(self, index: int, parameters: list[nn.Parameter]) -> None:
        self.index = index
        self.parameters = parameters
        parts = [local_part(p) for p in parameters]
        total = sum(part.numel() for part in parts)
        self.flat = torch.zeros(total, dtype=parts[0].dtype, device=parts[0].device)
        pieces = self.flat.split([part.numel() for part in parts])
        self.locals = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        self.views = [_as(p, view) for p, view in zip(parameters, self.locals, strict=True)]
        self.ready: set[int] = set()

    @property
    def full(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def take_up(self, slot: int) -> None:
        """Make a parameter's gradient a slice of the buffer: moved there once, and later ones add in place."""
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is view:
            return
        if gradient is None:
            self.locals[slot].zero_()
        else:
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                gradient = gradient.redistribute(placements=parameter.placements)
            self.locals[slot].copy_(local_part(gradient))
        parameter.grad = view


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(parameter: nn.Parameter, view: torch.Tensor) -> torch.Tensor:
    """A local view as the kind of tensor that the parameter is."""
    if not isinstance(parameter, DTensor):
        return view
    return DTensor.from_local(
        view, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


Communicate = Callable[[Bucket], dist.Work | None]


def sum_over(group: dist.ProcessGroup | None) -> Communicate:
    """The default: one all-reduce of the whole buffer over the group's ranks; None: over all."""
    return lambda bucket: dist.all_reduce(bucket.flat, group=group, async_op=True)


def assign(parameters: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: in reverse order of registration, one dtype and device a bucket."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = local_part(parameter).numel() * parameter.element_size()
        last = buckets[-1][-1] if buckets else None
        if last is None or size > room or (last.dtype, last.device) != (parameter.dtype, parameter.device):
            room = cap_bytes if buckets else min(FIRST_CAP_BYTES, cap_bytes)
            buckets.append([])
        buckets[-1].append(parameter)
        room -= size
    return buckets


class BucketedDataParallel:
    """Sums gradients over the ranks of a module whose parameters are equal on all of them.

    `stages`: the parts of the module that run backward one by one (a pipeline's, on this rank); a gradient is whole
    after the last backward of every one that holds its parameter. A gradient that no hook announces (a zero-bubble
    schedule sets it) is taken up in `finish`. `early` off: nothing is sent before `finish`, since gradients may still
    change after the last announced backward.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        cap_bytes: int = DEFAULT_CAP_BYTES,
        communicate: Communicate | None = None,
        stages: Sequence[nn.Module] = (),
        early: bool = True,
    ):
        self.early = early
        self.communicate = communicate or sum_over(group)
        self.last_micro_batch = True
        self.works: list[dist.Work | None] = []
        self.holders = Counter(p for stage in stages or (module,) for p in stage.parameters())
        self.arrived: Counter[nn.Parameter] = Counter()
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = [Bucket(i, ps) for i, ps in enumerate(assign(trainable, cap_bytes))]
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._arrival(bucket.index, slot))

    def before_backward(self, *, stage: int = 0, last: bool) -> None:
        self.last_micro_batch = last

    def reshard(self) -> None:
        return

    def _arrival(self, index: int, slot: int) -> Callable[[torch.Tensor], None]:
        # A parameter's hooks are out of the garbage collector's sight: one that held this would keep all for good.
        this = weakref.ref(self)

        def arrived(_parameter: torch.Tensor) -> None:
            held = this()
            if held is not None:
                held._take(held.buckets[index], slot)

        return arrived

    def _take(self, bucket: Bucket, slot: int) -> None:
        bucket.take_up(slot)
        if self.last_micro_batch and self.early:
            parameter = bucket.parameters[slot]
            self.arrived[parameter] += 1
            if self.arrived[parameter] == self.holders[parameter]:
                bucket.ready.add(slot)
                self._launch_full()

    def _launch_full(self) -> None:
        # In order of the index alone: ranks whose gradients arrive in another order still match.
        while len(self.works) < len(self.buckets) and self.buckets[len(self.works)].full:
            self.works.append(self.communicate(self.buckets[len(self.works)]))

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks; what got none here counts as zero. Collective."""
        for bucket in self.buckets[len(self.works) :]:
            for slot in range(len(bucket.parameters)):
                bucket.take_up(slot)
            self.works.append(self.communicate(bucket))
        for bucket, work in zip(self.buckets, self.works, strict=True):
            if work is not None:
                with waiting(f"sum of gradient bucket {bucket.index}"):
                    work.wait()
        self.works.clear()
        self.arrived.clear()
        for bucket in self.buckets:
            bucket.ready.clear()
