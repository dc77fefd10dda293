"""The numbers in the strategies' page are those that the planner works with."""

import re

from shardwise.inputs.hardware import parse_cluster
from shardwise.inputs.recipe import OptimizerSpec
from shardwise.plan.rough_memory import USABLE_SHARE, bytes_per_parameter, usable_bytes
from shardwise.plan.rule_of_thumb import FULL_SHARD_LIMIT, STATES_SHARE
from shardwise.units import format_bytes
from tests.docs.blocks import ROOT

PAGE = (ROOT / "skills/distributed-training/references/parallelism-strategies.md").read_text()


def test_what_fits_on_each_gpu_is_what_the_planner_takes_to_fit() -> None:
    rows = re.findall(r"^\| (\S+) \| ([\d.]+ GiB) \| ([\d.]+ GiB) \| ([\d.]+)B \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 5
    for name, usable, states, billions in rows:
        have = usable_bytes(parse_cluster(name), 1)
        assert (usable, states) == (format_bytes(have), format_bytes(int(have * STATES_SHARE)))
        assert billions == f"{have * STATES_SHARE / 16 / 1e9:.2f}"


def test_the_shares_and_limits_that_it_names_are_the_planners() -> None:
    assert (USABLE_SHARE, STATES_SHARE, FULL_SHARD_LIMIT) == (0.95, 0.70, 80e9)
    taken = {spec: bytes_per_parameter("bf16", spec).total for spec in (OptimizerSpec(), OptimizerSpec(name="sgd"))}
    assert list(taken.values()) == [16, 8]
    assert bytes_per_parameter("bf16", OptimizerSpec(name="sgd", momentum=0.9)).total == 12
    assert bytes_per_parameter("fp64", OptimizerSpec()).total == 32
