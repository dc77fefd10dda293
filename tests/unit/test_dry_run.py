"""The dry run says what a run does: byte for byte, collective for collective, against real ranks and by hand."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ranks
from shardwise.errors import BadInput
from shardwise.inputs.arch import Arch
from shardwise.models.decoder import Decoder, initialize_decoder
from shardwise.parallel.parallelize import parallel_of, parallelize
from shardwise.plan.mesh import MeshShape
from shardwise.plan.plan import Plan
from shardwise.train.loss import Loss
from shardwise.train.setup import next_token_loss
from shardwise.train.step import local_gradients
from shardwise.verify import agreement
from shardwise.verify.distinct import chunk, distinct_ranks, micro_batch_sizes, split_lengths
from shardwise.verify.dry_run import dry_run, loss_layout, run_rank, train
from shardwise.verify.fake_world import FakeWorld, one
from shardwise.verify.fits import fits
from shardwise.verify.live_bytes import Watch
from shardwise.verify.subject import Subject, subject_of
from shardwise.verify.values import CATEGORIES, PHASES, DryRun, LiveBytes
from tests.distributed import work
from tests.distributed.pool import Pool

LENGTH = 8
STAYS = ("parameters", "states")  # what no thread of a backend lets go of late


def made(mesh: dict[str, int], zero: int, shape: dict[str, Any] | None = None, **more: Any) -> Plan:
    axes = MeshShape(**mesh)
    more.setdefault("global_batch", 2 * axes.data_parallel * more.get("accumulation", 1))
    plan = work.plan(axes.world, zero=zero, mesh=mesh, **more)
    data = msgspec.structs.replace(plan.recipe.data, sequence_length=LENGTH)
    recipe = msgspec.structs.replace(plan.recipe, data=data)
    return msgspec.structs.replace(plan, recipe=recipe, arch=work.arch(**(shape or {})))


def whole_logits(outputs: torch.Tensor, batch: Any) -> Loss:
    """A user's loss, which knows nothing of a split vocabulary."""
    return next_token_loss(outputs, batch)


def case(plan: Plan, name: str) -> Subject:
    subject = subject_of(plan)
    return dataclasses.replace(subject, loss=whole_logits) if "whole logits" in name else subject


def measured(plan: str, name: str) -> dict[str, Any]:
    """A real rank with the same counter: bytes by phase, and calls, of its second step."""
    wanted = Plan.from_json(plan.encode())
    ranks.start()
    subject, watch = case(wanted, name), Watch()

    def initialize(module: nn.Module) -> None:
        initialize_decoder(module, 0)
        watch.__enter__()  # where the fake run begins to count

    with torch.device("meta"):
        module = subject.build()
    module = parallelize(module, wanted, initialize=initialize, vocabulary_loss=subject.splits_vocabulary)
    sizes = micro_batch_sizes(wanted, wanted.decision.mesh.data_coord(ranks.rank()))
    batches = [lambda n=size: subject.batch(n) for size in sizes]
    optimizer = subject.optimizer(module)
    train(module, optimizer, subject, batches, watch, steps=2)
    watch.__exit__(None, None, None)
    rows = agreement.in_rows(wanted.decision.mesh, watch.traffic.calls)
    storages = [gradient.untyped_storage() for gradient in local_gradients(parallel_of(module))]
    return {
        "phases": msgspec.to_builtins(watch.ledger.phases()),
        "calls": msgspec.to_builtins(rows),
        "gradients": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
    }


