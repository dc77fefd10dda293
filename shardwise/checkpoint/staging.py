"""Host buffers: this rank's part of a checkpoint is copied into them, and training goes on while it is written.

What a resume has verified lies in the same buffer, before it goes into the training's tensors: the first save finds it
warm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from shardwise.checkpoint.regions import local
from shardwise.checkpoint.snapshot import Part

# A tensor begins at a cache line, which suits memcpy and every dtype.
_ALIGNMENT_BYTES = 64


@dataclass
class HostBuffer:
    """One flat buffer, used by save after save; pinned where a GPU is copied from. It grows only where a save needs
    more, and is freed before a larger one is made: at most the largest save's bytes are held.
    """

    _memory: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts with their values copied: what is done to the training's tensors afterwards is not seen.

        The values of the save before are overwritten. Raises: MemoryError, RuntimeError (torch's) without the memory.
        """
        on_gpu = any(part.values.is_cuda for part in parts)
        room = self.room([part.content.bytes for part in parts], pinned=on_gpu)
        taken = [_copied(part, memory) for part, memory in zip(parts, room, strict=True)]
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return taken

    def room(self, sizes: Sequence[int], *, pinned: bool) -> list[torch.Tensor]:
        """So many bytes each, side by side; what was there is overwritten. Raises: as `take`."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = self._of(end, pinned=pinned)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def free(self) -> None:
        self._memory = None

    def _of(self, size: int, *, pinned: bool) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < size or self._memory.is_pinned() < pinned:
            self._memory = None
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else host_memory(size)
        return self._memory


def host_memory(size: int) -> torch.Tensor:
    """Bytes of nobody yet. NumPy asks for huge pages where they are many, torch does not: a first touch then costs a
    fault for 2 MiB and not for each 4 KiB.
    """
    return torch.from_numpy(np.empty(size, np.uint8))


def _copied(part: Part, flat: torch.Tensor) -> Part:
    values = local(part.values)
    # A view as another dtype needs a last dim, which an empty tensor of rank 0 or more gives as well.
    flat.view(values.dtype).view(values.shape).copy_(values, non_blocking=values.is_cuda)
    return Part(part.content._replace(load=partial(_bytes_of, flat)), flat)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return flat.numpy().data
