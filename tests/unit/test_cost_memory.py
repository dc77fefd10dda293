"""Predicted memory: laws first, then limits that papers state, then schedules' own tables."""

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from shardwise.cost.candidates import SCHEDULES, Candidates
from shardwise.cost.in_flight import dense_layers_at, layers_at, pairs_in_flight, pairs_waiting
from shardwise.cost.memory import Memory, memory
from shardwise.cost.workload import SHARDWISE_MIXED, Stack, Workload
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import parse_cluster
from shardwise.plan import schedules

ARCH = Arch("test", 32000, 4096, 32, 32, 8, 128, 14336, 8192)
LARGE = Arch("70b", 128256, 8192, 80, 64, 8, 128, 28672, 8192)
CLUSTER = parse_cluster("8xA100-SXM4-80GB")
ZERO = Stack("zero", weights=2, masters=4, gathered=2, gradients=2, reduced=2, states=8)


def of(arch: Arch = ARCH, stack: Stack = SHARDWISE_MIXED, length: int = 2048, **columns: Any) -> Memory:
    return memory(Workload(arch, length, 64, "bf16", stack), CLUSTER, Candidates.of(**columns))


def test_parts_sum_to_the_device_and_the_interval_holds_it() -> None:
    found = of(zero=[0, 1, 2, 3], dp_shard=[1, 8, 8, 8], tp=2)
    assert np.allclose(sum(found.parts.values()), found.device, rtol=1e-12)
    assert (found.low < found.device).all()
    assert (found.device < found.high).all()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_more_shards_never_add_states(zero: int) -> None:
    shards = 2 ** np.arange(8)
    assert (np.diff(of(zero=zero, dp_shard=shards).states) <= 0).all()


@pytest.mark.parametrize("kernels", ["composed", "eager", "fused"])
def test_full_recompute_keeps_no_more_than_selective_and_that_no_more_than_none(kernels: str) -> None:
    for selective, fused in itertools.product(("products", "all but attention"), (False, True)):
        changes = {"kernels": kernels, "selective": selective, "fused_attention": fused}
        kept = of(
            stack=msgspec.structs.replace(SHARDWISE_MIXED, **changes), recompute=[0, 1, 2], micro_batch=32
        ).activations
        assert kept[0] >= kept[1] >= kept[2] > 0


@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_memory_rises_with_the_micro_batch_and_with_the_sequence(recompute: int) -> None:
    for zero in (0, 3):
        rows = of(micro_batch=np.arange(1, 9), recompute=recompute, zero=zero, dp_shard=8 if zero else 1).logical
        assert (np.diff(rows) > 0).all()
    lengths = [of(length=length, recompute=recompute).logical[0] for length in (512, 1024, 4096)]
    assert lengths == sorted(lengths)


def test_zero_stages_hold_what_the_paper_says() -> None:
    """Rajbhandari et al., section 5: 4 + 12/N, 2 + 14/N and 16/N bytes a parameter. Gathered blocks are not states."""
    many, count = 64, ARCH.parameters()
    for zero, whole, shared in ((1, 4, 12), (2, 2, 14), (3, 0, 16)):
        found = of(stack=ZERO, zero=zero, dp_shard=many)
        at_rest = found.parameters + found.states
        gradients = (2 if zero == 1 else 2 / many) * count
        assert at_rest[0] + gradients == pytest.approx((whole + shared / many) * count, rel=1e-9)


def test_adamw_of_70b_takes_16_bytes_a_parameter_which_eight_times_80_gb_do_not_have() -> None:
    found = of(arch=LARGE, zero=3, dp_shard=8)
    assert found.parameters[0] + found.states[0] == pytest.approx(12 * LARGE.parameters() / 8, rel=1e-9)
    assert 16 * LARGE.parameters() > 8 * 80e9
    assert found.low[0] > CLUSTER.device.hbm_bytes


def test_korthikanti_layer_of_activations() -> None:
    """arXiv 2205.05198, equation 4 without attention's scores, which a fused kernel does not keep: 34 s b h / t."""
    plain = Arch("gpt", 51200, 12288, 96, 96, 96, 128, 49152, 2048, gated_ffn=False, norm="layer", dropout=0.1)
    fused = msgspec.structs.replace(ZERO, kernels="fused", selective="all but attention")
    one, two = (
        of(arch=msgspec.structs.replace(plain, num_layers=n), stack=fused, tp=8, sequence_parallel=True).activations[0]
        for n in (96, 97)
    )
    # The results of both norms stand in the paper's two norm inputs' place once more: 2 h each.
    assert two - one == pytest.approx(34 * 2048 * 12288 / 8, rel=0.01)


SHAPES = [
    (name, pp, held, micros)
    for name, pp, held, micros in itertools.product(SCHEDULES[1:], (2, 3, 4, 5, 8), (1, 2, 3), range(1, 20))
    if not schedules.requires(name, pp, held, micros)
]


def fullest(table: schedules.Table, late: float) -> float:
    """The most that a rank keeps, in pairs, where the gradients that wait for the weights take `late` of a pair."""
    held, waiting, most = 0, 0, 0.0
    for action in table:
        first_half = action.kind == "I" and action.stage > 0  # a first stage has no input's half
        held, waiting = held + (action.kind == "F"), waiting + first_half
        most = max(most, held + late * waiting)
        held, waiting = held - (action.kind in "BW"), waiting - (action.kind == "W" and action.stage > 0)
    return most


@pytest.mark.parametrize("late", [0.3, 0.65, 1.0])
def test_pairs_that_wait_for_their_weights_are_those_of_the_tables(late: float) -> None:
    """Exactly where there are micro-batches enough for the order to settle; else never fewer than in the table."""
    for name, pp, held, micros in SHAPES:
        plan = Candidates.of(pp=[pp] * pp, stages_per_rank=held, accumulation=micros, schedule=SCHEDULES.index(name))
        (pairs, waiting), (then, more) = pairs_waiting(plan, np.arange(pp))
        mine = np.maximum(pairs + late * waiting, then + late * more)
        tables = np.array([fullest(table, late) for table in schedules.actions(name, pp, held, micros)])
        assert (mine >= tables - 1e-9).all(), (name, pp, held, micros, mine, tables)
        if micros >= 2 * pp:
            np.testing.assert_allclose(mine, tables, err_msg=str((name, pp, held, micros)))


def test_pairs_in_flight_and_blocks_are_those_of_the_tables() -> None:
    for name, pp, held, micros in SHAPES:
        plan = Candidates.of(pp=[pp] * pp, stages_per_rank=held, accumulation=micros, schedule=SCHEDULES.index(name))
        tables, places = schedules.actions(name, pp, held, micros), np.arange(pp)
        assert pairs_in_flight(plan, places).tolist() == [schedules.most_in_flight(table) for table in tables]
        for layers in (pp * held, pp * held + 3):
            cut = schedules.stage_blocks(layers, pp * held)
            blocks = [[b for s in schedules.stages_of_rank(name, r, pp, held) for b in cut[s]] for r in places]
            assert layers_at(plan, places, layers).tolist() == [len(each) for each in blocks]
            assert dense_layers_at(plan, places, layers, 2).tolist() == [sum(b < 2 for b in each) for each in blocks]
