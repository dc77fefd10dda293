"""The watcher of a node: a process of its own, without torch, that reads the heartbeats of the ranks beside it.

It is started by the node's first rank (resilience/watchdog.py), in a session of its own, and outlives every rank: so it
sees a rank that holds the GIL and a launcher that was killed, and nothing that they do stops it. When a rank hangs it
asks all for their stacks, writes what they say below the run's hangs/, says who it was, and ends them all; when the
ranks have ended it ends what they left behind, and then itself.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardwise.environment import hostname
from shardwise.events.values import Hung
from shardwise.events.writer import EventWriter
from shardwise.launch import dump, hang, heartbeat, processes
from shardwise.launch.hang import Hang, Kind, Seen
from shardwise.launch.heartbeat import Beat
from shardwise.launch.processes import Process
from shardwise.launch.views import Views

# TERM, and this much later KILL: the ranks are stuck, but what they started may have something to put away.
GRACE_SECONDS = 3.0
END_SECONDS = 25.0
LAUNCHER_SECONDS = 15.0
# Beyond their notice, where whoever started the ranks is gone: they were told to end by the kernel, and should have.
ORPHANED_SECONDS = 5.0
TREE_SECONDS = 2.0
# For the run's folder, which may lie on a file system that does not answer; the hang is told on the screen anyway.
FILES_SECONDS = 5.0


class Watched(msgspec.Struct, frozen=True):
    """What a watcher is told. folder: the node's heartbeats; run: the run's folder; logs: the launcher's, or empty.

    first, local, world: the node's first rank, how many it has, how many there are; launcher: the process that started
    the ranks and would end them, 0 where none does; notice_seconds: what a rank has to save once it is told to end.
    """

    folder: str
    run: str
    first: int
    local: int
    world: int
    hang_seconds: float
    launcher: int = 0
    notice_seconds: float = 15.0
    logs: str = ""


class Silence:
    """For how long a rank has said nothing, on a clock that only runs while the watcher itself does."""

    def __init__(self) -> None:
        self.beat: Beat | None = None
        self.seconds = 0.0

    def look(self, beat: Beat, elapsed: float) -> tuple[Kind, float] | None:
        """The silence that this beat ended, and its kind; None where nothing is new."""
        before, silent = self.beat, self.seconds
        if before is not None and (before.pid, before.sequence) == (beat.pid, beat.sequence):
            self.seconds += elapsed
            return None
        self.beat, self.seconds = beat, 0.0
        if before is None or before.pid != beat.pid or before.phase in heartbeat.UNWATCHED:
            return None
        return hang.kind_of(before.phase, before.steps), silent + elapsed


class Watcher:
    """The ranks of one node, and what the watchers of other nodes tell of theirs."""

    def __init__(self, watched: Watched, views: Views | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.watched, self.views, self.clock = watched, views, clock
        self.folder, self.host = Path(watched.folder), hostname()
        self.poll_seconds = min(1.0, max(0.05, watched.hang_seconds / 40))
        self.silences = {rank: Silence() for rank in range(watched.first, watched.first + watched.local)}
        self.longest: dict[Kind, float] = {}
        self.last: float | None = None
        self.orphaned_seconds = 0.0
        self.ranks: dict[int, Process] = {}
        self.below: dict[int, dict[int, Process]] = {}
        self.sessions: set[int] = set()
        self.tree_looked = float("-inf")

    def look(self) -> list[Seen]:
        """Every rank that has begun, as it is now."""
        now = self.clock()
        # A watcher that was stopped, or starved, saw nothing meanwhile, and accuses nobody of that silence.
        elapsed = 0.0 if self.last is None else min(now - self.last, 2 * self.poll_seconds)
        self.last = now
        for rank, silence in self.silences.items():
            beat = heartbeat.read(heartbeat.record_path(self.folder, rank))
            if beat is not None:
                self._meet(rank, beat)
                if (healthy := silence.look(beat, elapsed)) is not None:
                    self.longest[healthy[0]] = max(healthy[1], self.longest.get(healthy[0], 0.0))
        if now - self.tree_looked >= TREE_SECONDS:
            self.tree_looked = now
            self.remember()
        gone = self.watched.launcher and processes.stat(self.watched.launcher) is None
        self.orphaned_seconds = self.orphaned_seconds + elapsed if gone else 0.0
        here = [self._seen(silence.beat, silence.seconds) for silence in self.silences.values() if silence.beat]
        return here if self.views is None else [*here, *self.views.others(here, elapsed)]

    def _meet(self, rank: int, beat: Beat) -> None:
        known = self.ranks.get(rank)
        if (known is None or known.pid != beat.pid) and (begun := processes.process(beat.pid)) is not None:
            self.ranks[rank] = begun
            seen = processes.stat(beat.pid)
            if seen is not None and seen.session == beat.pid:  # torchrun gives each rank a session of its own
                self.sessions.add(beat.pid)

    def remember(self) -> None:
        """Who lies below each rank: a parent that is gone no longer tells."""
        for rank, one in self.ranks.items():
            known = self.below.setdefault(rank, {})
            for pid in processes.tree([one.pid])[1:]:
                if pid not in known and pid != os.getpid() and (begun := processes.process(pid)) is not None:
                    known[pid] = begun

    def _seen(self, beat: Beat, silent: float) -> Seen:
        one = self.ranks.get(beat.rank)
        state: Any = "running"
        if one is None or not processes.alive(one):
            state = "gone"
        elif silent >= 2 * self.poll_seconds:  # a rank that has just spoken runs
            state = getattr(processes.stat(beat.pid), "state", "gone")
        return Seen(
            rank=beat.rank, pid=beat.pid, host=self.host, phase=beat.phase, step=beat.step, micro=beat.micro,
            steps=beat.steps, quiet_seconds=silent, waits=beat.waits, collective=beat.collective,
            collectives=beat.entered, state=state,
        )  # fmt: skip

    def hangs(self, seen: Sequence[Seen]) -> bool:
        told = self.views is not None and self.views.alarm()
        return told or hang.hangs(seen, self.watched.hang_seconds, self.longest)

    def ended(self) -> bool:
        """Whether the ranks that have begun are all gone; also those that went before the watcher could look."""
        begun = any(silence.beat is not None for silence in self.silences.values())
        return begun and not any(processes.alive(one) for one in self.ranks.values())

    def in_order(self) -> bool:
        """Whether every rank said its last word."""
        return all(s.beat is None or s.beat.phase in heartbeat.UNWATCHED for s in self.silences.values())

    def left(self, *, own_sessions: bool = True) -> list[int]:
        """What lives of the ranks and of all that they ever started; the watcher itself left out.

        own_sessions: also what has made itself a session, as a service does that is to outlive an orderly end.
        """
        self.remember()
        known = [*self.ranks.values(), *(one for below in self.below.values() for one in below.values())]
        living = {one.pid for one in known if processes.alive(one)}
        if not own_sessions:
            living = {
                pid for pid in living if (now := processes.stat(pid)) is not None and now.session in self.sessions
            }
        return sorted((living | set(processes.in_sessions(self.sessions))) - {os.getpid()})


def watch(watched: Watched) -> None:
    """Stand by until the node's ranks are gone, and everything that they started."""
    views = _views(watched)
    watcher = Watcher(watched, views)
    ends: dict[int, int] = {}
    try:
        while True:
            seen = watcher.look()
            if watcher.ended():
                end = processes.end_all(
                    lambda: watcher.left(own_sessions=not watcher.in_order()),
                    grace_seconds=GRACE_SECONDS, limit_seconds=END_SECONDS,
                )  # fmt: skip
                _complain(end)
                break
            if watcher.hangs(seen):
                handle(watcher, seen)
                break
            if watcher.orphaned_seconds > watched.notice_seconds + ORPHANED_SECONDS:
                end = processes.end_all(watcher.left, grace_seconds=GRACE_SECONDS, limit_seconds=END_SECONDS)
                _complain(end)
                break
            _pause(watcher, ends)
    finally:
        _forget(watcher)
        if views is not None:
            _bounded(views.exchange)


