"""A run under faults: the command as a user starts it, real signals, real files; and whether nothing was lost.

A scratch run is trained twice from one recipe: undisturbed, and with a fault after another, started again by the same
command whenever it ends. Both must end in the same bits, each sample trained on once; at no time may there be fewer
than one whole checkpoint after the first; and no process may be left when a command has ended.
"""

import contextlib
import dataclasses
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify_file
from shardwise.checkpoint.store import LocalStore
from shardwise.data.ledger import Proof, kept_in, prove
from shardwise.errors import EXIT_DONE, CheckpointError, RunFolderError
from shardwise.events.reader import Tail
from shardwise.events.values import Step
from shardwise.launch import local, run_folder
from shardwise.verify.faults import DAMAGE, QUIET, STARTING, Befell, Fault, Verdict

POLL_SECONDS = 0.002
# What lies below the command is looked up before each fault and so often: a look reads every process of the machine,
# and at each poll that would take a quarter of a core from the run.
PROCESSES_SECONDS = 0.2
# A command that neither ends nor makes a step for so long has hung: that is a finding, and it is killed.
STUCK_SECONDS = 180.0
# From the end of the command to the end of everything that it started.
ORPHAN_SECONDS = 30.0
# A file that a rank may still write once its disk is full: its logs and events go on elsewhere.
FULL_DISK_BYTES = 4096
# A moment may be a thousandth of a second: one that was not met in so many steps is given up for any other.
PATIENCE_STEPS = 8
# How long a disk stays full, until somebody makes room.
FULL_DISK_SECONDS = 3.0


class Scratch(NamedTuple):
    """Where a run lies, and the command that trains it."""

    folder: Path
    command: tuple[str, ...]
    logs: Path
    devices: int


def scratch(recipe: Path, overrides: Sequence[str], folder: Path, devices: int) -> Scratch:
    """The command that trains `recipe` into a run folder of its own."""
    settings = [*overrides, f"run={folder / 'run'}", f"train.devices={devices}"]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = (sys.executable, "-m", "shardwise", "train", str(recipe), *sets)
    return Scratch(folder / "run", command, folder / "screens", devices)


def undisturbed(run: Scratch) -> int:
    """Train to the end; the command's exit code."""
    with _started(run, 1) as process:
        return process.wait()


def disturbed(
    run: Scratch, reference: Scratch, faults: Sequence[Fault], told: Callable[[str], None] = lambda line: None
) -> Verdict:
    """Train with one fault after another until the run is finished, and look at what is left."""
    began = time.monotonic()
    driver = _Driver(run, list(faults), told)
    finished = driver.to_the_end()
    findings = list(driver.findings)
    proof, same = None, False
    if finished:
        proof = ledger_of(run.folder)
        same = weights_of(run.folder) == weights_of(reference.folder)
        findings += [f"the ledger: {fault}" for fault in proof.faults]
        if not same:
            findings.append("the run did not end in the bits of the undisturbed one")
    return Verdict(
        tuple(driver.befell),
        tuple(driver.faults),
        driver.starts,
        proof,
        same,
        tuple(findings),
        time.monotonic() - began,
    )


