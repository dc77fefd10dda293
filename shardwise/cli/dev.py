"""`shardwise dev`: for those who test Shardwise itself."""

import sys
from pathlib import Path
from typing import NamedTuple, get_args

from shardwise.cost.predicting import predict
from shardwise.cost.published import rows
from shardwise.cost.scored_model import memory_model, time_model
from shardwise.cost.scoring import score as scored
from shardwise.errors import EXIT_DONE, EXIT_FAILED, RecipeError, RunFolderError
from shardwise.report import chaos as chaos_report
from shardwise.report import score as report
from shardwise.verify.faults import Kind, drawn


def score(path: str, as_json: bool) -> int:
    """Print how far the cost model is from the measured runs of a CSV."""
    runs = rows(path)
    found = scored(runs, predict(runs, time_model, memory_model))
    print(report.as_json(found) if as_json else report.text(found))
    return 0


class Chaos(NamedTuple):
    """What `shardwise dev chaos` was asked for."""

    recipe: str
    overrides: tuple[str, ...]
    faults: int
    seed: int
    kinds: tuple[str, ...]
    devices: int
    folder: str
    as_json: bool


def chaos(asked: Chaos) -> int:
    """Train a scratch run undisturbed and under faults, and print what was survived; 1 where something was not."""
    from shardwise.verify import chaos as harness

    known = get_args(Kind)
    unknown = [kind for kind in asked.kinds if kind not in known]
    if unknown:
        raise RecipeError(
            f"--kind {unknown[0]!r} is no fault.", why=f"there are {', '.join(known)}", fix="give one of them"
        )
    folder = Path(asked.folder).resolve()
    if folder.exists():
        raise RunFolderError(
            f"{folder} is there already.",
            why="faults are let loose on a new scratch run only, never on one that somebody may want",
            fix="give another --out, or remove it",
        )
    recipe = Path(asked.recipe).resolve()
    reference, run = (
        harness.scratch(recipe, asked.overrides, folder / name, asked.devices) for name in ("whole", "run")
    )
    print("training undisturbed", file=sys.stderr)
    if (code := harness.undisturbed(reference)) != EXIT_DONE:
        raise RecipeError(
            f"The recipe does not train undisturbed: its command ended with {code}.",
            why=f"its screen is in {reference.logs}",
            fix="shardwise train it first",
        )
    faults = drawn(asked.faults, asked.seed, tuple(asked.kinds) or known)  # type: ignore[arg-type]
    verdict = harness.disturbed(run, reference, faults, lambda line: print(line, file=sys.stderr, flush=True))
    print(chaos_report.as_json(verdict, str(folder)) if asked.as_json else chaos_report.text(verdict, str(folder)))
    return EXIT_DONE if verdict.survived else EXIT_FAILED
