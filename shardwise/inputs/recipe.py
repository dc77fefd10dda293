"""The Recipe: what the user wants, as one frozen value. Its keys and the Trainer's keywords are the same names."""

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(gt=0)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """A frozen value that crosses layers; unknown keys are errors."""


class PresetByDevice(Value):
    """One preset for CPU ranks and one for GPUs, chosen when the plan is made and said there."""

    cpu: str
    gpu: str


class ModelSpec(Value):
    """Exactly one of preset, config, hf, factory; `given` is set by a Trainer that was handed a module."""

    preset: str | PresetByDevice | None = None
    config: str | None = None
    hf: str | None = None
    factory: str | None = None
    given: str | None = None
    blocks: str = "auto"
    fp32_modules: tuple[str, ...] = ()
    sync_batchnorm: bool = False
    mixes_samples: Literal["refuse", "accept"] = "refuse"
    unused_parameters: tuple[str, ...] = ()


class Source(Value):
    """One source of a weighted mixture."""

    text: tuple[str, ...]
    weight: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0


class DataSpec(Value):
    """Exactly one of text, mixture; `given` is set by a Trainer that was handed a data object."""

    text: tuple[str, ...] = ()
    mixture: tuple[Source, ...] = ()
    given: str | None = None
    tokenizer: str = "bytes"
    sequence_length: Positive = 256
    valid_fraction: Fraction = 0.01
    text_key: str = "text"
    workers: Literal["auto"] | NonNegative = "auto"


class BatchSpec(Value):
    """The global batch: exactly one of tokens_per_step and global_batch (samples)."""

    tokens_per_step: Positive | None = None
    global_batch: Positive | None = None
    micro_batch: Literal["auto"] | Positive = "auto"


class ScheduleSpec(Value):
    """A factor on the learning rate: a pure function of the step. `decay_steps` "auto" means to the last step."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: NonNegative = 0
    decay_steps: Literal["auto"] | Positive = "auto"
    final_factor: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0


class OptimizerSpec(Value):
    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Annotated[float, msgspec.Meta(gt=0.0)] = 3e-4
    weight_decay: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    clip_norm: Annotated[float, msgspec.Meta(gt=0.0)] | Literal["off"] = 1.0
    schedule: ScheduleSpec = ScheduleSpec()


class PlanRequest(Value):
    """Degrees that the user fixes; what is absent is planned."""

    pp: Positive = 1
    dp_replicate: Positive | Literal["auto"] = "auto"
    dp_shard: Positive | Literal["auto"] = "auto"
    cp: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "cpu", "nvme"] = "none"
    compile: Literal["auto", "off", "blocks"] = "auto"
    compression: Literal["none", "powersgd", "int8"] = "none"
    bucket_cap_mb: Literal["auto"] | Positive = "auto"


class TrainSpec(Value):
    """Exactly one of steps, epochs, tokens says when it is finished."""

    steps: Positive | None = None
    epochs: Positive | None = None
    tokens: Positive | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    plan: Literal["auto"] | PlanRequest = "auto"
    devices: Literal["auto"] | Positive = "auto"
    evaluate_every_steps: NonNegative = 0


class CheckpointPolicy(Value):
    """Save every so many steps (0: only at the end and when stopped); keep the newest `keep`."""

    every_steps: NonNegative = 500
    keep: Positive = 3


class Recipe(Value):
    """What the user wants."""

    model: ModelSpec
    data: DataSpec
    batch: BatchSpec
    schema_version: Literal[1] = 1
    run: str = ""
    seed: NonNegative = 0
    optimizer: OptimizerSpec = OptimizerSpec()
    train: TrainSpec = TrainSpec()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    log: tuple[str, ...] = ()
