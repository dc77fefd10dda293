"""`shardwise dev chaos`: a scratch run, undisturbed and under faults."""

import sys
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import EXIT_DONE, EXIT_FAILED, RecipeError, RunFolderError
from shardwise.report import chaos as report
from shardwise.verify import chaos as harness
from shardwise.verify import chaos_disk, chaos_store
from shardwise.verify.faults import KINDS, OF_WHERE, Kind, Where, drawn, kinds_at


class Asked(NamedTuple):
    """What `shardwise dev chaos` was asked for."""

    recipe: str
    overrides: tuple[str, ...]
    faults: int
    seed: int
    kinds: tuple[str, ...]
    devices: int
    where: Where
    folder: str
    as_json: bool


def chaos(asked: Asked) -> int:
    """Train a scratch run undisturbed and under faults, and print what was survived; 1 where something was not.

    Raises: RecipeError, RunFolderError.
    """
    kinds = kinds_of(asked)
    folder = Path(asked.folder).resolve()
    if folder.exists():
        raise RunFolderError(
            f"{folder} is there already.",
            why="faults are let loose on a new scratch run only, never on one that somebody may want",
            fix="give another --out, or remove it",
        )
    recipe = Path(asked.recipe).resolve()
    reference = harness.scratch(recipe, asked.overrides, folder / "whole", asked.devices)
    run = harness.scratch(recipe, asked.overrides, folder / "run", asked.devices, asked.where)
    _say("training undisturbed")
    if (code := harness.undisturbed(reference)) != EXIT_DONE:
        raise RecipeError(
            f"The recipe does not train undisturbed: its command ended with {code}.",
            why=f"its screen is in {reference.logs}",
            fix="shardwise train it first",
        )
    verdict = harness.disturbed(run, reference, drawn(asked.faults, asked.seed, kinds), _say)
    print(report.as_json(verdict, str(folder)) if asked.as_json else report.text(verdict, str(folder)))
    return EXIT_DONE if verdict.survived else EXIT_FAILED


def kinds_of(asked: Asked) -> tuple[Kind, ...]:
    """Those that are asked for, or all that can befall such a run here. Raises: RecipeError."""
    able = kinds_at(asked.where)
    if (reason := _not_here(asked.where)) and asked.where == "s3":
        raise RecipeError("--store s3 cannot be used here.", why=reason, fix="pip install 'shardwise[s3]'")
    for kind in asked.kinds:
        if kind not in KINDS:
            raise RecipeError(
                f"--kind {kind!r} is no fault.", why=f"there are {', '.join(KINDS)}", fix="give one of them"
            )
        if kind not in able:
            other = next(where for where, kinds in OF_WHERE.items() if kind in kinds)
            raise RecipeError(
                f"--kind {kind!r} does not come with --store {asked.where}.",
                why="such a run keeps no checkpoint where it could befall one",
                fix=f"--store {other}",
            )
        if kind == "slow disk" and reason:
            raise RecipeError("--kind 'slow disk' cannot be had here.", why=reason, fix="leave it out")
    if asked.kinds:
        return tuple(kind for kind in KINDS if kind in asked.kinds)
    if reason:
        _say(f"slow disk is left out: {reason}")
    return tuple(kind for kind in able if kind != "slow disk" or not reason)


def _not_here(where: Where) -> str:
    """What keeps this machine from what is to stand between a run and its checkpoints; empty where nothing does."""
    return chaos_disk.why_not() if where == "disk" else chaos_store.why_not()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
