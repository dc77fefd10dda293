"""The most memory that this rank's device held, as the device's own tool would show it."""

import torch


def peak_bytes() -> float | None:
    """Of the whole device: what is in use now, and what this rank's allocator had reserved more at its peak.

    Other processes on the device count, as they do in nvidia-smi. None on a CPU, whose ranks share the host's memory
    with all that they read from files.
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return float(total - free + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved())
