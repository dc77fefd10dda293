"""What a dry run says to change where bytes do not fit: each fix is applied, and the peak falls below the limit."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from shardwise.inputs import recipe as recipes
from shardwise.inputs.hardware import Cluster, parse_cluster
from shardwise.plan import check, rough_memory, rule_of_thumb
from shardwise.plan.plan import Plan
from shardwise.plan.violation import Violation
from shardwise.verify.dry_run import dry_run
from shardwise.verify.fits import fits
from shardwise.verify.subject import subject_of
from shardwise.verify.values import DryRun
from tests.distributed import work

Keys = dict[str, Any]


def keys(train_plan: Any, *, micro_batch: Any = "auto", batch: int = 16, length: int = 16) -> Keys:
    return {
        "model": {"given": "test"},
        "data": {"given": recipes.SHAPE_ALONE, "sequence_length": length},
        "batch": {"global_batch": batch, "micro_batch": micro_batch},
        "train": {"steps": 1, "plan": train_plan, "precision": "fp32"},
        "run": "runs/test",
    }


def planned(asked: Keys, world: int, overrides: dict[str, str | int] | None = None, **shape: Any) -> Plan:
    changed = recipes.with_overrides(asked, [f"{key}={value}" for key, value in (overrides or {}).items()])
    cluster = parse_cluster(f"{world}xH100-SXM5-80GB")
    return rule_of_thumb.plan(recipes.from_keys(changed, "test"), work.arch(**shape), cluster)


def peak(found: DryRun) -> int:
    assert found.fullest is not None, found.violations
    return found.fullest.peak.live.total


def told(plan: Plan, found: DryRun, limit: int) -> Violation:
    (violation,) = fits(plan, found.ranks, limit)
    assert violation.rule == "peak_fits"
    return violation


WIDE: Keys = {"vocab_size": 256, "hidden_size": 64, "ffn_size": 256}
LONG: Keys = {"num_layers": 4, "max_sequence_length": 64}
# What is asked for, ranks, the model, and what must be changed.
APPLIED: dict[str, tuple[Keys, int, Keys, str]] = {
    "a whole batch at once": (keys({"dp_replicate": 2}), 2, {}, "batch.micro_batch"),
    "a whole batch at once in a pipeline": (
        keys({"pp": 2, "schedule": "1f1b"}, micro_batch=8, batch=32), 2, {}, "batch.micro_batch"
    ),
    "micro-batches of one sample": (
        keys({"dp_shard": 2, "zero": 3}, micro_batch=1, batch=4, length=64), 2, LONG, "recompute"
    ),
    "micro-batches of one sample in a pipeline": (
        keys({"pp": 2, "schedule": "1f1b"}, micro_batch=1, batch=4, length=64), 2, LONG, "recompute"
    ),
    "micro-batches of one sample, all left open": (
        keys("auto", micro_batch=1, batch=4, length=64), 2, LONG, "recompute"
    ),
    "copies": (keys({"dp_replicate": 4}, micro_batch=1), 4, WIDE, "train.plan.zero"),
    "states in shards alone": (keys({"dp_shard": 4, "zero": 1}, micro_batch=1), 4, WIDE, "train.plan.zero"),
    "copies along tensor parallel": (keys({"dp_replicate": 4, "tp": 2}, micro_batch=1), 8, WIDE, "train.plan.zero"),
    "copies of a pipeline": (
        keys({"dp_replicate": 4, "pp": 2, "schedule": "1f1b"}, micro_batch=1), 8, WIDE, "train.plan.zero"
    ),
    "all left open": (keys("auto", micro_batch=1), 4, WIDE, "train.plan.zero"),
}  # fmt: skip


def cases(names: Iterable[str]) -> list[Any]:
    """The same fixes along other axes take as long again, and are the night's."""
    axes = ("pipeline", "along tensor", "for parameters")
    return [
        pytest.param(name, marks=pytest.mark.nightly) if any(axis in name for axis in axes) else name for name in names
    ]


