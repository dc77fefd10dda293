"""`shardwise dev score`: for those who test Shardwise itself. The other of its verbs is in chaos.py."""

from shardwise.cost.predicting import predict
from shardwise.cost.published import rows
from shardwise.cost.scored_model import memory_model, time_model
from shardwise.cost.scoring import score as scored
from shardwise.report import score as report


def score(path: str, as_json: bool) -> int:
    """Print how far the cost model is from the measured runs of a CSV."""
    runs = rows(path)
    found = scored(runs, predict(runs, time_model, memory_model))
    print(report.as_json(found) if as_json else report.text(found))
    return 0
