"""Predicted step time beside measured, for every plan of a small space on this machine; and what the choice costs.

Run: python -m benchmarks.planner [--cluster cluster.toml] [--steps 10] [--rounds 2] [--plans NAME,...] [--json FILE]

Without --cluster the machine is measured first (`shardwise doctor --measure`, about a minute); with --json what was
measured is kept beside FILE, and FILE is written after each round. Ranks import the checkout: where others edit it, run
a copy. A decoder of 11 million parameters, 16 samples of 256 tokens a step. Every plan is trained by
`shardwise.train.worker`, as `shardwise train` would, in rounds; a plan's time is the median of its steps after the
first three of each round. On two cores: one rank with two threads, and two ranks. The targets: predicted within 20 % of
measured for at least 12 plans, and the plan that `plan = "auto"` takes within 5 % of the best one measured.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardwise.cli import measure
from shardwise.events.reader import read
from shardwise.events.values import Step
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import Arch, arch_of
from shardwise.inputs.hardware import Cluster, parse_cluster
from shardwise.inputs.recipe import Recipe
from shardwise.launch import local, run_folder, watch
from shardwise.plan import automatic
from shardwise.plan.check import require
from shardwise.plan.plan import Decision, Plan
from shardwise.plan.prediction import predict
from shardwise.units import format_seconds

WARM_UP_STEPS = 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 264,
    "max_position_embeddings": 1024, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
PIPE = {"pp": 2, "dp_shard": 1, "dp_replicate": 1}
# Name: (devices, micro-batch, [train.plan]).
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one-mb16": (1, 16, {"zero": 0}),
    "one-mb4": (1, 4, {"zero": 0}),
    "one-mb4-full": (1, 4, {"zero": 0, "recompute": "full"}),
    "dp2-zero0-mb8": (2, 8, {"zero": 0}),
    "dp2-zero0-mb2": (2, 2, {"zero": 0}),
    "dp2-zero0-mb8-full": (2, 8, {"zero": 0, "recompute": "full"}),
    "dp2-zero0-mb8-selective": (2, 8, {"zero": 0, "recompute": "selective"}),
    "dp2-zero1-mb8": (2, 8, {"zero": 1, "dp_shard": 2}),
    "dp2-zero2-mb4": (2, 4, {"zero": 2, "dp_shard": 2}),
    "dp2-zero3-mb8": (2, 8, {"zero": 3, "dp_shard": 2}),
    "dp2-zero3-mb2": (2, 2, {"zero": 3, "dp_shard": 2}),
    "tp2-mb16": (2, 16, {"tp": 2}),
    "tp2-mb4": (2, 4, {"tp": 2}),
    "pp2-1f1b-mb4": (2, 4, {**PIPE, "schedule": "1f1b"}),
    "pp2-1f1b-mb1": (2, 1, {**PIPE, "schedule": "1f1b"}),
    "pp2-gpipe-mb2": (2, 2, {**PIPE, "schedule": "gpipe"}),
    "pp2-interleaved-mb2": (2, 2, {**PIPE, "schedule": "interleaved-1f1b", "stages_per_rank": 3}),
    "pp2-zbv-mb2": (2, 2, {**PIPE, "schedule": "zbv", "stages_per_rank": 2}),
}
AUTO = "auto"


class Row(NamedTuple):
    """One plan: what was predicted (with the 80 % interval's ends), and the step seconds that were measured."""

    name: str
    plan: Plan
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    kept = Path(arguments.json) if arguments.json else None
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        probed = kept.with_suffix(".cluster.toml") if kept else scratch / "cluster.toml"
        cluster = parse_cluster(arguments.cluster) if arguments.cluster else measured_here(probed)
        for rows, choice in tables(scratch, cluster, arguments.plans.split(","), arguments.steps, arguments.rounds):
            if kept:
                kept.write_text(json.dumps(values(rows, choice), indent=1))
    print(text(rows, choice))


def measured_here(path: Path) -> Cluster:
    """This machine, probed now, into a file."""
    measure.measure(measure.Asked(str(path)))
    return parse_cluster(str(path))


def tables(
    scratch: Path, cluster: Cluster, names: list[str], steps: int, rounds: int
) -> Iterator[tuple[list[Row], str]]:
    """After each round a row a plan, and the name of the one that `plan = "auto"` takes.

    Its own where it is none of the others.
    """
    plans = {name: planned(scratch, cluster, steps, *PLANS[name]) for name in names}
    auto = planned(scratch, cluster, steps, cluster.devices, None, AUTO)
    alike = [name for name, plan in plans.items() if same(plan.decision, auto.decision)]
    plans = plans if alike else {**plans, AUTO: auto}
    found: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        for name, plan in plans.items():
            found[name] += trained(scratch / f"{name}-{number}", plan)
            print(f"round {number + 1}: {name} {statistics.median(found[name]):.3f} s", file=sys.stderr, flush=True)
        yield rows_of(plans, found), alike[0] if alike else AUTO


def rows_of(plans: dict[str, Plan], found: dict[str, list[float]]) -> list[Row]:
    """Prediction beside the median of what was found. Raises: SystemExit where nothing is predicted."""
    rows = []
    for name, plan in plans.items():
        estimate = predict(plan)
        if estimate is None:
            raise SystemExit(f"{name} has no prediction")
        ends = estimate.step_seconds_interval
        rows.append(Row(name, plan, estimate.step_seconds, *ends, statistics.median(found[name])))
    return rows


def same(one: Decision, other: Decision) -> bool:
    """Whether two decisions do the same work: where all shards are copies, what copies them has two names."""

    def plain(decided: Decision) -> Decision:
        mesh = decided.mesh
        if decided.zero == 0:
            mesh = msgspec.structs.replace(mesh, dp_replicate=mesh.data_parallel, dp_shard=1)
        return msgspec.structs.replace(decided, mesh=mesh, bucket_cap_mb="default")

    return plain(one) == plain(other)


def planned(
    scratch: Path, cluster: Cluster, steps: int, devices: int, micro_batch: int | None, request: dict[str, Any] | str
) -> Plan:
    """The Plan, as the engine makes it. Raises: PlanInfeasible where it cannot run."""
    recipe = asked(scratch, steps, devices, micro_batch, request)
    made = automatic.plan(recipe, shape(recipe), cluster)
    require(made, devices)
    return made


def asked(scratch: Path, steps: int, devices: int, micro_batch: int | None, request: Any) -> Recipe:
    config = scratch / "config.json"
    config.write_text(json.dumps(CONFIG))
    keys = {
        "model": {"config": str(config)},
        "data": {"text": ["stdlib:*.py"], "sequence_length": 256},
        "batch": {"global_batch": 16, **({"micro_batch": micro_batch} if micro_batch else {})},
        "train": {"steps": steps, "devices": devices, "plan": request, "guard_every_steps": 0},
        "checkpoint": {"every_steps": 0},
        "run": str(scratch / "run"),
    }
    return recipes.from_keys(keys, "planner")


def shape(recipe: Recipe) -> Arch:
    found = arch_of(recipe.model, "cpu")
    if not isinstance(found, Arch):
        raise SystemExit("the model's shape is not known")
    return found


def trained(folder: Path, plan: Plan) -> list[float]:
    """Seconds of the steps after the warm-up. Raises: SystemExit where the ranks fail."""
    plan = msgspec.structs.replace(plan, recipe=msgspec.structs.replace(plan.recipe, run=str(folder)))
    logs = folder.with_name(f"{folder.name}-logs")
    logs.mkdir()
    (logs / "plan.json").write_bytes(plan.to_json())
    command = ("-m", "shardwise.train.worker", str(logs / "plan.json"))
    world, cores = plan.decision.mesh.world, plan.cluster.node.host_cores or 1
    job = local.Job(world, command, str(logs), cores, watched=True, on_cpu=plan.cluster.kind == "cpu")
    process = local.start(job)
    try:
        ended = watch.watch(process, lambda: None)
    except BaseException:
        watch.end_tree(process)
        raise
    if ended.returned:
        said = [log.text for log in watch.rank_logs(logs).values()]
        raise SystemExit(f"{folder.name} failed\n" + "\n".join(said)[-3000:])
    events = read(run_folder.events_path(folder, 1))
    return [event.step_seconds for event in events if isinstance(event, Step)][WARM_UP_STEPS:]


def regret(rows: list[Row], choice: str) -> float:
    """How much slower the choice is than the best one measured."""
    chosen = next(row for row in rows if row.name == choice)
    return chosen.measured / min(row.measured for row in rows) - 1


def percentile(found: list[float], share: float) -> float:
    """The smallest that so large a share does not exceed."""
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def values(rows: list[Row], choice: str) -> dict[str, Any]:
    """For a program."""
    each = {row.name: {"predicted": row.predicted, "low": row.low, "high": row.high, "measured": row.measured}
            for row in rows}  # fmt: skip
    errors = [abs(row.error) for row in rows]
    return {"plans": each, "median": statistics.median(errors), "p90": percentile(errors, 0.9), "choice": choice,
            "regret": regret(rows, choice)}  # fmt: skip


def text(rows: list[Row], choice: str) -> str:
    """The table, the errors, the regret."""
    lines = [f"{'plan':<26}{'predicted':>10}{'80 %':>18}{'measured':>10}{'error':>8}"]
    for row in sorted(rows, key=lambda one: one.measured):
        inside = "" if row.low <= row.measured <= row.high else "  outside"
        lines.append(
            f"{row.name + (' <' if row.name == choice else ''):<26}{format_seconds(row.predicted):>10}"
            f"{f'{row.low:.2f} - {row.high:.2f}':>18}{row.measured:>8.3f} s{row.error:>+8.1%}{inside}"
        )
    errors = [abs(row.error) for row in rows]
    within = sum(error <= 0.2 for error in errors)
    lines += [
        f"{within} of {len(rows)} plans within 20 %: median {statistics.median(errors):.1%}, 90th percentile "
        f"{percentile(errors, 0.9):.1%}",
        f"the planner takes {choice}, {regret(rows, choice):.1%} slower than the best measured",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
