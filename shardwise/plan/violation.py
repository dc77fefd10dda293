"""A rule that a Plan breaks, and what the rules have in common."""

from collections.abc import Callable

import msgspec

from shardwise.plan.plan import Plan


class Violation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A broken rule: what, why, the fix in words, and the same fix as overrides of recipe keys."""

    rule: str
    what: str
    why: str
    fix: str
    apply: dict[str, str | int] | None = None


Rule = Callable[[Plan, int], Violation | None]

# Degrees that are planned again after one of them was taken away.
REPLAN: dict[str, str | int] = {"train.plan.dp_replicate": "auto", "train.plan.dp_shard": "auto"}
