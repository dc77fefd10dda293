"""The Estimate: what a plan is predicted to take, each figure with its 80 % interval. No torch."""

import msgspec

Interval = tuple[float, float]


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step and bytes of the fullest rank's device. Intervals hold four of five measurements.

    mfu: the model's own arithmetic (Arch.flops_per_token: causal attention as the half it needs, recompute left out)
    over the dense peak of the precision; None where the peak is not known. memory_bytes: what the device's own tool
    shows at the peak; `memory` are its parts and `seconds` those of the step: both sum to the whole.
    """

    step_seconds: float
    step_seconds_interval: Interval
    tokens_per_second_per_gpu: float
    tokens_per_second_per_gpu_interval: Interval
    mfu: float | None
    mfu_interval: Interval | None
    memory_bytes: float
    memory_bytes_interval: Interval
    memory_limit_bytes: float
    memory: dict[str, float]
    seconds: dict[str, float]