WHOLE: dict[str, Any] = {"model": {"sequence_parallel": False}}
EXPERTS = {"count": 5, "per_token": 2, "ffn_size": 10, "shared_ffn_size": 12, "shared_gate": True, "dense_layers": 1}
CASES = {
    "replicated": made({"dp_replicate": 2}, 0),
    "replicated, mixed, accumulated": made({"dp_replicate": 3}, 0, precision="bf16", accumulation=2),
    "zero 1": made({"dp_shard": 2}, 1, accumulation=2),
    "zero 2": made({"dp_shard": 3}, 2, accumulation=2),
    "zero 3": made({"dp_shard": 3}, 3),
    "zero 3, mixed, tied, accumulated": made(
        {"dp_shard": 4}, 3, {"tied_embeddings": True}, precision="bf16", accumulation=2
    ),
    "hybrid": made({"dp_replicate": 2, "dp_shard": 2}, 3, precision="bf16"),
    "zero 3, many micro-batches": made({"dp_shard": 2}, 3, accumulation=7),
    "uneven batch": made({"dp_shard": 2}, 3, global_batch=5, accumulation=2),
    "experts, zero 3, mixed, accumulated": made(
        {"dp_shard": 3}, 3, {"experts": EXPERTS, "qk_norm": True}, precision="bf16", accumulation=2
    ),
    "experts, replicated, selective recompute": made(
        {"dp_replicate": 2}, 0, {"experts": EXPERTS}, recompute="selective", precision="fp32"
    ),
    "pipeline": made({"pp": 2}, 0, schedule="1f1b", accumulation=4),
    "pipeline, many micro-batches": made({"pp": 2}, 0, schedule="1f1b", accumulation=9),
    "pipeline, zero 1": made({"pp": 2, "dp_shard": 2}, 1, schedule="1f1b", accumulation=2),
    "pipeline, tied": made({"pp": 3}, 0, {"tied_embeddings": True}, schedule="1f1b", accumulation=3),
    "interleaved": made(
        {"pp": 2}, 0, {"num_layers": 4}, schedule="interleaved-1f1b", stages_per_rank=2, accumulation=2
    ),
    "gpipe": made({"pp": 2}, 0, schedule="gpipe", accumulation=3),
    "zero bubble": made(
        {"pp": 2}, 0, {"num_layers": 4}, schedule="interleaved-zb", stages_per_rank=2, accumulation=4
    ),
    "zero bubble in a V, copies, tensor": made(
        {"pp": 2, "dp_replicate": 2, "tp": 2}, 0, {"num_layers": 4}, schedule="zbv", stages_per_rank=2, accumulation=4
    ),
    "zero bubble in a V, by pairs": made(
        {"pp": 2}, 0, {"num_layers": 4}, schedule="dualpipev", stages_per_rank=2, accumulation=5
    ),
    "four axes": made(
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}, 1, schedule="1f1b", accumulation=2, precision="bf16"
    ),
    "full recompute": made({"dp_replicate": 2}, 0, recompute="full"),
    "selective recompute": made({"dp_shard": 2}, 3, recompute="selective"),
    "tensor": made({"tp": 2}, 0, accumulation=2),
    "tensor, tied, whole logits": made({"tp": 2}, 0, {"tied_embeddings": True}),
    "tensor, whole sequence, dropout": made({"tp": 2}, 0, {"dropout": 0.1}, **WHOLE),
    "tensor, whole sequence, whole logits, full recompute": made({"tp": 2}, 0, recompute="full", **WHOLE),
    "tensor, replicated": made({"dp_replicate": 2, "tp": 2}, 0, precision="bf16"),
    "tensor, zero 1": made({"dp_shard": 2, "tp": 2}, 1, accumulation=2),
    "tensor, zero 3, mixed": made({"dp_shard": 2, "tp": 2}, 3, {"tied_embeddings": True}, precision="bf16"),
    "tensor, zero 3, whole sequence, whole logits": made({"dp_shard": 2, "tp": 2}, 3, **WHOLE),
    "pipeline, tensor": made({"pp": 2, "tp": 2}, 0, schedule="1f1b", accumulation=4),
    "pipeline, tensor, whole sequence, dropout, whole logits": made(
        {"pp": 2, "tp": 2}, 0, {"tied_embeddings": True, "dropout": 0.1}, schedule="1f1b", accumulation=2, **WHOLE
    ),
}  # fmt: skip


# Each part of these stands in another case, and all of them run at night.
BY_NIGHT = (
    "tensor, zero 1", "pipeline, tensor", "tensor, zero 3, whole sequence, whole logits", "tensor, replicated",
    "zero 3, many micro-batches", "experts, replicated, selective recompute",
)  # fmt: skip


def named(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly if name in BY_NIGHT else ()) for name in cases]


@functools.cache
def dry(name: str) -> DryRun:
    return dry_run(CASES[name], case(CASES[name], name))


class Heard(Watch):
    """Where a step's sums or a hidden tensor come from others, they say one, as in a dry run: it counts something."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        summed = operator is torch.ops.c10d.allreduce_.default and self.ledger.phase == "optimizer"
        if summed or operator is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                tensor.fill_(1.0)
        return result


class RealTensors(FakeWorld):
    """The same group that answers at once, over tensors that hold data: nothing is freed later by another thread."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.watch = Heard(number_for=one)

    def __enter__(self) -> "RealTensors":
        super().__enter__()
        self._pop_all()
        return self

    def begin(self, module: Any = None) -> None:
        initialize_decoder(module, 0)
        self._push(self.watch)


@pytest.mark.parametrize("name", named(CASES))
def test_bytes_are_exactly_those_of_tensors_that_hold_data(name: str) -> None:
    plan = CASES[name]
    found = dry(name)
    assert found.passed, (found.violations, found.mismatches)
    subject, shapes = case(plan, name), dict[Any, Any]()
    names, kinds = loss_layout(plan, subject), distinct_ranks(plan, split_lengths(plan.arch or work.arch()))
    for run, kind in zip(found.ranks, kinds, strict=True):
        real, _, _ = run_rank(plan, subject, kind, names, shapes, RealTensors)
        assert msgspec.structs.replace(real, seconds=run.seconds) == run


