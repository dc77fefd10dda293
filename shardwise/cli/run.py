"""`shardwise run`: a script of the user's own, on the devices of this machine."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.fork import beginnings
from shardwise.checkpoint.lineage import kept_at
from shardwise.cli.checkpoints import told
from shardwise.cli.follow import follow, say, tell
from shardwise.errors import RecipeError
from shardwise.events.reader import read
from shardwise.inputs.hardware import Cluster
from shardwise.inputs.recipe import Restarts
from shardwise.launch import local, run_folder
from shardwise.launch.attempts import Again, Followed, exit_of, supervised
from shardwise.launch.progress import Progress
from shardwise.launch.supervise import Device, Exit, Span, Stop, too_few, world_of


class Asked(NamedTuple):
    script: str
    arguments: tuple[str, ...]
    devices: int | None
    as_json: bool
    dry_run: bool
    restarts: int | None = None


def run(asked: Asked) -> int:
    """Start the script's ranks and stand by them, attempt after attempt; the exit code of the whole."""
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
    if asked.dry_run:
        logs = run_folder.new_logs_folder(Path("runs") / "logs", script.stem)
        command = local.render(_job(asked, ranks, cluster, logs))
        print(json.dumps({"command": command, "ranks": ranks}) if asked.as_json else shlex.join(command))
        return 0
    attempts = _Attempts(asked, ranks, cluster)
    followed = supervised(attempts.folder, attempts.attempt, attempts.prepare, attempts.budgets, say)
    tell(followed)
    if asked.as_json:
        print(json.dumps({"exit_code": followed.code, "ranks": ranks, "logs": followed.logs}))
    return followed.code


def _job(asked: Asked, ranks: int, cluster: Cluster, logs: Path) -> local.Job:
    return local.Job(
        ranks=ranks,
        command=(asked.script, *asked.arguments),
        logs=str(logs),
        cores=cluster.node.host_cores or 1,
        tells=str(logs / "run.txt"),
        on_cpu=cluster.kind == "cpu",
    )


class _Attempts:
    """The attempts of a script: it is started again where its Trainer has something to go on from, or when asked."""

    def __init__(self, asked: Asked, ranks: int, cluster: Cluster) -> None:
        self.asked, self.ranks, self.cluster = asked, ranks, cluster
        self.budgets = Restarts() if asked.restarts is None else Restarts(crashes=asked.restarts)
        self.job = _job(asked, ranks, cluster, Path("runs") / "logs")

    def folder(self) -> Path | None:
        return run_folder.told(self.job.tells)

    def attempt(self, before: int, came: list[int], progress: Progress) -> tuple[Exit, Followed]:
        logs = run_folder.new_logs_folder(Path("runs") / "logs", Path(self.asked.script).stem)
        self.job = _job(self.asked, self.ranks, self.cluster, logs)
        followed = follow(self.job, None, 0, came=came, quiet_stdout=self.asked.as_json)
        number = self._take(progress)
        return exit_of(followed, number or before + 1, progress, tuple(range(self.ranks))), followed

    def _take(self, progress: Progress) -> int:
        """Read what the script's Trainer told of this attempt; its number, 0 where there was none."""
        folder = self.folder()
        record = run_folder.read_record(folder) if folder is not None else None
        if folder is None or record is None:
            return 0
        path = run_folder.events_path(folder, record.attempts)
        for event in read(path) if path.exists() else ():
            progress.take(event)
        return record.attempts

    def prepare(self, leave_out: frozenset[Device]) -> int:
        folder = self.folder()
        if self.asked.restarts is None and not _goes_on(folder):
            raise Again(Stop(1, "no checkpoint holds anything of it; --restarts N starts it again from its beginning"))
        here = local.probe_cluster().devices if self.cluster.kind == "gpu" else None
        span = Span(self.ranks, self.ranks)
        # Whatever the script makes of its world, nobody said that it may be another one.
        if world_of(span, here, 0) is None:
            raise Again(too_few(span, here or 0))
        return self.ranks


def _goes_on(folder: Path | None) -> bool:
    """Whether the run in this folder has a checkpoint to go on from, in its own folder or in its store.

    Raises: CheckpointError where its store cannot be read.
    """
    record = run_folder.read_record(folder) if folder is not None else None
    if folder is None or record is None:
        return False
    with told():
        return bool(beginnings(*kept_at(folder, record.recipe)))
