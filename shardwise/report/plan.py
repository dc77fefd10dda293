"""A plan as text: the decision, and why."""

import json

from shardwise.plan.check import Violation
from shardwise.plan.plan import Plan
from shardwise.plan.rule_of_thumb import bytes_at_rest
from shardwise.units import format_bytes, format_count


def text(plan: Plan) -> str:
    """The decision in a table, and its reasons."""
    rows = [("model", _model(plan)), ("machines", _machines(plan)), ("ranks", _ranks(plan))]
    rows += [
        ("batch", _batch(plan)),
        ("precision", plan.decision.precision),
        ("compile", plan.decision.compile),
    ]
    at_rest = bytes_at_rest(plan)
    if at_rest is not None:
        rows.append(("memory", f"{format_bytes(at_rest)} a rank between steps (weights, gradients, states)"))
    table = "\n".join(f"  {name:<10} {value}" for name, value in rows)
    return f"plan\n{table}\nwhy\n" + "\n".join(f"  - {reason}" for reason in plan.why)


def _model(plan: Plan) -> str:
    if plan.arch is None:
        return plan.recipe.model.factory or plan.recipe.model.given or "your own module"
    arch = plan.arch
    return f"{arch.name}: {format_count(arch.parameters())} parameters, {arch.num_layers} layers"


def _machines(plan: Plan) -> str:
    cluster = plan.cluster
    asked = f" ({cluster.asked})" if cluster.asked not in ("", "local", cluster.name) else ""
    return f"{cluster.name}{asked}, {cluster.device.name}" if cluster.kind == "cpu" else f"{cluster.name}{asked}"


def _ranks(plan: Plan) -> str:
    mesh, zero = plan.decision.mesh, plan.decision.zero
    axes = [("pp", mesh.pp), ("dp_replicate", mesh.dp_replicate), ("dp_shard", mesh.dp_shard)]
    axes += [("cp", mesh.cp), ("tp", mesh.tp)]
    used = " x ".join(f"{name} {degree}" for name, degree in axes if degree > 1)
    return f"{mesh.world}" + (f" = {used}" if used else "") + f", zero {zero}"


def _batch(plan: Plan) -> str:
    decision = plan.decision
    return (
        f"{decision.global_batch} samples a step: {decision.mesh.data_parallel} data-parallel ranks x "
        f"{decision.accumulation} micro-batches of up to {decision.micro_batch}"
    )


def violations(found: tuple[Violation, ...]) -> str:
    """What keeps a plan from running here, each with its fix; empty where nothing does."""
    return "\n".join(f"{one.what}\n  why: {one.why}\n  fix: {one.fix}" for one in found)


def as_json(plan: Plan, found: tuple[Violation, ...] = ()) -> str:
    """The plan and what it breaks, as one JSON object."""
    import msgspec

    return json.dumps({"plan": msgspec.to_builtins(plan), "violations": msgspec.to_builtins(found)})
