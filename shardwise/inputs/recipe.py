"""The Recipe: what the user wants, as one frozen value. Its keys are the Trainer's keywords too."""

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shardwise.errors import RecipeError
from shardwise.inputs import store_url

Positive = Annotated[int, msgspec.Meta(gt=0)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveNumber = Annotated[float, msgspec.Meta(gt=0.0)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
DEVICES = "^(auto|[1-9][0-9]*:[1-9][0-9]*)$"
Role = Literal["column", "row", "embedding", "head", "replicated"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev"]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """A frozen value that crosses layers; unknown keys are errors."""


class PresetByDevice(Value, frozen=True):
    """One preset for CPU ranks and one for GPUs, chosen when the plan is made and said there."""

    cpu: str
    gpu: str


class LoraSpec(Value, frozen=True):
    """Low-rank adapters beside `targets` of every block; the weights themselves, of `base_bits` each, stay as they are.

    targets: names of layers; "auto": those of queries and values, or the one layer that holds them. alpha: the
    adapter's share is alpha / rank of its product; "auto": twice the rank. Source: Hu et al., arXiv 2106.09685.
    """

    rank: Positive
    targets: Literal["auto"] | tuple[str, ...] = "auto"
    alpha: Literal["auto"] | PositiveNumber = "auto"
    dropout: Fraction = 0.0
    base_bits: Literal[4, 8, 16] = 16


class TrainableSpec(Value, frozen=True):
    """Exactly one of: `frozen`, patterns of the names that are not trained ("blocks.0.*"); `lora`."""

    frozen: tuple[str, ...] = ()
    lora: LoraSpec | None = None


class ModelSpec(Value, frozen=True):
    """Exactly one of preset, config, hf, factory; `given` is set by a Trainer that was handed a module.

    `roles` says how tensor parallel splits a module, by a pattern of its path ("blocks.*.mixer.up" = "column"); what
    no pattern names is guessed. `sequence_parallel`: whether what lies between the split regions is split by position.
    `trainable` is for shapes; of a module handed over, what requires gradients trains.
    """

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
    roles: dict[str, Role] = {}
    sequence_parallel: Literal["auto"] | bool = "auto"
    trainable: Literal["full"] | TrainableSpec = "full"


class Source(Value, frozen=True):
    """One source of a weighted mixture."""

    text: tuple[str, ...]
    weight: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0


# `given` where a shape alone was planned: its sequence length is an assumption, and is counted with.
SHAPE_ALONE = "not given"


class DataSpec(Value, frozen=True):
    """Exactly one of text, mixture, chat; `given` is set by a Trainer that was handed a data object.

    tokenizer: "bytes", the folder of one, or "auto": the own one of model.hf, bytes for any other model.
    chat: JSON lines with a conversation each, its messages at `messages_key`, which the tokenizer's template (or the
    file `chat_template`) turns into text; the assistant's turns are learned. Of those with more tokens than
    `sequence_length` there may be none, or they are left out, or cut at the end. packing: several conversations share a
    row of `sequence_length` without seeing each other; else rows are as long as the longest of a batch.
    one_length: set with `given`, where every sample of it has `sequence_length` tokens.
    """

    text: tuple[str, ...] = ()
    mixture: tuple[Source, ...] = ()
    chat: tuple[str, ...] = ()
    given: str | None = None
    tokenizer: str = "auto"
    sequence_length: Positive = 256
    valid_fraction: Fraction = 0.01
    text_key: str = "text"
    messages_key: str = "messages"
    chat_template: str = ""
    packing: bool = True
    too_long: Literal["refuse", "leave_out", "cut"] = "refuse"
    workers: Literal["auto"] | NonNegative = "auto"
    one_length: bool = False

    @property
    def length_is_known(self) -> bool:
        """Whether samples are `sequence_length` tokens long; those of a Trainer's own data may be anything."""
        return self.one_length or self.given in (None, SHAPE_ALONE)


class BatchSpec(Value, frozen=True):
    """The global batch: exactly one of tokens_per_step and global_batch (samples)."""

    tokens_per_step: Positive | None = None
    global_batch: Positive | None = None
    micro_batch: Literal["auto"] | Positive = "auto"


class ScheduleSpec(Value, frozen=True):
    """A factor on the learning rate, a pure function of the step. `decay_steps` "auto": to the last step."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: NonNegative = 0
    decay_steps: Literal["auto"] | Positive = "auto"
    final_factor: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0


class OptimizerSpec(Value, frozen=True):
    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Annotated[float, msgspec.Meta(gt=0.0)] = 3e-4
    weight_decay: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    clip_norm: Annotated[float, msgspec.Meta(gt=0.0)] | Literal["off"] = 1.0
    schedule: ScheduleSpec = ScheduleSpec()


class PlanRequest(Value, frozen=True):
    """Degrees and options that the user fixes; what is absent is planned.

    `schedule`, `stages_per_rank` and `stage_blocks` (the blocks of each stage, in order) are the pipeline's: they say
    nothing where pp is 1 and are refused there.
    """

    pp: Positive = 1
    dp_replicate: Positive | Literal["auto"] = "auto"
    dp_shard: Positive | Literal["auto"] = "auto"
    cp: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    schedule: Literal["auto"] | PipelineSchedule = "auto"
    stages_per_rank: Literal["auto"] | Positive = "auto"
    stage_blocks: Literal["even"] | tuple[Positive, ...] = "even"
    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "cpu", "nvme"] = "none"
    compile: Literal["auto", "off", "blocks"] = "auto"
    compression: Literal["none", "powersgd", "int8"] = "none"
    bucket_cap_mb: Literal["auto"] | Positive = "auto"


class Restarts(Value, frozen=True):
    """How many attempts may end by a crash or a lost rank, and by a hang, before the run ends; 0 is none."""

    crashes: NonNegative = 3
    hangs: NonNegative = 2


class TrainSpec(Value, frozen=True):
    """Exactly one of steps, epochs, tokens says when it is finished. `guard_every_steps`: 0 is never.

    on_spike: of a loss that is not finite three times in a row, and of a spike that lasts: told; the run goes back to a
    checkpoint from before it; or goes back and passes the samples over that it came with.

    cluster: "local", or a file that `shardwise doctor --measure` wrote on this machine: the plan then knows its speed.
    devices: ranks on each node; "2:4" is four, and as few as two where others failed.
    hang_seconds: a rank that makes no progress for so long in a step is named, and all are ended; 0 is never.
    lost_seconds: of several nodes, one that is not heard of for so long is given up; it ends itself in half of that.
    """

    steps: Positive | None = None
    epochs: Positive | None = None
    tokens: Positive | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64", "fp8"] = "auto"
    plan: Literal["auto"] | PlanRequest = "auto"
    devices: Positive | Annotated[str, msgspec.Meta(pattern=DEVICES)] = "auto"
    cluster: str = "local"
    evaluate_every_steps: NonNegative = 0
    guard_every_steps: NonNegative = 100
    on_spike: Literal["tell", "roll_back", "pass_over"] = "tell"
    restarts: Restarts = Restarts()
    hang_seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 60.0
    lost_seconds: Annotated[float, msgspec.Meta(ge=10.0)] = 20.0


def device_span(devices: int | str) -> tuple[int, int] | None:
    """Of train.devices, the fewest and the most ranks on a node; None for "auto".

    Raises: RecipeError where the fewest are more than the most.
    """
    if devices == "auto":
        return None
    least, _, most = str(devices).partition(":")
    span = int(least), int(most or least)
    if span[0] > span[1]:
        raise RecipeError(
            f'train.devices = "{devices}" asks for at least {span[0]} and at most {span[1]}.',
            why="the fewest come first",
            fix=f'train.devices = "{span[1]}:{span[0]}"',
        )
    return span


class History(Value, frozen=True):
    """A thinning past: beside the newest, the last checkpoint of each of so many hours and days that have one."""

    hourly: NonNegative = 0
    daily: NonNegative = 0


class CheckpointPolicy(Value, frozen=True):
    """Save every so many steps (0: only at the end and when stopped); keep the newest `keep`, a `history`, and the
    `best` many by an evaluation at a checkpoint's own step: `best_by` the "lowest loss", or "highest accuracy".

    "auto": as often as what a save costs and how often runs die suggest, and at least every 500 steps.
    `notice_seconds`: between the signal to stop and the end of the process; "auto": as the launcher says, else 15.
    `store`: a folder or URL (s3://bucket/prefix) for them; "" is checkpoints/ in the run folder.
    """

    every_steps: Literal["auto"] | NonNegative = "auto"
    keep: Positive = 3
    history: History = History()
    best: NonNegative = 0
    best_by: Annotated[str, msgspec.Meta(pattern=r"^(lowest|highest) \S+$")] = "lowest loss"
    store: str = ""
    asynchronous: bool = True
    retries: NonNegative = 3
    abort_after: NonNegative = 0
    notice_seconds: Literal["auto"] | PositiveNumber = "auto"


class Recipe(Value, frozen=True):
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


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A TOML file's Recipe, with `overrides` ("optimizer.lr=1e-4") on top.

    Raises: RecipeError that names the file, the full key and the nearest known one.
    """
    path = Path(path)
    return from_keys(with_overrides(_read_toml(path), overrides), where=str(path))


def from_keys(keys: Mapping[str, object], where: str = "recipe") -> Recipe:
    """The Recipe that nested keys describe; strict, and complete. `run` defaults to runs/<stem of where>.

    Raises: RecipeError.
    """
    _refuse_unknown(keys, where)
    try:
        recipe = msgspec.convert(_whole_counts(keys), Recipe)
    except msgspec.ValidationError as error:
        raise _invalid(error, where) from None
    require_complete(recipe, where)
    # An empty folder's name is the working directory, which is nobody's run.
    return recipe if recipe.run else msgspec.structs.replace(recipe, run=f"runs/{Path(where).stem}")


def require_complete(recipe: Recipe, where: str = "recipe") -> None:
    """Raises: RecipeError where a choice of exactly one is not made or made twice, or evaluation has no data."""
    model, data, batch, train = recipe.model, recipe.data, recipe.batch, recipe.train
    store_url.require_folder(recipe.run)
    store_url.require_plain(recipe.checkpoint.store, "checkpoint.store")
    choices: list[tuple[str, dict[str, object], str]] = [
        (
            "model",
            {key: getattr(model, key) for key in ("preset", "config", "hf", "factory", "given")},
            'preset = "decoder-2m"',
        ),
        (
            "data",
            {key: getattr(data, key) for key in ("text", "mixture", "chat", "given")},
            'text = ["stdlib:**/*.py"]',
        ),
        (
            "batch",
            {key: getattr(batch, key) for key in ("tokens_per_step", "global_batch")},
            "global_batch = 64",
        ),
        ("train", {key: getattr(train, key) for key in ("steps", "epochs", "tokens")}, "steps = 1000"),
    ]
    if train.evaluate_every_steps and data.given is None and data.valid_fraction == 0:
        raise RecipeError(
            f"{where}: train.evaluate_every_steps = {train.evaluate_every_steps}, and there is nothing to evaluate on.",
            why="data.valid_fraction is 0",
            fix="data.valid_fraction = 0.01, or train.evaluate_every_steps = 0",
        )
    if data.chat and data.packing and model.hf is None:
        raise RecipeError(
            f"{where}: data.packing = true, and the model is none of Hugging Face.",
            why="conversations that share a row are kept apart by positions, which other models do not go by",
            fix="data.packing = false: rows are then padded to the longest of a batch",
        )
    if isinstance(model.trainable, TrainableSpec):
        parts: dict[str, object] = {"frozen": model.trainable.frozen, "lora": model.trainable.lora}
        choices.append(("model.trainable", parts, "lora = { rank = 8 }"))
    device_span(train.devices)
    for table, values, example in choices:
        chosen = [key for key, value in values.items() if value not in (None, ())]
        if table == "train" and not chosen and model.given is not None:
            continue  # a Trainer in a script: its run() says when it ends
        if len(chosen) != 1:
            names = ", ".join(key for key in values if key != "given")
            raise RecipeError(
                f"{where}: [{table}] has {' and '.join(chosen) if chosen else 'none'} of {names}.",
                why="exactly one of them decides",
                fix=f"keep {chosen[0]} alone" if chosen else f"write {example} under [{table}]",
            )


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe {path}.", fix="give the path of a TOML recipe") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path} cannot be read.", why=str(error), fix="correct the file") from None


def with_overrides(keys: Mapping[str, object], overrides: Sequence[str]) -> Mapping[str, object]:
    """Nested keys with each "optimizer.lr=1e-4" placed in its table.

    Raises: RecipeError.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            raise RecipeError(
                f"--set {override!r} is not KEY=VALUE.",
                fix="write --set optimizer.lr=1e-4, the key with its table",
            )
        keys = _placed(keys, parts, _toml_value(text.strip()))
    return keys


def _toml_value(text: str) -> object:
    """A TOML value; a bare word is a string, as in --set train.precision=bf16."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _placed(keys: Mapping[str, object], parts: Sequence[str], value: object) -> dict[str, object]:
    if len(parts) == 1:
        return {**keys, parts[0]: value}
    below = keys.get(parts[0])
    return {**keys, parts[0]: _placed(below if isinstance(below, Mapping) else {}, parts[1:], value)}


def _whole_counts(keys: Mapping[str, object]) -> Mapping[str, object]:
    """`tokens = 2e9` is a whole number that TOML reads as a float."""
    train = keys.get("train")
    if isinstance(train, Mapping) and isinstance(train.get("tokens"), float) and train["tokens"].is_integer():
        return {**keys, "train": {**train, "tokens": int(train["tokens"])}}
    return keys


def _refuse_unknown(keys: Mapping[str, object], where: str) -> None:
    for path in _unknown_paths(keys, Recipe, ""):
        nearest = _nearest_key(path)
        raise RecipeError(
            f"{where}: unknown key {path}.",
            why=f"the nearest known key is {nearest}",
            fix=f"write {nearest}, or remove {path}",
        )


def _unknown_paths(value: object, kind: object, prefix: str) -> Iterator[str]:
    """Full paths of the keys that no struct in `kind` has."""
    if isinstance(value, Mapping):
        struct = _struct_in(kind)
        if struct is None:
            return
        hints = typing.get_type_hints(struct, include_extras=True)
        for key, below in value.items():
            if key not in hints:
                yield f"{prefix}{key}"
            else:
                yield from _unknown_paths(below, hints[key], f"{prefix}{key}.")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_paths(item, kind, f"{prefix.rstrip('.')}[{index}].")


def _struct_in(kind: object) -> type[Value] | None:
    """The struct that a type, a union or a tuple of structs holds, if there is one."""
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind if issubclass(kind, Value) else None
    return next((found for part in typing.get_args(kind) if (found := _struct_in(part))), None)


def known_keys(kind: type[Value] = Recipe, prefix: str = "") -> list[str]:
    """Every key of a recipe by its full path."""
    paths = []
    for key, hint in typing.get_type_hints(kind, include_extras=True).items():
        below = _struct_in(hint)
        paths.append(f"{prefix}{key}")
        if below is not None:
            paths.extend(known_keys(below, f"{prefix}{key}."))
    return [path for path in paths if not path.endswith(".given")]


def _nearest_key(path: str) -> str:
    """The same table first, then the same name in another table, then the likest path."""
    known = known_keys()
    table, _, name = path.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if near:
        return siblings[near[0]]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    return elsewhere[0] if elsewhere else difflib.get_close_matches(path, known, n=1, cutoff=0.0)[0]


def _invalid(error: msgspec.ValidationError, where: str) -> RecipeError:
    message, _, location = str(error).partition(" - at `$.")
    key = location.rstrip("`")
    if key:
        return RecipeError(f"{where}: {key} is not valid.", why=message, fix=f"correct {key}")
    return RecipeError(f"{where} is not valid.", why=message, fix="add or correct this key")