def _views(watched: Watched) -> Views | None:
    if watched.world == watched.local:
        return None
    views = Views(Path(watched.run) / "hangs" / "nodes", watched.first, hostname(), watched.hang_seconds)
    views.start()
    return views


def _pause(watcher: Watcher, ends: dict[int, int]) -> None:
    """Until the next look, or until a rank ends."""
    for one in watcher.ranks.values():
        if one.pid not in ends:
            with contextlib.suppress(OSError):
                ends[one.pid] = os.pidfd_open(one.pid)
    waited = [file for file in ends.values() if file >= 0]
    ready, _, _ = select.select(waited, [], [], watcher.poll_seconds)
    for pid, file in list(ends.items()):
        if file in ready:
            os.close(file)
            ends[pid] = -1


def handle(watcher: Watcher, seen: Sequence[Seen]) -> Hang:
    """Ask all ranks of the node, write and say what they told, and end them."""
    here = [one for one in seen if one.rank in watcher.ranks]
    watcher.remember()
    said = dump.ask(
        watcher.folder,
        {rank: one.pid for rank, one in watcher.ranks.items()},
        {rank: list(below) for rank, below in watcher.below.items()},
    )
    attempt = max((silence.beat.attempt for silence in watcher.silences.values() if silence.beat), default=0)
    folder = _folder(watcher.watched, attempt)
    told = [with_answers(one, said[one.rank], folder) for one in here]
    rest = [one for one in seen if one.rank not in watcher.ranks]
    if watcher.views is not None:
        watcher.views.raised = True
        told += _answers_of_others(watcher, watcher.views, told, rest)
    told.sort(key=lambda one: one.rank)
    watched = watcher.watched
    found = hang.conclude(
        told, attempt=attempt, folder=str(folder), hang_seconds=watched.hang_seconds, world=watched.world
    )
    _bounded(lambda: _write(watcher.watched, found, said))
    _bounded(lambda: _say(hang.text(found)))
    left = processes.end_all(watcher.left, grace_seconds=GRACE_SECONDS, limit_seconds=END_SECONDS)
    _end_launcher(watcher.watched)
    if left:
        found = msgspec.structs.replace(found, left=tuple(left))
        _bounded(lambda: _write(watcher.watched, found, {}))
        _complain(left)
    return found


