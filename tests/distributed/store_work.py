"""What the pool's ranks run to test whole runs whose checkpoints lie at a URL."""

import os
from typing import Any

import shardwise as sw
from shardwise import ranks
from shardwise.checkpoint import marks
from tests import s3_server
from tests.distributed.runs import digest, trainer_of


def train(
    folder: str, store: str, port: int, *, steps: int, fresh: bool = False, pin_at: int = 0, break_at: int = 0
) -> dict[str, Any]:
    """Run to `steps`: where it began, the bits that it ended with, and what ranks were told."""
    os.environ.update({**s3_server.KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    policy = sw.CheckpointPolicy(every_steps=2, keep=2, store=store)
    trainer = trainer_of(folder, checkpoint=policy, plan={"zero": 3}, micro_batch=4, fresh=fresh)
    first = 0
    for step in trainer.run(steps=steps):
        first = first or step.number
        if step.number == pin_at:
            trainer.save(pin=True)
        if step.number == break_at:
            break
    kept = [item.manifest.step for item in trainer.checkpointer.committed()] if ranks.is_main() else []
    pinned = sorted(marks.pinned(trainer.kept.store)) if ranks.is_main() else []
    return {"first": first, "bits": digest(trainer.model), "kept": kept, "pinned": pinned}