@contextlib.contextmanager
def _started(run: Scratch, start: int) -> "Iterator[subprocess.Popen[bytes]]":
    """The command in a session of its own, its screen in a file; whatever it leaves is ended with the block."""
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / f"start-{start:03d}.log").open("wb") as screen:
        process = subprocess.Popen(
            run.command, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen, start_new_session=True
        )
        try:
            yield process
        finally:
            for pid in local.tree_pids(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


class _Watch:
    """What the run's files say: its newest attempt and step, and which moment it is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempt = self.step = 0
        self.began = self.changed = time.monotonic()
        self.stepped = False
        self._tail: Tail | None = None

    def started(self) -> None:
        """The command is started (again)."""
        self.stepped, self.began, self.changed = False, time.monotonic(), time.monotonic()

    def look(self) -> list[Step]:
        """Read on in the newest attempt's events: the steps that are new."""
        newest = self._newest()
        if newest > self.attempt:
            self.attempt, self.stepped = newest, False
            self._tail = Tail(run_folder.events_path(self.folder, newest))
        found = self._tail.new() if self._tail is not None else []
        if found:
            self.changed = time.monotonic()
        steps = [event for event in found if isinstance(event, Step)]
        if steps:
            self.step, self.stepped = steps[-1].step, True
        return steps

    def _newest(self) -> int:
        paths = (self.folder / "events").glob("attempt-*.jsonl")
        return max((int(path.stem.split("-")[1]) for path in paths), default=0)

    def moment(self, moment: str, world: int) -> bool:
        """Whether the run is in this moment now."""
        if moment == "training":
            return self.stepped
        if moment in ("opening", "resuming"):
            return not self.stepped and (moment == "opening" or bool(committed(self.folder)))
        for folder in self._folders():
            with contextlib.suppress(OSError):
                names = [path.name for path in folder.iterdir()]
                whole = sum(name.endswith(".safetensors") for name in names)
                if MANIFEST not in names and (whole >= world if moment == "committing" else len(names) > 0):
                    return True
        return False

    def _folders(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(run_folder.checkpoints_folder(self.folder).iterdir())
        return []


@dataclasses.dataclass
class _Open:
    """A fault that came, and whose end is not seen yet."""

    fault: Fault
    attempt: int
    step: int
    at: float
    code: int | None = None


class _Driver:
    """Starts the command, waits for a fault's moment, lets it befall the run, and looks at what is left of it."""

    def __init__(self, run: Scratch, faults: list[Fault], told: Callable[[str], None]) -> None:
        self.run, self.faults, self.told = run, faults, told
        self.befell: list[Befell] = []
        self.known: set[int] = set()  # every process that was seen below the command, of this start
        self.findings: list[str] = []
        self.starts = 0
        self.watch = _Watch(run.folder)
        self._open: list[_Open] = []  # a second one only while the command opens again after the first
        self._from = 0
        self._full: tuple[int, float] | None = None
        self._ever_committed = False

    def to_the_end(self) -> bool:
        """Whether the run was finished."""
        most = 2 * len(self.faults) + 3
        while self.starts < most:
            self.starts += 1
            code = self._once()
            if code == EXIT_DONE:
                self._survived(self.watch.step)
                return True
            if not self._open:
                self.findings.append(f"start {self.starts} ended with code {code}, and no fault had come")
            else:
                self._open[-1].code = code
                self.told(f"  the command ended with {code}, and is started again")
        self.findings.append(f"the run was not finished after {self.starts} starts")
        return False

    def _once(self) -> int:
        with _started(self.run, self.starts) as process:
            self.watch.started()
            self.known, looked = set[int](), -math.inf
            while process.poll() is None:
                if time.monotonic() - looked > PROCESSES_SECONDS:
                    self._see(process.pid)
                    looked = time.monotonic()
                self._tick(process)
                time.sleep(POLL_SECONDS)
            self._tick_steps()
            self._look_for_orphans(self.known)
        self._look_at_checkpoints()
        return process.returncode

    def _see(self, command: int) -> None:
        self.known.update(local.tree_pids(command)[1:])

    def _tick(self, process: "subprocess.Popen[bytes]") -> None:
        self._tick_steps()
        if self._full is not None and time.monotonic() - self._full[1] > FULL_DISK_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                _make_room(self._full[0])
            self._full = None
        if time.monotonic() - self.watch.changed > STUCK_SECONDS:
            self.findings.append(
                f"start {self.starts} said nothing for {STUCK_SECONDS:.0f} s at step {self.watch.step}"
            )
            os.killpg(process.pid, signal.SIGKILL)
        elif self.faults and self._may_come(fault := self._next()):
            if self._is_time(fault):
                self._inject(fault, process.pid)
            elif self._is_missed(fault):
                self.faults[self.faults.index(fault)] = fault._replace(moment="training")

    def _may_come(self, fault: Fault) -> bool:
        """One after another; but a start is there to be disturbed only because something ended the one before."""
        started_again = all(one.code is not None and one.fault.moment not in STARTING for one in self._open)
        return not self._open or (fault.moment in STARTING and not self.watch.stepped and started_again)

    def _next(self) -> Fault:
        """The first that can come now: a start that is over comes again only where something ended the one before."""
        if not self.watch.stepped:
            return next((fault for fault in self.faults if fault.moment in STARTING), self.faults[0])
        able = [fault for fault in self.faults if fault.moment not in STARTING]
        return able[0] if able else self.faults[0]._replace(kind="kill command", moment="training")

    def _tick_steps(self) -> None:
        before, attempt = self.watch.step, self.watch.attempt
        steps = self.watch.look()
        if not steps or not self._open:
            return
        first = self._open[0]
        if self.watch.attempt > self._open[-1].attempt:
            begun_after = steps[0].step - 1
            last = before if attempt == first.attempt else first.step
            self._survived(begun_after, max(0, last - begun_after))
        elif first.fault.kind in QUIET:
            self._survived(self.watch.step)

    def _survived(self, step: int, lost: int = 0) -> None:
        for index, opened in enumerate(self._open):
            seconds = time.monotonic() - opened.at
            self.befell.append(Befell(opened.fault, opened.step, opened.code, 0 if index else lost, seconds))
        self._open, self._from = [], step

    def _is_missed(self, fault: Fault) -> bool:
        """Whether its moment was too short to be met for so long that it comes at another."""
        return (
            fault in self.faults
            and self.watch.stepped
            and self.watch.step >= self._from + fault.after_steps + PATIENCE_STEPS
        )

    def _is_time(self, fault: Fault) -> bool:
        if fault.moment in STARTING:
            # Some way into the start, at a time that was drawn: ranks take seconds to import.
            waited = time.monotonic() - self.watch.began > 3.0 * fault.draw
            return waited and self.watch.moment(fault.moment, 1)
        if self.watch.step < self._from + fault.after_steps:
            return False
        return self.watch.moment(fault.moment, self.run.devices)

    def _inject(self, fault: Fault, command: int) -> None:
        self._see(command)
        try:
            came = _befall(fault, command, self.run.folder)
        except (ProcessLookupError, FileNotFoundError):
            came = False  # What it was meant for has just gone: the next look finds another.
        if came:
            if fault in self.faults:
                self.faults.remove(fault)
            if fault.kind == "full disk":
                self._full = _chosen(fault, command), time.monotonic()
            self._open.append(_Open(fault, self.watch.attempt, self.watch.step, time.monotonic()))
            self.told(f"{fault}, at step {self.watch.step}")

    def _look_for_orphans(self, pids: set[int]) -> None:
        until = time.monotonic() + ORPHAN_SECONDS
        while left := [pid for pid in pids if _alive(pid)]:
            if time.monotonic() > until:
                self.findings.append(
                    f"start {self.starts}: processes {left} outlived the command by {ORPHAN_SECONDS:.0f} s"
                )
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _look_at_checkpoints(self) -> None:
        whole = committed(self.run.folder)
        if self._ever_committed and not whole:
            self.findings.append(f"after start {self.starts} there is no whole checkpoint, and there was one")
        self._ever_committed = self._ever_committed or bool(whole)


def ranks_below(command: int) -> list[int]:
    """The ranks' processes below the command, lowest process first; not the watcher that the first one starts."""
    below = local.tree_pids(command)[1:]
    for pid in below:  # parents first: the launcher comes before its ranks
        if found := [one for one in local.worker_pids(pid) if one != pid]:
            return sorted(found) if "torch.distributed.run" in _command_of(pid) else [pid]
    return below[:1]


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _befall(fault: Fault, command: int, folder: Path) -> bool:
    """Let the fault come; False where what it needs is not there."""
    rank = _chosen(fault, command) if ranks_below(command) else None
    below = local.tree_pids(command)[1:]
    if fault.kind in DAMAGE:
        return rank is not None and _damage(fault, folder) and _kill(rank, signal.SIGKILL)
    if fault.kind == "full disk":
        return rank is not None and _fill(rank)
    target, number = {
        "kill rank": (rank, signal.SIGKILL),
        "stop rank": (rank, signal.SIGSTOP),
        "terminate rank": (rank, signal.SIGTERM),
        "kill launcher": (below[0] if below else None, signal.SIGKILL),
        "kill command": (command, signal.SIGKILL),
        "terminate command": (command, signal.SIGTERM),
        "interrupt command": (command, signal.SIGINT),
    }[fault.kind]
    return target is not None and _kill(target, number)


def _kill(pid: int, number: int) -> bool:
    os.kill(pid, number)
    return True


def _chosen(fault: Fault, command: int) -> int:
    """The process of the rank that this fault is for."""
    workers = ranks_below(command)
    return workers[int(fault.draw * len(workers))]


def _make_room(rank: int) -> None:
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _fill(rank: int) -> bool:
    """The kernel refuses this rank's files beyond a few KiB, as a full disk does."""
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.RLIM_INFINITY))
    return True


