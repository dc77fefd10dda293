"""What a user fixes of a plan, as `tp=8`: names and values as they stand in a Decision, to columns of the space."""

import difflib
from collections.abc import Mapping, Sequence

from shardwise.cost.candidates import OFFLOAD, RECOMPUTE, SCHEDULES
from shardwise.errors import RecipeError
from shardwise.units import MIB

COUNTS = {
    "pp": "pp", "dp_replicate": "dp_replicate", "dp_shard": "dp_shard", "dp": "data_parallel", "cp": "cp", "tp": "tp",
    "ep": "ep", "micro_batch": "micro_batch", "accumulation": "accumulation", "stages_per_rank": "stages_per_rank",
    "bucket_cap_mb": "bucket_bytes",
}  # fmt: skip
WORDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "zero": ("zero", ("0", "1", "2", "3")),
    "schedule": ("schedule", SCHEDULES),
    "recompute": ("recompute", RECOMPUTE),
    "offload": ("offload", OFFLOAD),
    "compile": ("compiled", ("off", "blocks")),
    "sequence_parallel": ("sequence_parallel", ("false", "true")),
}


def parse(texts: Sequence[str]) -> dict[str, int]:
    """The columns and values of `tp=8`, `recompute=full`, `sequence_parallel=false`, ...

    Raises: RecipeError that shows the nearest name, or the values that there are.
    """
    return dict(_parse(text) for text in texts)


def _parse(text: str) -> tuple[str, int]:
    name, equals, value = (part.strip() for part in text.partition("="))
    known = [*COUNTS, *WORDS]
    if not equals or name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise RecipeError(
            f"--fix {text!r} fixes nothing.", why=f"what can be fixed: {', '.join(known)}", fix=f"--fix {nearest}=..."
        )
    if name in WORDS:
        column, words = WORDS[name]
        if value not in words:
            raise RecipeError(f"--fix {text!r}: {value!r} is no {name}.", fix=f"--fix {name}={' or '.join(words)}")
        return column, words.index(value)
    if not value.isdecimal() or int(value) < 1:
        raise RecipeError(f"--fix {text!r}: {value!r} is no whole number above 0.", fix=f"--fix {name}=2")
    return COUNTS[name], int(value) * (MIB if name == "bucket_cap_mb" else 1)


def name_of(column: str) -> str:
    """What a user calls a column."""
    names = {column: name for name, column in COUNTS.items()} | {column: name for name, (column, _) in WORDS.items()}
    return names[column]
