"""`shardwise run`: a script of the user's own, on the devices of this machine."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

from shardwise.cli.follow import follow
from shardwise.errors import RecipeError
from shardwise.launch import local, run_folder


class Asked(NamedTuple):
    script: str
    arguments: tuple[str, ...]
    devices: int | None
    as_json: bool
    dry_run: bool


def run(asked: Asked) -> int:
    """Start the script's ranks and stand by them; the exit code of the whole."""
    script = Path(asked.script)
    if not script.is_file():
        raise RecipeError(f"There is no script {script}.", fix="shardwise run path/to/train.py")
    cluster = local.probe_cluster()
    ranks = asked.devices or cluster.devices
    if cluster.kind == "gpu" and ranks > cluster.devices:
        raise RecipeError(
            f"--devices {ranks}, and this machine has {cluster.devices} GPUs.",
            why="each rank needs a GPU of its own",
            fix=f"--devices {cluster.devices}",
        )
    logs = run_folder.new_logs_folder(Path("runs") / "logs", script.stem)
    job = local.Job(
        ranks=ranks,
        command=(asked.script, *asked.arguments),
        logs=str(logs),
        cores=cluster.node.host_cores or 1,
    )
    if asked.dry_run:
        command = local.render(job)
        print(json.dumps({"command": command, "ranks": ranks}) if asked.as_json else shlex.join(command))
        return 0
    followed = follow(job, None, 0, quiet_stdout=asked.as_json)
    if asked.as_json:
        print(json.dumps({"exit_code": followed.code, "ranks": ranks, "logs": str(logs)}))
    return followed.code
