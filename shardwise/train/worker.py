"""What each rank of `shardwise train` runs: `python -m shardwise.train.worker PLAN_FILE [--fresh]`."""

import sys
from pathlib import Path

import torch

from shardwise import ranks
from shardwise.errors import PlanInfeasible
from shardwise.models.decoder import Decoder, generate
from shardwise.plan.plan import Plan
from shardwise.train import failure
from shardwise.train.trainer import Trainer

SAMPLE_TOKENS = 200
PROMPT = b"def "


def main(arguments: list[str]) -> None:
    """Train the plan's recipe to its end. Collective."""
    failure.install()
    plan = Plan.from_json(Path(arguments[0]).read_bytes())
    failure.WHERE.folder = Path(plan.recipe.run)
    ranks.start()
    if plan.decision.mesh.world != ranks.world():
        raise PlanInfeasible(
            f"The plan is for {plan.decision.mesh.world} ranks; {ranks.world()} came.",
            fix=f"shardwise train RECIPE --devices {ranks.world()}, or start {plan.decision.mesh.world} ranks",
        )
    trainer = Trainer.from_recipe(plan.recipe, plan, fresh="--fresh" in arguments[1:])
    trainer.sample = lambda: sample(trainer)
    for _ in trainer.run():
        pass
    ranks.stop()


def sample(trainer: Trainer) -> str | None:
    """Text that the model writes, greedy enough to read; None for a model that is not our decoder, or cut into stages.

    Collective.
    """
    if not isinstance(trainer.model, Decoder) or trainer.parallel.pipeline is not None:
        return None
    generator = torch.Generator().manual_seed(trainer.plan.recipe.seed)
    prompt = torch.tensor([list(PROMPT)], dtype=torch.int64, device=trainer.device)
    tokens = generate(
        trainer.model, prompt, SAMPLE_TOKENS, temperature=0.7, vocabulary=256, generator=generator,
        multiple=trainer.plan.decision.mesh.tp,
    )  # fmt: skip
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


if __name__ == "__main__":
    main(sys.argv[1:])
