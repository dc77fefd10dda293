"""Utilisation: the arithmetic, the measured peak, and counted FLOPs."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import catalogue
from shardwise.models.decoder import Decoder, next_token_sums
from shardwise.profiling import probe
from shardwise.profiling.utilization import format_utilization, model_flops_utilization


def test_it_is_linear_in_speed_and_falls_with_devices():
    one = model_flops_utilization(6e9, 1e5, 8, 989e12)
    assert model_flops_utilization(6e9, 2e5, 8, 989e12) == pytest.approx(2 * one)
    assert model_flops_utilization(6e9, 2e5, 16, 989e12) == pytest.approx(one)
    assert model_flops_utilization(1.0, 100.0, 4, 25.0) == 1.0


@pytest.mark.parametrize(("ranks", "peak"), [(0, 1.0), (1, 0.0)])
def test_no_devices_and_no_peak_are_errors(ranks, peak):
    with pytest.raises(ValueError, match="positive"):
        model_flops_utilization(1.0, 1.0, ranks, peak)


def test_an_unknown_peak_shows_as_a_dash():
    assert format_utilization(None) == "—"
    assert format_utilization(0.4123) == "41.2 %"


def test_the_arithmetic_needs_no_torch():
    code = "import sys, shardwise.profiling.utilization; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_gpu_peak_is_the_catalogues_of_exactly_that_name():
    row = next(row for row in catalogue().gpu if row.dense_bf16_flops_per_second)
    for name in (row.name, *row.aliases):
        assert probe.gpu_peak(name, "bf16") == row.dense_bf16_flops_per_second
    assert probe.gpu_peak(row.name + " MIG 1g.10gb", "bf16") is None
    assert probe.gpu_peak("Some GPU of tomorrow", "bf16") is None


def test_the_measured_cpu_peak_is_at_least_what_a_product_reaches():
    started = time.perf_counter()
    peak = probe.cpu_peak(torch.float32, seconds=0.05)
    assert time.perf_counter() - started < 5
    a = torch.ones(512, 512)
    fastest = probe._fastest(lambda: torch.mm(a, a), 0.05)
    # The same product, measured again on a machine that others use: within a factor of four.
    assert peak > 2 * 512**3 / fastest / 4


def flops_of(call: Callable[[], Any]) -> int:
    """FLOPs of the matrix products and attention that `call` runs (give it forward and backward).

    Two a multiply-add. Attention counts whole, causal or not, as torch counts it.
    """
    with FlopCounterMode(display=False, custom_mapping=_uncounted()) as counter:
        call()
    return int(counter.get_total_flops())


def _uncounted() -> dict[Any, Any]:
    """Formulas for the CPU operators that torch's counter does not know; each is called with shapes."""
    aten = torch.ops.aten
    formulas: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        formulas[torch.ops.mkldnn._linear_pointwise] = _linear_flops
    return formulas


def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    rows = 1
    for size in x[:-1]:
        rows *= size
    return int(2 * rows * weight[0] * weight[1])


def test_counted_flops_of_a_linear_layer_are_two_a_multiply_add():
    layer, x = nn.Linear(8, 4, bias=False), torch.ones(3, 8, requires_grad=True)
    assert flops_of(lambda: layer(x)) == 2 * 3 * 8 * 4
    assert flops_of(lambda: layer(x).sum().backward()) == 3 * 2 * 3 * 8 * 4


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_counted_flops_of_the_decoder_are_its_archs(kv_heads):
    arch = Arch("tiny", 32, 64, 2, 4, kv_heads, 16, 128, 64)
    module, tokens = Decoder(arch), torch.zeros(2, 64, dtype=torch.int64)
    counted = flops_of(lambda: next_token_sums(module(tokens), tokens)[0].backward())
    # torch counts attention whole, and its backward as five products (one is made again), not four.
    attention = 2 * 2 * tokens.numel() * 64 * 64 * arch.num_layers
    matrices = 3 * 2 * arch.matmul_parameters() * tokens.numel()
    assert counted == matrices + attention + attention * 5 // 2
