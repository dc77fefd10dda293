"""From what the Trainer was handed to values: the Recipe, the data, the module, the Plan, the end of the run."""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from shardwise import ranks
from shardwise.data import mixture
from shardwise.environment import in_pod, notice_seconds
from shardwise.errors import ModelError, PlanInfeasible, RecipeError
from shardwise.inputs import arch as archs
from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import Arch
from shardwise.inputs.recipe import CheckpointPolicy, PlanRequest, PresetByDevice, Recipe, TrainableSpec
from shardwise.launch import local
from shardwise.models import materialize
from shardwise.models.decoder import Decoder, initialize_decoder, next_token_sums
from shardwise.models.hf import build as hf
from shardwise.models.hf import documents
from shardwise.optimizer import build as optimizers
from shardwise.optimizer.schedules import Schedule
from shardwise.plan import automatic, planned_only, rule_of_thumb
from shardwise.plan.plan import Decision, Plan
from shardwise.resilience.budget import Budget, budget_of
from shardwise.train.loss import Loss
from shardwise.train.step import Inputs

Initialize = Callable[[nn.Module], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The Trainer's keywords, as far as they are values."""

    model: str
    data: str
    blocks: str
    global_batch: int | None
    tokens_per_step: int | None
    tokens_per_sample: int | None
    micro_batch: int | str
    precision: str
    clip_norm: float | None
    seed: int
    plan: str | PlanRequest | Mapping[str, Any] | Plan
    run: str
    checkpoint: CheckpointPolicy
    log: tuple[str, ...]
    fp32_modules: tuple[str, ...]
    evaluate_every_steps: int
    sync_batchnorm: bool
    mixes_samples: str
    unused_parameters: tuple[str, ...]
    roles: Mapping[str, str]
    sequence_parallel: str | bool
    guard_every_steps: int
    on_spike: str = "tell"
    hang_seconds: float = 60.0
    cluster: str = "local"
    trainable: str | TrainableSpec | Mapping[str, Any] = "full"

    def recipe(self) -> Recipe:
        """The Recipe of these keywords: the same checks as for a file. Raises: RecipeError."""
        keys: dict[str, Any] = {
            "run": self.run,
            "seed": self.seed,
            "model": {
                "given": self.model, "blocks": self.blocks, "fp32_modules": self.fp32_modules,
                "sync_batchnorm": self.sync_batchnorm, "mixes_samples": self.mixes_samples,
                "unused_parameters": self.unused_parameters, "roles": dict(self.roles),
                "sequence_parallel": self.sequence_parallel, "trainable": msgspec.to_builtins(self.trainable),
            },
            "data": self._data(),
            "batch": {"micro_batch": self.micro_batch, **self._batch()},
            "optimizer": {"clip_norm": "off" if self.clip_norm is None else self.clip_norm},
            "train": {
                "precision": self.precision, "plan": _plan_keys(self.plan),
                "evaluate_every_steps": self.evaluate_every_steps, "guard_every_steps": self.guard_every_steps,
                "on_spike": self.on_spike, "hang_seconds": self.hang_seconds,
                "cluster": self.cluster,
            },
            "checkpoint": msgspec.to_builtins(self.checkpoint),
            "log": self.log,
        }  # fmt: skip
        return recipes.from_keys(keys, "Trainer")

    def _data(self) -> dict[str, Any]:
        """What is known of the data object: its name, and the length of its samples where they have one."""
        if not self.tokens_per_sample:
            return {"given": self.data}
        return {"given": self.data, "sequence_length": self.tokens_per_sample, "one_length": True}

    def _batch(self) -> dict[str, int]:
        if isinstance(self.plan, Plan) and self.global_batch is None and self.tokens_per_step is None:
            return {"global_batch": self.plan.decision.global_batch}
        if (self.global_batch is None) == (self.tokens_per_step is None):
            raise RecipeError(
                "The Trainer needs exactly one of global_batch and tokens_per_step.",
                fix="global_batch=256 (samples)",
            )
        if self.global_batch is not None:
            return {"global_batch": self.global_batch}
        if self.tokens_per_sample is None or self.tokens_per_step is None:
            raise RecipeError(
                "tokens_per_step needs data whose samples have one length.",
                fix="give global_batch (samples) instead",
            )
        samples, rest = divmod(self.tokens_per_step, self.tokens_per_sample)
        if rest or not samples:
            raise RecipeError(
                f"tokens_per_step = {self.tokens_per_step} is no multiple of {self.tokens_per_sample} tokens a sample.",
                fix=f"tokens_per_step={max(1, samples) * self.tokens_per_sample}",
            )
        return {"global_batch": samples}


def _plan_keys(plan: str | PlanRequest | Mapping[str, Any] | Plan) -> Any:
    if isinstance(plan, Plan):
        return "auto"  # the decision stands in the Plan; the rest of the recipe is the keywords'
    return msgspec.to_builtins(plan) if isinstance(plan, PlanRequest) else plan


def describe(value: Any) -> str:
    """A name for a callable or an object, for the record in the plan; of a string that names a model, itself."""
    if isinstance(value, str):
        return value
    named = value if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def run_name(run: str | Path | None) -> str:
    """`run=`, else runs/<name of the script>."""
    if run is not None:
        return str(run)
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return f"runs/{script or 'run'}"


def build_model(model: Any, recipe: Recipe) -> tuple[nn.Module, Initialize | None]:
    """The module, and how to fill its shards where it was built without memory. Raises: ModelError."""
    if isinstance(model, Arch):
        with torch.device("meta"):
            decoder = Decoder(model)
        return decoder, lambda module: initialize_decoder(module, recipe.seed)
    if isinstance(model, str):
        return hf.causal_lm(model, recipe.model.trainable, recipe.seed)
    if recipe.model.given is not None and recipe.model.trainable != "full":
        raise ModelError(
            "trainable is for a model of Hugging Face that is named, and the Trainer was handed a module.",
            why="of a module that is handed over, what requires gradients trains",
            fix="parameter.requires_grad_(False), or peft's get_peft_model, where the module is built",
        )
    return materialize.build(model, recipe.seed), None


def inputs_of(model: Any, inputs: Inputs | str) -> Inputs | str:
    """What a batch gives forward: of a Hugging Face model, whose forward takes anything, what is known to be meant."""
    return hf.inputs if isinstance(model, str) and isinstance(inputs, str) else inputs


def recipe_model(recipe: Recipe) -> Any:
    """The Arch, factory or folder of Hugging Face that a recipe's [model] names. Raises: RecipeError, ModelError."""
    model = recipe.model
    if model.hf is not None:
        return model.hf
    if model.factory is not None:
        return materialize.load_factory(model.factory)
    return recipe_arch(recipe, "gpu" if ranks.device_kind() == "cuda" else "cpu")


def require_vocabulary(module: nn.Module, data: Any) -> None:
    """Raises: ModelError where the largest embedding has fewer rows than the data has token ids."""
    ids = getattr(data, "vocab_size", None)
    rows = {name: m.num_embeddings for name, m in module.named_modules() if isinstance(m, nn.Embedding)}
    if ids is None or not rows or max(rows.values()) >= ids:
        return
    name = max(rows, key=lambda one: rows[one])
    raise ModelError(
        f"{name or 'The model'} embeds {rows[name]} token ids, and the data has {ids}.",
        why="byte tokens are 256 bytes and a separator between documents" if ids == 257 else "",
        fix=f"give the model a vocabulary of {ids} or more",
    )


def recipe_arch(recipe: Recipe, kind: str) -> Arch:
    model = recipe.model
    if model.preset is not None:
        name = getattr(model.preset, kind) if isinstance(model.preset, PresetByDevice) else model.preset
        return archs.preset(name)
    if model.config is not None:
        return archs.from_config_json(model.config)
    raise ModelError("This recipe's model cannot be built yet.", fix="use model.preset, model.config or model.factory")


def recipe_data(recipe: Recipe) -> tuple[Any, Any]:
    """(training data, held-out data or None) of a recipe's [data]. Rank 0 makes the token file first. Collective."""
    # A step's samples are of similar lengths where they differ, whatever the number of ranks.
    group = rule_of_thumb.global_batch(recipe)
    ranks.on_main(lambda: mixture.recipe_data(recipe.data, hf=recipe.model.hf, group=group) and None)
    return mixture.recipe_data(recipe.data, hf=recipe.model.hf, group=group)


def require_proved(model: Any, module: nn.Module, decision: Decision) -> None:
    """Raises: PlanInfeasible for a Hugging Face model with experts that a tensor group or a pipeline would cut."""
    axes = [axis for axis in planned_only.NOT_WITH_EXPERTS if getattr(decision.mesh, axis) > 1]
    experts = next((name for name, p in module.named_parameters() if p.ndim == 3 and ".experts." in name), "")
    if isinstance(model, str) and axes and experts:
        raise PlanInfeasible(
            f"{axes[0]} = {getattr(decision.mesh, axes[0])} with experts ({experts}) is not run yet.",
            why=planned_only.NOT_WITH_EXPERTS[axes[0]],
            fix='plan={"zero": 3} shards them over all ranks',
        )


def require_documents_apart(model: Any, data: Any) -> None:
    """Raises: ModelError for packed rows, and a model that is not known to keep what shares a row apart."""
    if not getattr(data, "packing", False):
        return
    if not isinstance(model, str):
        raise ModelError(
            "The data packs several documents into a row, and the model is none of Hugging Face.",
            why="they are kept apart by positions, which other models do not go by",
            fix="packing=False: rows are then padded to the longest of a batch",
        )
    documents.require_apart(model)


def next_token_loss(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> Loss:
    """Cross-entropy of the next token, summed over the labels that count: `labels` are shifted already.

    `outputs`: logits [B, S, V], or what holds them as `.logits` (a Hugging Face model's).
    """
    return Loss(*next_token_sums(getattr(outputs, "logits", outputs), batch["labels"]))


# Under tensor parallel it takes each rank's part of the vocabulary: logits are never gathered.
next_token_loss.takes_vocabulary_shards = True  # type: ignore[attr-defined]


def make_plan(recipe: Recipe, module: nn.Module) -> Plan:
    """Rank 0 plans for the world that came and publishes it. Collective."""
    shape = module.arch if isinstance(module, Decoder) else sum(p.numel() for p in module.parameters())

    def decide() -> Any:
        cluster = local.cluster_here(recipe.train.cluster)
        return msgspec.to_builtins(automatic.plan(recipe, shape, cluster, world=ranks.world()))

    return msgspec.convert(ranks.on_main(decide), Plan)


def obeying(plan: Plan, recipe: Recipe) -> Plan:
    """A Plan that was handed over, with the recipe of this run. Raises: PlanInfeasible where the two contradict."""
    decision = plan.decision
    batch = rule_of_thumb.global_batch(recipe)
    asked: list[tuple[str, object, object]] = [("global_batch", batch, decision.global_batch)]
    if recipe.train.precision != "auto":
        asked.append(("precision", recipe.train.precision, decision.precision))
    if recipe.batch.micro_batch != "auto":
        even = math.ceil(batch / (decision.mesh.data_parallel * decision.accumulation))
        asked.append(("micro_batch", min(recipe.batch.micro_batch, even), decision.micro_batch))
    for key, given, decided in asked:
        if given != decided:
            raise PlanInfeasible(
                f"{key} = {given}, and the plan was made for {key} = {decided}.",
                why="a Plan is a decision about one recipe",
                fix=f"leave {key} out, give {key} = {decided}, or let the run plan again",
            )
    return with_recipe(plan, recipe)


def require_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, decision: Decision) -> None:
    """Raises: ModelError for an optimizer of other parameters, or one that is wrong on shards."""
    own = {id(p) for p in module.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise ModelError(
            f"The optimizer holds {len(strangers)} parameters that the model has not.",
            why="it was built from the module before it was split",
            fix="optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=...): built from the m it is given",
        )
    if (decision.zero or decision.mesh.tp > 1) and not optimizers.is_elementwise(optimizer):
        raise ModelError(
            f"{type(optimizer).__name__} is not known to be element-wise.",
            why="each rank updates a part of every parameter, and the update would see only that part",
            fix="use AdamW, Adam or SGD, or train.plan = { zero = 0, tp = 1 }",
        )


def with_end(recipe: Recipe, steps: int | None, epochs: int | None, tokens: float | None) -> Recipe:
    """The recipe with run()'s own end, if it was given one. Raises: RecipeError unless there is exactly one."""
    given = {
        name: value for name, value in (("steps", steps), ("epochs", epochs), ("tokens", tokens)) if value is not None
    }
    if given:
        ends = {"steps": None, "epochs": None, "tokens": None, **given}
        if tokens is not None:
            ends["tokens"] = int(tokens)
        recipe = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, **ends))
    ends_set = [name for name in ("steps", "epochs", "tokens") if getattr(recipe.train, name) is not None]
    if len(ends_set) != 1:
        raise RecipeError(
            f"The run has {len(ends_set)} ends: {', '.join(ends_set) or 'none'}.",
            fix="run(steps=10_000), or epochs=, or tokens=",
        )
    return recipe


