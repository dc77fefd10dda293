"""A whole module is rehearsed by one process before any rank waits for another: whether it has the parts that its plan
cuts, and whether these parts, run one after another, can be.

Forward runs on the meta device, for its shapes alone; where that is in doubt and the module small, with its numbers.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.inputs.recipe import ModelSpec
from shardwise.models import inspect
from shardwise.names import canonical
from shardwise.parallel import roles, staging
from shardwise.parallel.foreign_weights import ForeignReads, foreign
from shardwise.parallel.outline import outline
from shardwise.parallel.roles import Roles
from shardwise.parallel.tensor_parallel import require_divisible
from shardwise.plan import schedules
from shardwise.plan.plan import Decision
from shardwise.torch_private import tree_leaves, tree_map, unsafe_view, weights_met_again

# With numbers, forward of a few samples takes about a second on one CPU core at this size.
MOST_PARAMETERS = 20_000_000


class Call(NamedTuple):
    """What forward is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def rehearse(module: nn.Module, decision: Decision, spec: ModelSpec, call: Call | None) -> str:
    """Why forward was not tried; empty where it was, and where one rank runs all of it. No collective, no change.

    `call`: a small one, with tensors on the module's device. Raises: ModelError where the ranks would, later.
    """
    found = inspect.find_blocks(module, spec.blocks)
    pp, tp = decision.mesh.pp, decision.mesh.tp
    require_parts(module, found, decision, roles.of(module, found.blocks, spec.roles) if tp > 1 else None)
    if pp * tp == 1:
        return ""
    if call is None:
        return "no sample of the data is at hand before training"
    reason = ""
    for without_numbers in (True, False):
        if not without_numbers and inspect.parameter_count(module) > MOST_PARAMETERS:
            break
        try:
            _run(module, decision, spec, call, without_numbers=without_numbers)
            return ""
        except ModelError as error:
            # What an operator raised may be a doubt about shapes without numbers alone.
            if error.__cause__ is None or not without_numbers:
                raise
            reason = error.why
        except Exception as error:  # a stranger's code: any of it may fail, and says so in the first step
            reason = f"{type(error).__name__}: {error}"
    return f"its forward could not be tried before training: {reason}"


def require_parts(module: nn.Module, found: inspect.Blocks, decision: Decision, split: Roles | None) -> None:
    """Raises: ModelError for a whole module without the blocks or the layers that the plan shares out."""
    if decision.mesh.pp > 1:
        stages = decision.mesh.pp * decision.stages_per_rank
        outline(module, found.blocks, stages, decision.stage_blocks, why_none=found.reason)
    if split is not None:
        modules = {canonical(name): inner for name, inner in module.named_modules()}
        require_divisible(split, modules, decision.mesh.tp)


def _run(module: nn.Module, decision: Decision, spec: ModelSpec, call: Call, *, without_numbers: bool) -> None:
    """The whole module, then the stages of all ranks one after another. Raises: ModelError, and what forward does."""
    device = torch.device("meta") if without_numbers else next(module.parameters()).device
    call = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, call)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), device:
        whole = shadow(module, without_numbers)
        with ForeignReads(whole) as reads:
            whole(*call.args, **call.kwargs)
        if decision.mesh.tp > 1 and reads.found:
            raise foreign(*reads.found[0])
        if decision.mesh.pp > 1:
            hidden = None
            for stage in _stages(module, decision, spec, without_numbers):
                if decision.schedule in schedules.SPLIT_BACKWARD and hidden is not None:
                    with torch.enable_grad():
                        hidden = _goes_back_in_halves(stage, hidden, call, decision.schedule)
                else:
                    hidden = stage(hidden, call.args, call.kwargs)


def _goes_back_in_halves(stage: staging.Stage, hidden: torch.Tensor, call: Call, schedule: str) -> Any:
    """What the stage gives. Raises: ModelError for one of whose weights a split backward loses a part."""
    received = hidden.detach().requires_grad_()
    # A leaf may not be changed in place; as the pipeline does.
    outputs = stage(unsafe_view(received, tuple(received.shape)), call.args, call.kwargs)
    names = {p: canonical(name.replace("/", ".")) for name, p in stage.named_parameters()}
    for output in tree_leaves(outputs):
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            continue
        met = weights_met_again(output, received, list(names))
        if met:
            raise ModelError(
                f"{', '.join(sorted(names[p] for p in met))}: used in two places of stage {stage.index}, one behind "
                "the other, with other weights between.",
                why=f"{schedule} makes the weights' gradients after the backward, and from the one place there is then "
                "no way back to the other",
                fix='train.plan.schedule = "1f1b", or a module of its own in each place',
            )
    return outputs


def _stages(module: nn.Module, decision: Decision, spec: ModelSpec, without_numbers: bool) -> Sequence[staging.Stage]:
    """Every rank's stages in their order, each rank's cut from a copy of its own."""
    pp, per_rank = decision.mesh.pp, decision.stages_per_rank
    found: dict[int, staging.Stage] = {}
    for rank in range(pp):
        own = shadow(module, without_numbers)
        mine = schedules.stages_of_rank(decision.schedule, rank, pp, per_rank)
        blocks = inspect.find_blocks(own, spec.blocks).blocks
        stages = staging.split(own, blocks, pp * per_rank, mine, decision.stage_blocks)
        found.update({stage.index: stage for stage in stages})
    return [found[index] for index in range(pp * per_rank)]


def shadow(module: nn.Module, without_numbers: bool) -> nn.Module:
    """A copy with its own modules and the same tensors, or with tensors on meta; ties stay."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        # What deepcopy finds in its memo it does not copy.
        memo[id(tensor)] = tensor
        if without_numbers:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)
