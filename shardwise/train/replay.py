"""What each rank of `shardwise checkpoints resume-check` runs: `python -m shardwise.train.replay PLAN_FILE STEP`."""

import sys
from pathlib import Path

from shardwise import ranks
from shardwise.plan.plan import Plan
from shardwise.train import failure
from shardwise.train.trainer import Trainer


def main(arguments: list[str]) -> None:
    """Go on with the plan's run up to a step, and save there. Collective."""
    failure.install()
    plan, until = Plan.from_json(Path(arguments[0]).read_bytes()), int(arguments[1])
    failure.WHERE.folder = Path(plan.recipe.run)
    ranks.start()
    for step in Trainer.from_recipe(plan.recipe, plan).run():
        if step.number == until:
            break
    ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
