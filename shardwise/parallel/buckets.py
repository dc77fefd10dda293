"""Data parallel over plain parameters with buckets that never change: the same sums in the same order, every step.

torch's DDP rebuilds its buckets after the first step, so a resumed run adds in another order and loses its bits.
Here a bucket is a flat buffer whose slices are the parameters' gradients; buckets are reduced in one fixed order on
every rank, each as soon as it and all before it are full.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

# torch DDP's own default; a smaller first bucket starts the wire early in the backward pass.
DEFAULT_CAP_BYTES = 25 * 2**20
FIRST_CAP_BYTES = 2**20


class Bucket:
    """A flat gradient buffer, fp32 or fp64, and the parameters whose gradients are its slices."""

    def __init__(self, index: int, parameters: list[nn.Parameter]) -> None:
        self.index = index
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.ready: set[int] = set()

    @property
    def full(self) -> bool:
        return len(self.ready) == len(self.parameters)


Communicate = Callable[[Bucket], dist.Work | None]


def sum_over_ranks(bucket: Bucket) -> dist.Work | None:
    """The default: one all-reduce of the whole buffer."""
    return dist.all_reduce(bucket.flat, async_op=True)


def assign(parameters: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Which parameters share a bucket: in reverse order of registration, one dtype and device a bucket."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        last = buckets[-1][-1] if buckets else None
        if last is None or size > room or (last.dtype, last.device) != (parameter.dtype, parameter.device):
            room = cap_bytes if buckets else min(FIRST_CAP_BYTES, cap_bytes)
            buckets.append([])
        buckets[-1].append(parameter)
        room -= size
    return buckets


class BucketedDataParallel:
    """Sums gradients over the ranks of a module whose parameters are equal on all of them."""

    def __init__(
        self,
        module: nn.Module,
        *,
        cap_bytes: int = DEFAULT_CAP_BYTES,
        communicate: Communicate = sum_over_ranks,
    ):
        self.communicate = communicate
        self.last_micro_batch = True
        self.works: list[dist.Work | None] = []
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = [Bucket(i, ps) for i, ps in enumerate(assign(trainable, cap_bytes))]
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._arrival(bucket, slot))

    def before_backward(self, *, stage: int = 0, last: bool) -> None:
        self.last_micro_batch = last

    def reshard(self) -> None:
        return

    def _arrival(self, bucket: Bucket, slot: int) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            view = bucket.views[slot]
            if parameter.grad is not view:
                # First gradient since it was set to None: it moves into the buffer once, and later ones add in place.
                view.copy_(parameter.grad)
                parameter.grad = view
            if self.last_micro_batch:
                bucket.ready.add(slot)
                self._launch_full()

        return arrived

    def _launch_full(self) -> None:
        # In order of the index alone: ranks whose gradients arrive in another order still match.
        while len(self.works) < len(self.buckets) and self.buckets[len(self.works)].full:
            self.works.append(self.communicate(self.buckets[len(self.works)]))

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks; what got none here counts as zero. Collective."""
        for bucket in self.buckets[len(self.works) :]:
            for slot, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                if parameter.grad is not view and slot not in bucket.ready:
                    view.zero_()
                    parameter.grad = view
            self.works.append(self.communicate(bucket))
        for work in self.works:
            if work is not None:
                work.wait()
        self.works.clear()
        for bucket in self.buckets:
            bucket.ready.clear()