@pytest.mark.parametrize("name", cases(APPLIED))
def test_a_fix_is_applied_and_what_did_not_fit_by_a_byte_fits(name: str) -> None:
    asked, world, shape, key = APPLIED[name]
    plan = planned(asked, world, **shape)
    found = dry_run(plan)
    limit = peak(found) - 1
    violation = told(plan, found, limit)
    assert violation.apply is not None, violation.fix
    assert any(key in changed for changed in violation.apply), violation.fix
    changed = planned(asked, world, violation.apply, **shape)
    assert check.check(changed, world) == ()
    assert fits(changed, dry_run(changed).ranks, limit) == ()
    if "zero" not in key:
        assert changed.decision.mesh == plan.decision.mesh


def test_a_fix_leaves_what_was_decided_and_it_does_not_name() -> None:
    """An open plan that became tensor parallel over pipelines stays so when one of its keys is set."""
    asked = keys("auto", micro_batch=1, batch=4, length=64)
    decided = planned(keys({"pp": 2, "tp": 2, "schedule": "1f1b"}, micro_batch=1, batch=4, length=64), 4, **LONG)
    opened = msgspec.structs.replace(decided, recipe=recipes.from_keys(asked, "test"))
    found = dry_run(opened)
    violation = told(opened, found, peak(found) - 1)
    assert violation.apply is not None
    changed = planned(asked, 4, violation.apply, **LONG)
    assert changed.decision.mesh == decided.decision.mesh
    assert changed.decision.recompute == "full"


# Where the choice is the user's, each of the words is tried by hand.
BY_HAND: dict[str, tuple[Keys, int, Keys, str, dict[str, str | int], int]] = {
    "a shorter sequence": (
        keys({"dp_shard": 2, "zero": 3, "recompute": "full"}, micro_batch=1, batch=4, length=64), 2, LONG,
        "a shorter data.sequence_length", {"data.sequence_length": 32}, 2,
    ),
    "tensor parallel for activations": (
        keys({"dp_shard": 2, "zero": 3, "recompute": "full"}, micro_batch=1, batch=4, length=64), 2, LONG,
        "a larger train.plan.tp", {"train.plan.tp": 2}, 4,
    ),
    "more devices": (keys({"zero": 3}, micro_batch=1), 2, WIDE, "more devices", {}, 4),
    "tensor parallel for parameters": (
        keys({"pp": 2, "schedule": "1f1b"}, micro_batch=1), 2, WIDE, "a larger train.plan.tp or pp",
        {"train.plan.tp": 2}, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(BY_HAND))
def test_what_only_the_user_can_choose_lowers_the_peak_too(name: str) -> None:
    asked, world, shape, words, choice, devices = BY_HAND[name]
    plan = planned(asked, world, **shape)
    found = dry_run(plan)
    highest = peak(found)
    # Where the batch's part is small, the model's own does not fit.
    violation = told(plan, found, highest - 1 if shape is LONG else highest // 2)
    assert violation.apply is None
    assert words in violation.fix
    assert peak(dry_run(planned(asked, devices, choice, **shape))) < highest


def small(cluster: Cluster, usable: int) -> Cluster:
    """The same cluster with devices of which ranks may use so many bytes."""
    share = rough_memory.usable_bytes(cluster, 2) / cluster.device.hbm_bytes
    device = msgspec.structs.replace(cluster.device, hbm_bytes=int(usable / share) + 1)
    return msgspec.structs.replace(cluster, node=msgspec.structs.replace(cluster.node, device=device))


def test_a_device_that_is_too_small_ends_the_dry_run_with_its_numbers() -> None:
    """Of a module of one's own, whose activations no rule of thumb knows beforehand."""
    known = planned(keys({"dp_replicate": 2}), 2)
    plan, subject = msgspec.structs.replace(known, arch=None), subject_of(known)
    highest = peak(dry_run(plan, subject))
    for usable, passes in ((highest + 4096, True), (highest - 4096, False)):
        found = dry_run(msgspec.structs.replace(plan, cluster=small(plan.cluster, usable)), subject)
        assert found.passed is passes, (found.limit_bytes, highest, found.violations)
    assert [one.rule for one in found.violations] == ["peak_fits"]