@pytest.mark.parametrize("name", named(name for name, plan in CASES.items() if plan.decision.mesh.world <= 4))
def test_collectives_and_what_stays_are_exactly_those_of_real_ranks(pool: Pool, name: str) -> None:
    """A phase's fullest moment is compared above: gloo's threads let go of what crossed when they come to it."""
    plan, found = CASES[name], dry(name)
    real = pool.run(found.world, "tests.unit.test_dry_run:measured", plan=plan.to_json().decode(), name=name)
    for run in found.ranks:
        assert list(msgspec.to_builtins(run.collectives)) == real[run.rank]["calls"], f"rank {run.rank}"
        for mine, there in zip(run.phases, real[run.rank]["phases"], strict=True):
            assert {k: getattr(mine.live, k) for k in STAYS} == {k: there["live"][k] for k in STAYS}, mine.phase
        assert run.phases[-1].live.gradients == real[run.rank]["gradients"]


def by_hand(arch: Arch, size: int, shards: int, index: int) -> int:
    """Bytes of one rank's parameters, each cut along its first dim."""
    with torch.device("meta"):
        module = Decoder(arch)
    return sum(chunk(p.shape[0], shards, index) * (p.numel() // p.shape[0]) for p in module.parameters()) * size


@pytest.mark.parametrize("name", ["replicated", "zero 1", "zero 2", "zero 3", "hybrid"])
def test_parameters_gradients_and_states_are_those_of_the_table(name: str) -> None:
    """Vocabulary of 60, which all degrees here divide: no padding."""
    plan = CASES[name]
    arch = msgspec.structs.replace(work.arch(), vocab_size=60, hidden_size=48, ffn_size=48, head_dim=12)
    plan = msgspec.structs.replace(plan, arch=arch)
    decision, size = plan.decision, 8 if plan.decision.precision == "fp64" else 4
    rest = next(p.live for p in dry_run(plan).ranks[0].phases if p.phase == "rest")
    part = by_hand(arch, size, decision.mesh.dp_shard, 0)
    with torch.device("meta"):
        names = len(list(Decoder(arch).parameters()))
    # Between steps FSDP2 holds shards at every stage; AdamW has two moments and a 4-byte step count a parameter.
    assert rest.parameters == part
    assert rest.gradients == part
    assert rest.states == 2 * part + 4 * names


def test_a_world_of_a_thousand_ranks_runs_as_one_of_its_ranks() -> None:
    plan = made({"dp_replicate": 4, "dp_shard": 256}, 3, {"vocab_size": 256}, precision="bf16")
    found = dry_run(plan)
    assert found.passed
    assert found.world == 1024
    assert sum(run.stands_for for run in found.ranks) == 1024
    assert {row.size for run in found.ranks for row in run.collectives} == {256, 4, 1024}


def test_a_dry_run_is_the_same_after_json() -> None:
    found = dry_run(CASES["zero 3"])
    assert DryRun.from_json(found.to_json()) == found
    assert [phase.phase for phase in found.ranks[0].phases] == list(PHASES)
    with pytest.raises(msgspec.ValidationError):
        DryRun.from_json(found.to_json().replace(b'"world"', b'"wurld"'))


def test_the_total_is_the_sum_of_the_categories() -> None:
    live = LiveBytes(*range(1, len(CATEGORIES) + 1))
    assert live.total == sum(range(1, len(CATEGORIES) + 1))


def test_a_peak_above_the_device_is_a_violation_with_its_largest_part_and_a_fix_that_lowers_it() -> None:
    plan = made({"dp_replicate": 2}, 0, global_batch=16)
    found = dry_run(plan)
    assert found.fullest is not None
    peak = found.fullest.peak.live.total
    assert fits(plan, found.ranks, peak) == ()
    (violation,) = fits(plan, found.ranks, peak - 1)
    assert "activations" in violation.why
    assert violation.apply == {"batch.micro_batch": 4}
    smaller = made({"dp_replicate": 2}, 0, global_batch=16, accumulation=2)
    assert smaller.decision.micro_batch == 4
    assert fits(smaller, dry_run(smaller).ranks, peak - 1) == ()


def test_a_module_that_fails_in_its_forward_is_a_violation_and_leaves_no_group_behind() -> None:
    plan = CASES["pipeline"]
    broken = msgspec.structs.replace(plan, arch=msgspec.structs.replace(plan.arch, num_layers=1))
    found = dry_run(broken)
    assert not found.passed
    assert found.violations
    assert not dist.is_initialized()


def test_a_plan_whose_model_is_not_in_it_says_what_to_give() -> None:
    with pytest.raises(BadInput, match="module of your own"):
        dry_run(msgspec.structs.replace(CASES["replicated"], arch=None))