def _damage(fault: Fault, folder: Path) -> bool:
    """In a file of the newest committed checkpoint: one bit is another, or its end is gone."""
    found = committed(folder)
    if len(found) < 2:
        return False  # Of a single checkpoint nothing could be gone back to: that is an error by design.
    files = sorted(path for path in found[-1].iterdir() if path.is_file())
    path = files[int(fault.draw * len(files))]
    size = path.stat().st_size
    at = int((fault.draw * 7919) % 1 * size)
    with path.open("r+b") as file:
        if fault.kind == "truncate file":
            file.truncate(at)
            return True
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << int(fault.draw * 8))
        file.seek(at)
        file.write(bytes([byte]))
    return True


def _alive(pid: int) -> bool:
    """Whether a process runs still; one that waits for its parent to take note of its end does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def committed(folder: Path) -> list[Path]:
    """Folders with a manifest, oldest step first."""
    root = run_folder.checkpoints_folder(folder)
    with contextlib.suppress(OSError):
        found = [path for path in root.iterdir() if (path / MANIFEST).exists()]
        return sorted(found, key=lambda path: (path.name.split("-")[1], path.stat().st_mtime))
    return []


def newest_manifest(folder: Path) -> Manifest:
    """Of the newest checkpoint, after every byte of it was verified. Raises: CheckpointError, RunFolderError."""
    found = committed(folder)
    if not found:
        raise RunFolderError(f"There is no checkpoint in {folder}.", fix="start the run")
    store = LocalStore(run_folder.checkpoints_folder(folder))
    manifest = read_manifest(store, found[-1].name)
    for file in manifest.files:
        verify_file(store, found[-1].name, file)
    return manifest


def weights_of(folder: Path) -> dict[tuple[str, tuple[int, ...]], str]:
    """The digest of every region of every tensor in the newest checkpoint."""
    return {
        (entry.name, chunk.offsets): chunk.digest for entry in newest_manifest(folder).tensors for chunk in entry.chunks
    }


def ledger_of(folder: Path) -> Proof:
    """What the ledger in the newest checkpoint proves. Raises: CheckpointError where there is none."""
    segments = kept_in(newest_manifest(folder).state)
    if segments is None:
        raise CheckpointError(f"The newest checkpoint in {folder} has no ledger.", fix="train with this version")
    return prove(segments)
