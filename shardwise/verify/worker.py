"""The processes of parity: `python -m shardwise.verify.worker FOLDER`, which holds task.json and gets the results.

One process imports torch, and every rank is forked from it before torch has a thread: an import costs seconds, and
eight ranks on two cores would pay it eight times, and again for the ranks that resume. Each is a process of its own
with gloo on loopback.
"""

import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.verify import mutations, training
from shardwise.verify.messages import About, Failure, Report, Task
from shardwise.verify.training import Trained

TIMEOUT = datetime.timedelta(seconds=60)
GRACE_SECONDS = 5.0


def main(folder: Path) -> int:
    """0 where every process ended well; the failures lie in the folder."""
    torch.set_num_threads(1)
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    world = task.cases[0].plan.decision.mesh.world
    # The hand-written loop before the ranks: where even that cannot train the model, there is nothing to compare.
    if not _all([("one", lambda: _alone(task, folder))], folder):
        return 1
    for name, resume in (("first", False), ("second", True)):
        store = folder / f"store-{name}"
        jobs = [(f"{rank}", _rank_job(task, folder, store, rank, world, resume)) for rank in range(world)]
        if not _all(jobs, folder):
            return 1
        if _unsaved(folder):
            break
    return 0


def _unsaved(folder: Path) -> bool:
    """Whether the ranks' checkpoint was refused, which all of them know: nothing can go on from it."""
    return bool(msgspec.json.decode((folder / "logic.0.json").read_bytes(), type=Report).told.unsaved)


def _alone(task: Task, folder: Path) -> None:
    for case in task.cases:
        _write(folder, case.name, "one", training.by_hand(case))
    plan = task.cases[0].plan
    found = training.probe(plan)
    about = About(tuple(training.ties(plan)), f"{found.verdict}: {found.reason}", training.draws(plan))
    (folder / "about.json").write_bytes(msgspec.json.encode(about))


def _rank_job(task: Task, folder: Path, store: Path, rank: int, world: int, resume: bool) -> Callable[[], None]:
    def job() -> None:
        _join(store, rank, world)
        mutations.plant(task.mutation)
        cases = task.cases[:1] if resume else task.cases
        for case in cases:
            trained = training.by_the_engine(case, folder / "run" / case.name, task.mutation, resume=resume)
            _write(folder, "resumed" if resume else case.name, f"{rank}", trained)
        if world > 1:
            dist.barrier()  # a rank that is done first must not close while others still speak
            dist.destroy_process_group()

    return job


def _join(store: Path, rank: int, world: int) -> None:
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world,
                                timeout=TIMEOUT)  # fmt: skip
        dist.barrier()


def _write(folder: Path, case: str, who: str, trained: Trained) -> None:
    report = Report(trained.told, trained.split, trained.masks)
    (folder / f"{case}.{who}.json").write_bytes(msgspec.json.encode(report))
    np.savez(folder / f"{case}.{who}.npz", **trained.tensors)


def _all(jobs: list[tuple[str, Callable[[], None]]], folder: Path) -> bool:
    """Run each job in a process of its own; where one fails, the others have a moment to say why, and are ended."""
    running = {_fork(who, job, folder): who for who, job in jobs}
    good, deadline = True, None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            del running[pid]
            if status and good:
                good, deadline = False, time.monotonic() + GRACE_SECONDS
        elif pid == 0:
            if deadline is not None and time.monotonic() > deadline:
                for other in running:
                    os.kill(other, signal.SIGKILL)
                deadline = None
            time.sleep(0.01)
    return good


def _fork(who: str, job: Callable[[], None], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        job()
    except BaseException as error:
        _tell(error, who, folder)
        os._exit(1)
    os._exit(0)


def _tell(error: BaseException, who: str, folder: Path) -> None:
    ours = isinstance(error, ShardwiseError)
    text: Any = error.what if ours else str(error)  # type: ignore[attr-defined]
    why, fix = (error.why, error.fix) if isinstance(error, ShardwiseError) else ("", "")
    failure = Failure(who, type(error).__name__, ours, text, why, fix, traceback.format_exc())
    partial = folder / f"partial.{who}"
    partial.write_bytes(msgspec.json.encode(failure))
    partial.rename(folder / f"failure.{time.monotonic_ns():020d}.{who}.json")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
