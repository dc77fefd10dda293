"""Before ranks are started: a process of its own builds the user's module and holds it against its plan."""

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from shardwise import errors
from shardwise.environment import child_environment
from shardwise.errors import ModelError
from shardwise.plan.plan import Plan


class Answer(msgspec.Struct, frozen=True):
    """What that process found: an error of ours by its kind, or why forward was not tried."""

    kind: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""
    not_tried: str = ""


def require_module(plan: Plan) -> str:
    """Hold the module of the recipe's factory against a plan that cuts it; why its forward was not tried, or empty.

    A module that no plan cuts is left to the ranks, and our own decoder to plan/check.py: nothing is started then. The
    files of a model of Hugging Face are held against its config whatever the plan.
    Raises: ModelError, and what else building the module raises of ours.
    """
    mesh, model = plan.decision.mesh, plan.recipe.model
    if model.hf is None and (model.factory is None or mesh.pp * mesh.tp == 1):
        return ""
    with tempfile.TemporaryDirectory(prefix="shardwise-module-") as name:
        plan_file, answer_file = Path(name) / "plan.json", Path(name) / "answer.json"
        plan_file.write_bytes(plan.to_json())
        done = subprocess.run(
            [sys.executable, "-m", "shardwise.train.before_ranks", str(plan_file), str(answer_file)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=child_environment({}),
        )  # fmt: skip
        if not answer_file.exists():
            raise ModelError(
                f"model.hf = {model.hf!r} could not be built."
                if model.hf is not None
                else f"model.factory = {model.factory!r} could not be built.",
                why=done.stderr.strip()[-2000:] or f"its process ended with {done.returncode}",
                fix="correct what it raises; every rank would meet it",
            )
        answer = msgspec.json.decode(answer_file.read_bytes(), type=Answer)
    if answer.kind:
        raise getattr(errors, answer.kind)(answer.what, why=answer.why, fix=answer.fix)
    return answer.not_tried