def _end_launcher(watched: Watched) -> None:
    """A launcher of ours ends by itself once the ranks are gone, and is killed where it does not (it is stopped, say).

    One that somebody else started may start the ranks again.
    """
    if not watched.logs or not watched.launcher:
        return
    one = processes.process(watched.launcher)
    deadline = time.monotonic() + LAUNCHER_SECONDS
    while one is not None and processes.alive(one) and time.monotonic() < deadline:
        time.sleep(processes.POLL_SECONDS)
    if one is not None:
        processes.end_all(
            lambda: [one.pid] if processes.alive(one) else [], grace_seconds=0.0, limit_seconds=GRACE_SECONDS
        )


def with_answers(seen: Seen, said: dump.Said, folder: Path) -> Seen:
    """A rank as it was seen, with where its Python stands and what torch's recorder counts."""
    at = dump.where(said.stacks)
    counted = max((one.number for one in said.recorded or ()), default=0)
    state: Any = said.facts.state
    return msgspec.structs.replace(
        seen, state=state, at=at.place, waits_by_stack=at.waits, wait_channel=said.facts.wait_channel,
        stacks=str(folder / f"rank-{seen.rank}.txt"), collectives=max(seen.collectives, counted),
        mute=bool(said.stacks) and said.recorded is None,
    )  # fmt: skip


def _answers_of_others(watcher: Watcher, views: Views, told: Sequence[Seen], rest: Sequence[Seen]) -> list[Seen]:
    """Give the other nodes the time to see the alarm and to ask their ranks; then what they know."""
    known = list(rest)
    deadline = time.monotonic() + 3 * views.seconds + 2 * dump.LIMIT_SECONDS
    while time.monotonic() < deadline:
        known = views.others(told, watcher.poll_seconds)
        if all(one.at or not one.moves for one in known):
            break
        time.sleep(watcher.poll_seconds)
    return known


def _folder(watched: Watched, attempt: int) -> Path:
    """Of several nodes all write into one."""
    parent, name = Path(watched.run) / "hangs", f"attempt-{attempt:03d}"
    number = 1
    while watched.world == watched.local and (parent / name).exists():
        number += 1
        name = f"attempt-{attempt:03d}.{number}"
    return parent / name


def _write(watched: Watched, found: Hang, said: dict[int, dump.Said]) -> None:
    folder = Path(found.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, one in said.items():
        (folder / f"rank-{rank}.txt").write_text(dump.report(rank, one, time.monotonic_ns()))
    name = f"hang-node-{watched.first:05d}.json"
    hang.write(folder / name, found)
    if watched.first == 0:
        (folder / "summary.txt").write_text(hang.text(found) + "\n")
    if watched.logs:
        hang.write(Path(watched.logs) / name, found)
    if watched.first == 0 and said:
        _emit(Path(watched.run) / "events" / f"attempt-{found.attempt:03d}.jsonl", found)


def _emit(path: Path, found: Hang) -> None:
    """Into the attempt's events, in the place of the first rank, which cannot."""
    if not path.exists():
        return  # not a Trainer's run
    event = Hung(
        time=time.time(), rank=found.rank, step=found.step, phase=found.phase, state=found.state,
        quiet_seconds=found.since_seconds, why=found.why, folder=found.folder,
    )  # fmt: skip
    with EventWriter(path) as events:
        events.emit(event)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _complain(left: Sequence[int]) -> None:
    if left:
        pids = ", ".join(map(str, left))
        _bounded(lambda: _say(f"shardwise: not even KILL ended these processes, which wait in the kernel: {pids}"))


def _bounded(act: Callable[[], None], seconds: float = FILES_SECONDS) -> None:
    """Do it, and wait for it no longer than this: a file system or a terminal may never answer."""

    def safely() -> None:
        try:
            act()
        except OSError as error:
            with contextlib.suppress(OSError):
                _say(f"shardwise: the watcher could not write: {error}")

    thread = threading.Thread(target=safely, daemon=True)
    thread.start()
    thread.join(seconds)


def _forget(watcher: Watcher) -> None:
    """Take the node's records away, but not those of a job that has begun there since."""
    mine = {rank: silence.beat.pid for rank, silence in watcher.silences.items() if silence.beat is not None}
    for rank, pid in mine.items():
        now = heartbeat.read(heartbeat.record_path(watcher.folder, rank))
        if now is not None and now.pid == pid:
            for path in watcher.folder.glob(f"rank-{rank:05d}.*"):
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        watcher.folder.rmdir()


if __name__ == "__main__":
    # It ends when the ranks have ended, and not before: whoever ends a job tells everything that belongs to it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(msgspec.json.decode(sys.argv[1], type=Watched))
    os._exit(0)  # a thread may still wait for a file system