def total_steps(recipe: Recipe, data: Any, global_batch: int) -> int:
    """Steps to the end of the run. Raises: RecipeError where epochs or tokens cannot be turned into steps."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    if train.epochs is not None:
        if not hasattr(data, "steps_per_epoch"):
            raise RecipeError("epochs are not known of this data.", fix="give steps")
        return train.epochs * int(data.steps_per_epoch(global_batch))
    per_sample = getattr(data, "tokens_per_sample", None)
    if per_sample is None or train.tokens is None:
        raise RecipeError("tokens are not known of this data.", fix="give steps or epochs")
    return math.ceil(train.tokens / (per_sample * global_batch))


def factor(schedule: Schedule | Callable[[int], float] | None, total: int) -> Callable[[int], float]:
    """The learning rate's factor as a function of the step, 1..total."""
    if schedule is None:
        return lambda step: 1.0
    return schedule.resolve(total) if isinstance(schedule, Schedule) else schedule


def with_recipe(plan: Plan, recipe: Recipe) -> Plan:
    return msgspec.structs.replace(plan, recipe=recipe)


def stop_budget(recipe: Recipe) -> Budget:
    """How long this process has between a signal to stop and its end. Raises: RecipeError."""
    asked = recipe.checkpoint.notice_seconds
    return budget_of(None if asked == "auto" else asked, notice_seconds(), in_pod())
