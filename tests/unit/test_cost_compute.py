"""Seconds of one device's work obey laws of size and of machines, and measured products are met."""

import msgspec
import numpy as np
import pytest

from shardwise.cost.calibration import TimeConstants, calibration, time_constants, values
from shardwise.cost.compute import Attention, Pace, Rates, attention_backward, attention_forward, matmul_seconds
from shardwise.errors import RecipeError
from shardwise.inputs.hardware import Gpu, find_gpu

A100, B200 = find_gpu("A100-PCIe-80GB").value(), find_gpu("B200-SXM-180GB").value()


def product(gpu: Gpu, m: float, n: float, k: float) -> float:
    one = (np.array([float(size)]) for size in (m, n, k))
    return float(matmul_seconds(gpu, *one, "bf16")[0])


@pytest.mark.parametrize("axis", range(3))
def test_a_larger_product_never_takes_less(axis: int) -> None:
    sizes = np.arange(64, 8192, 96, dtype=np.float64)
    shape = [np.full_like(sizes, 1024.0) for _ in range(3)]
    shape[axis] = sizes
    assert (np.diff(matmul_seconds(A100, *shape, "bf16")) >= -1e-12).all()


@pytest.mark.parametrize("gpu", [A100, B200])
def test_no_product_is_faster_than_the_peak(gpu: Gpu) -> None:
    sizes = np.logspace(1, 5, 40)
    seconds = matmul_seconds(gpu, sizes, sizes, sizes, "bf16")
    assert (2 * sizes**3 / seconds < gpu.dense_bf16_flops_per_second).all()


def test_one_tile_more_than_a_wave_costs_more_than_its_share() -> None:
    # 108 multiprocessors: 27 x 4 tiles of 256 x 128 are one wave; a power-limited device would hide it.
    full, more = product(A100, 27 * 256, 4 * 128, 4096), product(A100, 27 * 256 + 1, 4 * 128, 4096)
    assert more / full > 1.01


# Measured efficiencies, of the dense peak. Source: SimuMax, configs/system/a100_pcie.json and b200_bf16.json.
@pytest.mark.parametrize(
    ("gpu", "m", "n", "k", "efficiency"),
    [
        (A100, 4096, 6144, 4096, 0.7168),
        (A100, 4096, 8192, 10240, 0.7544),
        (A100, 4096, 8192, 57344, 0.7549),
        (B200, 16384, 26624, 32768, 0.4623),
        (B200, 4096, 10240, 16384, 0.5525),
        (B200, 8192, 4096, 8192, 0.4826),
    ],
)
def test_measured_products_are_met_within_two_fifths(gpu: Gpu, m: int, n: int, k: int, efficiency: float) -> None:
    """Constants are fitted on whole runs, which sustain less than single products do: by up to two fifths."""
    measured = 2 * m * n * k / gpu.dense_bf16_flops_per_second / efficiency
    assert 0.9 < product(gpu, m, n, k) / measured < 1.4


def test_a_device_with_more_power_is_never_slower() -> None:
    weak, strong = find_gpu("H100-SXM5-96GB").value(), find_gpu("H100-SXM5-80GB").value()
    assert product(strong, 8192, 8192, 8192) < product(weak, 8192, 8192, 8192)


def attention(rows: float, heads: float, fused: bool, key_dim: float = 128.0, hopper_kernels: bool = True) -> Attention:
    one = np.ones(1)
    return Attention(
        heads=one * heads, key_dim=one * key_dim, value_dim=one * key_dim, rows=one * rows, attended=one * rows / 2,
        whole=one * rows, fused=one * fused, tuned=one * hopper_kernels,
    )  # fmt: skip


def pace(gpu: Gpu) -> Pace:
    return Pace.of(Rates.of(gpu, "bf16"), time_constants())


def test_attention_grows_as_the_square_of_a_long_sequence() -> None:
    short, long = (attention_forward(pace(A100), attention(n, 32, True), time_constants()) for n in (16384.0, 32768.0))
    assert 3.9 < (long / short)[0] < 4.1


def test_scores_in_memory_are_slower_than_fused_attention() -> None:
    fused, scored = (
        attention_forward(pace(A100), attention(4096, 32, kept), time_constants()) for kept in (True, False)
    )
    assert scored[0] > 2 * fused[0]


def test_backward_takes_more_than_forward() -> None:
    a = attention(4096, 32, True)
    assert (
        attention_backward(pace(A100), a, time_constants())[0] > attention_forward(pace(A100), a, time_constants())[0]
    )


def test_an_unaligned_head_leaves_the_tensor_cores() -> None:
    """BLOOM's prequel found it: 14400 / 96 = 150 is no multiple of 8 (bigscience, tr11 chronicles)."""
    odd, even = (attention_forward(pace(A100), attention(2048, 12, False, d), time_constants()) for d in (150.0, 152.0))
    assert odd[0] > 1.5 * even[0]


def test_a_peak_that_is_not_known_is_an_error_with_a_fix() -> None:
    with pytest.raises(RecipeError, match="dense fp8 peak") as raised:
        Rates.of(A100, "fp8")
    assert raised.value.fix


def test_every_constant_has_an_origin_and_is_a_field() -> None:
    table = calibration().time
    assert set(table) == set(TimeConstants.__struct_fields__)
    assert all(each.unit and each.fitted_on for each in table.values())
    assert all(each.value > 0 for each in table.values())


def test_an_unknown_constant_is_refused() -> None:
    table = calibration().time
    with pytest.raises(msgspec.ValidationError, match="magic"):
        values({**table, "magic": next(iter(table.values()))}, TimeConstants)
