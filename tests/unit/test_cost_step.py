"""The time of a step: its parts sum to it, and it obeys what is known of splits, links, recompute and pipelines."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES, Candidates
from shardwise.cost.micro_time import LEAST_ROWS
from shardwise.cost.step import Step, step
from shardwise.cost.workload import Trainable, Workload
from shardwise.inputs.arch import preset
from shardwise.inputs.hardware import Cluster, Link, parse_cluster

SEVENTY = Workload(preset("llama-3-70b"), 8192, 512, "bf16")
NODES = parse_cluster("8xp5.48xlarge")
FULL, FB = RECOMPUTE.index("full"), SCHEDULES.index("1f1b")
# Every axis: replicas, shards of each stage, tensor, pipeline and context parallel.
MANY = Candidates.of(
    pp=[1, 1, 1, 2, 4, 8, 1, 1], dp_replicate=[8, 1, 1, 1, 1, 1, 1, 64], dp_shard=[1, 8, 64, 4, 4, 1, 8, 1],
    tp=[8, 8, 1, 8, 4, 8, 4, 1], cp=[1, 1, 1, 1, 1, 1, 2, 1], zero=[0, 1, 3, 2, 3, 0, 3, 0],
    schedule=[0, 0, 0, FB, FB, FB, 0, 0], recompute=[0, 1, 2, 0, 1, 2, 2, 0],
    accumulation=[64, 64, 8, 128, 128, 512, 64, 8], sequence_parallel=[1, 0, 0, 1, 1, 1, 1, 0],
    offload=[0, 0, 0, 0, 0, 0, OFFLOAD.index("cpu"), 0],
)  # fmt: skip


def of(workload: Workload = SEVENTY, cluster: Cluster = NODES, **columns: object) -> Step:
    return step(workload, cluster, Candidates.of(**columns))


def faster(cluster: Cluster, link: float = 1, network: float = 1) -> Cluster:
    node = cluster.node
    near, far = node.link, node.network
    links = {
        "link": Link(near.kind, near.bytes_per_second * link),
        "network": Link(far.kind, far.bytes_per_second * network),
    }
    return msgspec.structs.replace(cluster, node=msgspec.structs.replace(node, **links))


def test_the_parts_sum_to_the_step_and_none_is_negative() -> None:
    found = step(SEVENTY, NODES, MANY)
    assert found.seconds == pytest.approx(np.sum(list(found.parts.values()), axis=0), rel=1e-12)
    assert all((part >= 0).all() and len(part) == len(MANY) for part in found.parts.values())


def test_many_plans_at_once_are_what_each_is_alone() -> None:
    together = step(SEVENTY, NODES, MANY).seconds
    alone = [step(SEVENTY, NODES, MANY.where(np.array([i]))).seconds[0] for i in range(len(MANY))]
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("model", ["llama-3-70b", "deepseek-v3"])
def test_work_that_plans_share_is_the_work_of_each(model: str) -> None:
    """More rows than are told apart; not a bit differs."""
    workload = Workload(preset(model), 4096, 512, "bf16")
    chosen, rows = np.random.default_rng(0), 4 * LEAST_ROWS
    degrees = {name: chosen.choice([1, 2, 4], rows) for name in ("pp", "tp", "cp", "dp_shard", "micro_batch")}
    options = {"recompute": 3, "sequence_parallel": 2, "compiled": 2}
    many = Candidates.of(**degrees, **{name: chosen.integers(0, most, rows) for name, most in options.items()})
    together = step(workload, NODES, many).parts
    alone = [step(workload, NODES, many.where(np.arange(i, i + LEAST_ROWS))).parts for i in range(0, rows, LEAST_ROWS)]
    for name, part in together.items():
        assert np.array_equal(part, np.concatenate([one[name] for one in alone]))


def test_throughput_and_utilisation_follow_from_the_seconds() -> None:
    found = step(SEVENTY, NODES, MANY)
    assert found.tokens_per_second_per_gpu * found.seconds * MANY.world == pytest.approx(SEVENTY.tokens)
    assert ((found.mfu > 0) & (found.mfu < 1)).all()
    assert ((found.low < found.seconds) & (found.seconds < found.high)).all()


@pytest.mark.parametrize("which", ["link", "network"])
def test_a_faster_link_never_predicts_a_slower_step(which: str) -> None:
    taken = [step(SEVENTY, faster(NODES, **{which: factor}), MANY).seconds for factor in (0.25, 0.5, 1, 2, 8)]
    assert all((slow >= fast - 1e-9).all() for slow, fast in pairwise(taken))


def test_more_work_never_takes_less() -> None:
    taken = [
        of(msgspec.structs.replace(SEVENTY, global_batch=64 * m), dp_shard=64, zero=3, accumulation=m).seconds[0]
        for m in (1, 2, 4, 8)
    ]
    assert taken == sorted(taken)
    layers = [msgspec.structs.replace(SEVENTY.arch, num_layers=n) for n in (40, 60, 80)]
    taken = [
        of(msgspec.structs.replace(SEVENTY, arch=arch), dp_shard=64, zero=3, accumulation=8).seconds[0]
        for arch in layers
    ]
    assert taken == sorted(taken)


def test_full_recompute_costs_about_a_third_more_compute() -> None:
    """One forward beside a forward and a backward of two: 4/3 (arXiv 2205.05198, section 5), the head once."""
    kept, again = (of(dp_shard=64, zero=3, accumulation=8, recompute=kind) for kind in (0, FULL))
    assert 1.25 < (again.parts["matmul"] / kept.parts["matmul"])[0] < 1.36
    assert 1.2 < (again.seconds / kept.seconds)[0] < 1.36


def test_pure_tensor_parallel_across_nodes_is_slow() -> None:
    inside = of(tp=8, dp_shard=8, zero=1, accumulation=64, sequence_parallel=True)
    across = of(tp=64, micro_batch=8, accumulation=64, sequence_parallel=True)
    assert across.seconds[0] > 2 * inside.seconds[0]
    assert across.parts["tensor_parallel"][0] > 0.4 * across.seconds[0]


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 64)])
def test_equal_stages_wait_for_one_less_than_the_stages_over_the_micro_batches(pp: int, m: int) -> None:
    """(pp - 1) / m of the work (arXiv 2104.04473, section 2.2). A tiny vocabulary makes equal ends, to 2 %."""
    arch = msgspec.structs.replace(SEVENTY.arch, vocab_size=8)
    found = of(
        msgspec.structs.replace(SEVENTY, arch=arch), pp=pp, tp=8, dp_replicate=8 // pp, accumulation=m, schedule=FB
    )
    working = sum(found.parts[name][0] for name in ("matmul", "attention", "memory_bound", "tensor_parallel"))
    assert found.parts["bubble"][0] / working == pytest.approx((pp - 1) / m, rel=0.02)


def test_interleaving_divides_the_waiting() -> None:
    plain = of(pp=4, tp=8, dp_replicate=2, accumulation=64, schedule=FB)
    woven = of(
        pp=4, tp=8, dp_replicate=2, accumulation=64, schedule=SCHEDULES.index("interleaved-1f1b"), stages_per_rank=4
    )
    assert (woven.parts["bubble"] / plain.parts["bubble"])[0] == pytest.approx(1 / 4, rel=0.05)


def test_a_network_that_is_not_known_widens_the_interval() -> None:
    bare = parse_cluster("8x8xH100-SXM5-80GB")
    known, guessed = (of(cluster=cluster, dp_shard=64, zero=3, accumulation=8) for cluster in (NODES, bare))
    assert (guessed.high / guessed.seconds)[0] > (known.high / known.seconds)[0]


def test_fp8_gains_what_published_runs_gain() -> None:
    """A fifth to two fifths end to end; products alone do twice the FLOPs, at 1.2 times their 16-bit share at most."""
    spread = {"dp_shard": 8, "accumulation": 64, "zero": 1}
    for preset_name, cluster, plan in (
        ("llama-3-8b", "8xH100-SXM5-80GB", {**spread, "compiled": True}),
        ("llama-3-70b", "8xp5.48xlarge", {**spread, "tp": 8, "sequence_parallel": True}),
    ):
        work = Workload(preset(preset_name), 4096, 512, "bf16")
        plain, narrow = (
            of(msgspec.structs.replace(work, precision=precision), parse_cluster(cluster), **plan)
            for precision in ("bf16", "fp8")
        )
        assert 1.15 < (plain.seconds / narrow.seconds)[0] < 1.45
        assert (plain.parts["matmul"] / narrow.parts["matmul"])[0] < 2.4
        assert (narrow.parts["memory_bound"] > plain.parts["memory_bound"]).all()


def test_a_frozen_base_does_two_thirds_of_the_products_and_counts_no_others() -> None:
    plan = {"dp_shard": 64, "zero": 3, "accumulation": 8}
    lora = msgspec.structs.replace(SEVENTY, trainable=Trainable("lora", rank=8, targets=("query", "value")))
    whole, part = of(**plan), of(lora, **plan)
    assert (part.parts["matmul"] / whole.parts["matmul"])[0] == pytest.approx(2 / 3, rel=0.01)
    # Utilisation counts what is needed: no more than a run of all weights reaches, whose other parts weigh less.
    assert 0 < part.mfu[0] < 1 and part.mfu[0] == pytest.approx(whole.mfu[0], rel=0.1)


def test_a_frozen_base_that_is_sharded_is_still_gathered() -> None:
    plan = {"dp_shard": 64, "zero": 3, "accumulation": 8}
    stack = msgspec.structs.replace(SEVENTY.stack, overlap=False)
    lora = msgspec.structs.replace(SEVENTY, stack=stack, trainable=Trainable("lora", rank=8, targets=("query",)))
    whole, part = of(msgspec.structs.replace(SEVENTY, stack=stack), **plan), of(lora, **plan)
    quantised = msgspec.structs.replace(lora, trainable=msgspec.structs.replace(lora.trainable, base_bytes=0.5))
    # Gathers in two passes of three (reductions go), of weights in 16 bits as ever; four bits are a quarter of
    # them, beside hops.
    assert 0.3 < (part.parts["data_parallel"] / whole.parts["data_parallel"])[0] < 0.8
    assert (of(quantised, **plan).parts["data_parallel"] < 0.6 * part.parts["data_parallel"]).all()


def test_without_prefetching_each_weight_is_gathered_by_itself() -> None:
    plan = {"dp_shard": 64, "zero": 3, "accumulation": 8, "recompute": FULL}
    stack = msgspec.structs.replace(SEVENTY.stack, overlap=False)
    fetched, waited = of(**plan), of(msgspec.structs.replace(SEVENTY, stack=stack), **plan)
    assert waited.parts["data_parallel"][0] > fetched.parts["data_parallel"][0]


def test_deterministic_algorithms_start_twice_the_kernels() -> None:
    tiny = msgspec.structs.replace(SEVENTY.arch, hidden_size=512, ffn_size=2048, num_layers=12, vocab_size=1024)
    small = Workload(tiny, 1024, 8, "bf16")
    filled = msgspec.structs.replace(small, stack=msgspec.structs.replace(small.stack, deterministic=True))
    plain, filling = of(small, dp_shard=8, zero=1), of(filled, dp_shard=8, zero=1)
    assert 1.3 < (filling.seconds / plain.seconds)[0] < 2.0
    assert filling.parts["host"][0] > 1.5 * plain.parts["host"][0]
