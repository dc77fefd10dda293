"""A launcher or a rank that a signal has stopped, as the command above them sees it.

The watcher beside the ranks names who is stopped; but it begins with the first rank's training, and the launcher is not
its to watch: a rank that is stopped while it imports, or a launcher that is, would be waited for without end.
"""

import socket
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.launch import hang, local, processes
from shardwise.launch.hang import Hang, Seen

# Who is watched is named by the watcher first, which knows more of it.
LATER_SECONDS = 10.0
LOOK_SECONDS = 1.0


class Stopped:
    """Looks at a job's processes once a second."""

    def __init__(self, job: local.Job, launcher: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.job, self.launcher, self.clock = job, launcher, clock
        self.looked = clock()
        self.since: dict[int, float] = {}

    def found(self) -> bool:
        """Whether one has been stopped for `hang_seconds` and LATER_SECONDS; it stands in the job's logs then.

        Raises: OSError where it cannot be written.
        """
        now = self.clock()
        if not self.job.hang_seconds or now - self.looked < LOOK_SECONDS:
            return False
        self.looked = now
        stopped = [pid for pid in self._pids() if processes.facts(pid).state == "stopped"]
        self.since = {pid: self.since.get(pid, now) for pid in stopped}
        late = [pid for pid, since in self.since.items() if now - since >= self.job.hang_seconds + LATER_SECONDS]
        if late:
            path = Path(self.job.logs) / f"hang-node-{self.job.first_rank}-stopped.json"
            hang.write(path, self._told(late[0], now - self.since[late[0]]))
        return bool(late)

    def _pids(self) -> list[int]:
        return [self.launcher, *(pid for pid in local.worker_pids(self.launcher) if pid != self.launcher)]

    def _told(self, pid: int, seconds: float) -> Hang:
        ranks = self._pids()[1:]
        index = ranks.index(pid) if pid in ranks else 0
        rank, who = (
            self.job.first_rank + index,
            f"its process {pid}" if pid in ranks else f"its launcher, process {pid},",
        )
        seen = Seen(
            rank=rank, pid=pid, host=socket.gethostname(), phase="start", step=0, micro=0, steps=0,
            quiet_seconds=seconds, waits=False, collective="", collectives=0, state="stopped",
        )  # fmt: skip
        return Hang(
            rank=rank, phase="start", step=0, since_seconds=seconds, state="stopped",
            why=f"{who} is stopped (SIGSTOP, or a debugger)",
            fix=f"find who stopped it; kill -CONT {pid} wakes it", stuck=(rank,), ranks=(seen,),
        )  # fmt: skip
