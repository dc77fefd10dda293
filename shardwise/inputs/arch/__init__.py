"""The model's shape: the Arch and what follows from it, read from config.json or taken from the public presets."""

from shardwise.inputs.arch.config_json import from_config_json
from shardwise.inputs.arch.presets import PRESETS, arch_of, preset
from shardwise.inputs.arch.shape import Arch, Experts, Latent, require_buildable, shape_problem

__all__ = [
    "PRESETS",
    "Arch",
    "Experts",
    "Latent",
    "arch_of",
    "from_config_json",
    "preset",
    "require_buildable",
    "shape_problem",
]
