"""A plan as text: the decision, and why."""

import json

from shardwise.plan.plan import Plan
from shardwise.plan.rough_memory import activation_bytes, bytes_at_rest
from shardwise.plan.schedules import cannot_share, in_runs, stage_blocks
from shardwise.plan.violation import Violation
from shardwise.units import format_bytes, format_count


def text(plan: Plan) -> str:
    """The decision in a table, and its reasons."""
    rows = [("model", _model(plan)), ("machines", _machines(plan)), ("ranks", _ranks(plan))]
    rows += [("pipeline", _pipeline(plan))] if plan.decision.mesh.pp > 1 else []
    rows += [
        ("batch", _batch(plan)),
        ("precision", plan.decision.precision),
        ("recompute", plan.decision.recompute),
        ("compile", plan.decision.compile),
    ]
    rows += [("memory", said)] if (said := _memory(plan)) else []
    table = "\n".join(f"  {name:<10} {value}" for name, value in rows)
    return f"plan\n{table}\nwhy\n" + "\n".join(f"  - {reason}" for reason in plan.why)


def line(plan: Plan) -> str:
    """The plan in one line: model, ranks, machines."""
    return f"{_model(plan)}; {_ranks(plan)}; {_machines(plan)}"


def _model(plan: Plan) -> str:
    if plan.arch is None:
        return plan.recipe.model.hf or plan.recipe.model.factory or plan.recipe.model.given or "your own module"
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


def _pipeline(plan: Plan) -> str:
    """The schedule, and how many blocks each stage has."""
    decision = plan.decision
    stages = decision.mesh.pp * decision.stages_per_rank
    said = f"{decision.schedule}, {stages} stages, {decision.stages_per_rank} a rank"
    if plan.arch is None or cannot_share(plan.arch.num_layers, stages, decision.stage_blocks):
        return said
    if decision.stage_blocks != "even":
        return f"{said}, of {in_runs(decision.stage_blocks)} blocks"
    sizes = sorted({len(blocks) for blocks in stage_blocks(plan.arch.num_layers, stages)}, reverse=True)
    return f"{said}, of {' or '.join(map(str, sizes))} {'block' if sizes == [1] else 'blocks'}"


def _batch(plan: Plan) -> str:
    decision = plan.decision
    return (
        f"{decision.global_batch} samples a step: {_count(decision.mesh.data_parallel, 'data-parallel rank')} x "
        f"{_count(decision.accumulation, 'micro-batch', 'es')} of up to {decision.micro_batch}"
    )


def _count(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else ending}"


def _memory(plan: Plan) -> str:
    """What was predicted; else bytes between steps and of activations; empty where nothing is known."""
    if plan.estimate is not None:
        low, high = plan.estimate.memory_bytes_interval
        predicted = f"{format_bytes(plan.estimate.memory_bytes)} (80 %: {format_bytes(low)} to {format_bytes(high)})"
        return f"{predicted} of {format_bytes(plan.estimate.memory_limit_bytes)} on the fullest rank"
    at_rest, kept = bytes_at_rest(plan), activation_bytes(plan)
    if at_rest is None:
        return ""
    whose = "on the fullest rank" if plan.decision.mesh.pp > 1 else "a rank"
    said = f"{format_bytes(at_rest)} {whose} between steps (weights, gradients, states)"
    return said if kept is None else f"{said}, about {format_bytes(kept)} of activations in a step"


def violations(found: tuple[Violation, ...]) -> str:
    """What keeps a plan from running here, each with its fix; empty where nothing does."""
    return "\n".join(f"{one.what}\n  why: {one.why}\n  fix: {one.fix}" for one in found)


def as_json(plan: Plan, found: tuple[Violation, ...] = ()) -> str:
    """The plan and what it breaks, as one JSON object."""
    import msgspec

    return json.dumps({"plan": msgspec.to_builtins(plan), "violations": msgspec.to_builtins(found)})
