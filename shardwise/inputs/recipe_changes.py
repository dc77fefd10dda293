"""What differs between a run's recipe and the one given now, and whether a run may change it on the way."""

import msgspec

from shardwise.inputs.recipe import Recipe


class Change(msgspec.Struct, frozen=True):
    """A key that differs between a run's recipe and the one given now; values as JSON."""

    key: str
    before: str
    after: str
    allowed: bool


# What a run may change on the way: how fast, how long, what is watched and kept; not what is trained on what.
ALLOWED_CHANGES = (
    "run",
    "optimizer.lr",
    "optimizer.schedule",
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.evaluate_every_steps",
    "train.cluster",
    "checkpoint",
    "log",
    "data.workers",
    # How the work is split, not what is computed: the way out of an out-of-memory error leads over these.
    "batch.micro_batch",
    "train.plan",
    "train.devices",
    "train.restarts",
    "train.guard_every_steps",
    "train.on_spike",
    "train.hang_seconds",
    "train.lost_seconds",
    "model.roles",
    "model.sequence_parallel",
)


def changed(old: Recipe, new: Recipe) -> list[Change]:
    """The keys that differ, in order of name; what is not allowed needs a fork."""
    before, after = _leaves(msgspec.to_builtins(old), ""), _leaves(msgspec.to_builtins(new), "")
    return [
        Change(key, before.get(key, "absent"), after.get(key, "absent"), _may_change(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def fixed_keys(recipe: Recipe) -> dict[str, str]:
    """What was given of the keys that a run may not change, as JSON: keys that later versions add change nothing."""
    return {key: value for key, value in _leaves(_given(recipe), "").items() if not _may_change(key)}


def _given(value: object) -> object:
    """A struct's fields that are not at their defaults."""
    if not isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    fields = msgspec.structs.fields(value)
    held = {field.name: getattr(value, field.name) for field in fields if getattr(value, field.name) != field.default}
    return {name: _given(below) for name, below in held.items()}


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in ALLOWED_CHANGES)


def _leaves(value: object, path: str) -> dict[str, str]:
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for key, below in value.items():
            found |= _leaves(below, f"{path}.{key}" if path else key)
        return found
    return {path: msgspec.json.encode(value).decode()}
