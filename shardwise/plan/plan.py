"""The Plan: its inputs by value, the decision, and why. Frozen, versioned, JSON; all downstream obeys it."""

from typing import Annotated, Literal

import msgspec

from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import Cluster, Precision
from shardwise.inputs.recipe import PipelineSchedule, Recipe
from shardwise.plan.estimate import Estimate
from shardwise.plan.mesh import MeshShape

Positive = Annotated[int, msgspec.Meta(gt=0)]


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine obeys. `micro_batch` is in samples of one forward on one rank.

    `accumulation` is the number of micro-batches of a step, under a pipeline too. A rank holds `stages_per_rank` of the
    pipeline's stages; `stage_blocks`: the blocks of each stage, where they are not shared out evenly. `shares`: the
    micro-batches that each rank takes, by group of machines, where they are not equal; `accumulation` is the most.
    sequence_parallel "auto": as the recipe says.
    """

    mesh: MeshShape
    zero: Literal[0, 1, 2, 3]
    global_batch: Positive
    micro_batch: Positive
    accumulation: Positive
    precision: Precision
    schedule: Literal["none"] | PipelineSchedule = "none"
    stages_per_rank: Positive = 1
    stage_blocks: Literal["even"] | tuple[Positive, ...] = "even"
    shares: Literal["equal"] | tuple[Positive, ...] = "equal"
    recompute: Literal["none", "selective", "full"] = "none"
    offload: Literal["none", "cpu", "nvme"] = "none"
    compile: Literal["off", "blocks"] = "off"
    compression: Literal["none", "powersgd", "int8"] = "none"
    bucket_cap_mb: Literal["default"] | Positive = "default"
    sequence_parallel: Literal["auto"] | bool = "auto"


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs, decision and reasons. `arch` is absent where the model is the user's own module,
    or of a kind of Hugging Face that is not known.

    `estimate` is absent where nothing was predicted: there is no Arch, or the rule of thumb decided.
    """

    recipe: Recipe
    cluster: Cluster
    decision: Decision
    why: tuple[str, ...]
    arch: Arch | None = None
    schema_version: Literal[1] = 1
    shardwise_version: str = ""
    estimate: Estimate | None = None

    @property
    def ours(self) -> bool:
        """Whether `arch` is our own decoder's. Of a model of Hugging Face it is a shape to plan with, and no more."""
        return self.arch is not None and self.recipe.model.hf is None

    @property
    def sequence_parallel(self) -> Literal["auto"] | bool:
        """The decision's, or what the recipe asks for."""
        decided = self.decision.sequence_parallel
        return self.recipe.model.sequence_parallel if decided == "auto" else decided

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(raw: bytes) -> "Plan":
        """Raises: msgspec.ValidationError on an unknown key, a wrong type or another schema version."""
        return msgspec.json.decode(raw, type=Plan)
