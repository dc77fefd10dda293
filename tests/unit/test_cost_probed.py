"""Measured values in the cost model: in place of published ones, each in its direction."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost.calibration import time_constants
from shardwise.cost.candidates import Candidates
from shardwise.cost.compute import Floats
from shardwise.cost.probed import ProductLaw, speeds
from shardwise.cost.step import Step, step
from shardwise.cost.workload import SHARDWISE_FP32, Workload
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Matmul, Measured, parse_cluster
from tests.unit.measured_machine import FACTS, HERE, LAW, probed

ARCH = Arch(
    name="small", hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64, ffn_size=704,
    vocab_size=512, max_sequence_length=1024,
)  # fmt: skip
WORK = Workload(ARCH, 256, 16, "fp32", SHARDWISE_FP32)
SPLITS = Candidates.of(
    dp_replicate=[2, 1, 1, 1], dp_shard=[1, 2, 1, 1], tp=[1, 1, 2, 1], pp=[1, 1, 1, 2], zero=[0, 3, 0, 0],
    micro_batch=[8, 8, 16, 4], accumulation=[1, 1, 1, 4], schedule=[0, 0, 0, 2],
)  # fmt: skip


def taken(facts: Measured, plans: Candidates = SPLITS) -> Step:
    return step(WORK, probed(facts), plans)


def test_measured_values_win_over_published_ones() -> None:
    """Another nominal peak changes only what utilisation is counted by, and what was not measured."""
    device = HERE.device
    assert device.dense_fp32_flops_per_second is not None
    faster = msgspec.structs.replace(
        HERE, node=msgspec.structs.replace(
            HERE.node,
            device=msgspec.structs.replace(
                device, dense_fp32_flops_per_second=4 * device.dense_fp32_flops_per_second, hbm_bytes_per_second=1e12
            ),
        ),
    )  # fmt: skip
    np.testing.assert_allclose(step(WORK, probed(FACTS, faster), SPLITS).seconds, taken(FACTS).seconds, rtol=1e-9)
    assert not np.allclose(step(WORK, faster, SPLITS).seconds, step(WORK, HERE, SPLITS).seconds, rtol=0.1)


def test_every_measured_number_counts_and_in_its_direction() -> None:
    """A rate twice as high is never slower for any plan, and faster for one; more seconds of starting are slower."""
    rates = (
        "memory_bytes_per_second", "pointwise_bytes_per_second", "loss_bytes_per_second",
        "optimizer_bytes_per_second",
    )  # fmt: skip
    before = taken(FACTS).seconds
    changed = {name: msgspec.structs.replace(FACTS, **{name: 2 * getattr(FACTS, name)}) for name in rates[1:]}
    changed["matmuls"] = msgspec.structs.replace(
        FACTS,
        matmuls=tuple(msgspec.structs.replace(one, flops_per_second=2 * one.flops_per_second) for one in FACTS.matmuls),
    )
    changed["collectives"] = msgspec.structs.replace(
        FACTS,
        collectives=tuple(
            msgspec.structs.replace(one, bytes_per_second=2 * one.bytes_per_second) for one in FACTS.collectives
        ),
    )
    changed["starts"] = msgspec.structs.replace(
        FACTS, collectives=tuple(msgspec.structs.replace(one, latency_seconds=1e-5) for one in FACTS.collectives)
    )
    changed["host"] = msgspec.structs.replace(FACTS, block_host_seconds=1e-3)
    for name, facts in changed.items():
        after = taken(facts).seconds
        assert (after <= before * (1 + 1e-12)).all(), name
        assert (after < before).any(), name


@given(st.floats(1e6, 1e11), st.floats(1.0, 100.0), st.floats(0.0, 1e-2))
def test_a_faster_link_is_never_slower(rate: float, factor: float, start: float) -> None:
    def with_link(bytes_per_second: float) -> Measured:
        rows = tuple(
            msgspec.structs.replace(one, bytes_per_second=bytes_per_second, latency_seconds=start)
            for one in FACTS.collectives
        )
        return msgspec.structs.replace(FACTS, collectives=rows)

    slow, fast = taken(with_link(rate)).seconds, taken(with_link(rate * factor)).seconds
    assert (fast <= slow * (1 + 1e-12)).all()


def test_attention_is_taken_from_the_nearest_shape() -> None:
    """At 4,096 positions the rate measured there: a change of the other row changes nothing."""
    long = msgspec.structs.replace(
        WORK, sequence_length=4096, arch=msgspec.structs.replace(ARCH, max_sequence_length=4096)
    )
    near, far = FACTS.attention[1], msgspec.structs.replace(FACTS.attention[0], forward_flops_per_second=1e9)
    before = step(long, probed(FACTS), SPLITS).parts["attention"]
    after = step(long, probed(msgspec.structs.replace(FACTS, attention=(far, near))), SPLITS).parts["attention"]
    np.testing.assert_array_equal(before, after)


def test_the_law_of_products_is_found_again_and_needs_three_shapes() -> None:
    found = ProductLaw.through(FACTS.matmuls)
    assert found is not None
    assert found.flop == pytest.approx(LAW.flop, rel=1e-6)
    assert found.number == pytest.approx(LAW.number, rel=1e-6)
    assert ProductLaw.through(FACTS.matmuls[:2]) is None


@given(st.lists(st.tuples(*(st.integers(1, 4096) for _ in range(3)), st.floats(1e6, 1e13)), min_size=1, max_size=12))
def test_no_measured_product_makes_a_negative_law(rows: list[tuple[int, int, int, float]]) -> None:
    found = ProductLaw.through([Matmul(m, n, k, "fp32", speed) for m, n, k, speed in rows])
    if found is not None:
        assert min(found.start, found.flop, found.number) >= 0
        assert max(found.start, found.flop, found.number) > 0


def test_a_rank_alone_has_threads_and_too_many_ranks_take_turns() -> None:
    cluster = probed(FACTS)
    products, memory, host = speeds(cluster, np.array([1, 2, 4]))
    np.testing.assert_allclose(products, [1.8, 1.0, 0.5])
    np.testing.assert_allclose(memory, [1.5, 1.0, 0.5])
    np.testing.assert_allclose(host, [1.0, 1.0, 0.5])
    alone = Candidates.of(micro_batch=16)
    assert taken(FACTS, alone).parts["matmul"] < 2 * taken(FACTS).parts["matmul"][0]


def test_cores_have_a_wider_interval_by_what_their_speed_moves_and_gpus_have_not() -> None:
    known = time_constants()
    still = msgspec.structs.replace(known, interval_cores=0.0)

    def width(found: Step) -> Floats:
        return np.asarray(np.log(found.high / found.seconds) ** 2)

    wider = width(step(WORK, probed(FACTS), SPLITS, known)) - width(step(WORK, probed(FACTS), SPLITS, still))
    np.testing.assert_allclose(wider, known.interval_cores**2, rtol=1e-9)
    gpus = parse_cluster("2xH100-SXM5-80GB")
    np.testing.assert_array_equal(width(step(WORK, gpus, SPLITS, known)), width(step(WORK, gpus, SPLITS, still)))
