"""The constants of the cost model, each with its unit and what it was fitted on, from calibration.toml. No torch."""

import functools
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

Table = TypeVar("Table", bound=msgspec.Struct)


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of the model. prior: what it was before the fit, which the fit is pulled towards.

    fitted_on: families of runs, a table of measurements, or the source it was read from.
    """

    value: float
    prior: float
    unit: str
    fitted_on: str


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """calibration.toml as it stands."""

    time: dict[str, Constant]
    memory: dict[str, Constant] = {}
    schema_version: Literal[1] = 1


class TimeConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of compute.py, communication.py and step.py; units and origins stand in calibration.toml."""

    matmul_share: float
    issue_share: float
    power_share: float
    power_exponent: float
    operand_passes: float
    low_precision_share: float
    wave_sharpness: float
    depth_ramp: float
    launch_seconds: float
    attention_forward_share: float
    attention_backward_share: float
    attention_plain_share: float
    attention_hopper_share: float
    attention_head_ramp: float
    attention_row_ramp: float
    memory_share: float
    pointwise_passes: float
    pointwise_passes_compiled: float
    pointwise_passes_fused: float
    unaligned_slowdown: float
    score_passes: float
    logit_passes: float
    cast_passes: float
    permute_passes: float
    expert_imbalance: float
    link_share: float
    network_share: float
    network_share_per_doubling: float
    all_to_all_share: float
    exchange_network_share: float
    collective_seconds: float
    collective_seconds_per_hop: float
    collective_seconds_per_network_hop: float
    unknown_network_share: float
    overlap_window: float
    overlap_slowdown: float
    tensor_hidden: float
    expert_hidden: float
    transfers_hidden: float
    transfers_hidden_interleaved: float
    optimizer_passes: float
    kernel_seconds: float
    kernels_per_layer: float
    kernels_compiled: float
    kernels_per_moe_layer: float
    kernels_per_collective: float
    step_seconds: float
    straggling_per_doubling: float
    host_link_bytes_per_second: float
    host_memory_bytes_per_second: float
    disk_bytes_per_second: float
    interval_base: float
    interval_network: float
    interval_communication: float
    interval_host: float
    interval_experts: float
    interval_cores: float


@functools.cache
def calibration() -> Calibration:
    """All constants with their origins."""
    return msgspec.toml.decode(Path(__file__).with_name("calibration.toml").read_bytes(), type=Calibration)


def values(constants: dict[str, Constant], table: type[Table], *, prior: bool = False) -> Table:
    """The values alone, or what they were before the fit, as the fields of `table`.

    Raises: msgspec.ValidationError where a constant is missing or is none of the table's.
    """
    return msgspec.convert({name: each.prior if prior else each.value for name, each in constants.items()}, table)


class MemoryConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of moments.py and memory.py; units and origins stand in calibration.toml."""

    context_bytes: float
    communicator_bytes: float
    group_bytes: float
    reserved_share: float
    reserved_sharded: float
    compiled_activations: float
    logit_bytes: float
    logit_bytes_chunked: float
    logit_bytes_compiled: float
    logit_bytes_fused_kernels: float
    logit_bytes_fused_loss_kernels: float
    interval_base: float
    interval_activations: float


@functools.cache
def time_constants() -> TimeConstants:
    """The calibrated constants of time."""
    return values(calibration().time, TimeConstants)


@functools.cache
def memory_constants() -> MemoryConstants:
    """The calibrated constants of memory."""
    return values(calibration().memory, MemoryConstants)
