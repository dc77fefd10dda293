"""A run under faults: the command as a user starts it, real signals, real files; and whether nothing was lost.

A scratch run is trained twice from one recipe: undisturbed, and with a fault after another, started again by the same
command whenever it ends. Both must end in the same bits, each sample trained on once; at no time may there be fewer
than one whole checkpoint after the first; and no process may be left when a command has ended.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.environment import child_environment
from shardwise.errors import EXIT_DONE
from shardwise.launch import local
from shardwise.verify.chaos_befall import FULL_DISK_SECONDS, Around, alive, befall, chosen, make_room
from shardwise.verify.chaos_disk import SlowDisk
from shardwise.verify.chaos_store import URL, BadStore
from shardwise.verify.chaos_watch import Watch, committed, ledger_of, weights_of
from shardwise.verify.faults import QUIET, STARTING, Befell, Fault, Verdict, Where

POLL_SECONDS = 0.002
# What lies below the command is looked up before each fault and so often: a look reads every process of the machine,
# and at each poll that would take a quarter of a core from the run.
PROCESSES_SECONDS = 0.2
# A command that neither ends nor makes a step for so long has hung: that is a finding, and it is killed.
STUCK_SECONDS = 180.0
# From the end of the command to the end of everything that it started.
ORPHAN_SECONDS = 30.0
# A moment may be a thousandth of a second: one that was not met in so many steps is given up for any other.
PATIENCE_STEPS = 8


class Scratch(NamedTuple):
    """Where a run lies, where its checkpoints do, and the command that trains it."""

    folder: Path
    command: tuple[str, ...]
    logs: Path
    devices: int
    where: Where = "disk"


def scratch(recipe: Path, overrides: Sequence[str], folder: Path, devices: int, where: Where = "disk") -> Scratch:
    """The command that trains `recipe` into a run folder of its own, whatever store the recipe names."""
    store = "" if where == "disk" else URL
    settings = [*overrides, f"run={folder / 'run'}", f'checkpoint.store="{store}"', f"train.devices={devices}"]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = (sys.executable, "-m", "shardwise", "train", str(recipe), *sets)
    return Scratch(folder / "run", command, folder / "screens", devices, where)


def undisturbed(run: Scratch) -> int:
    """Train to the end; the command's exit code."""
    with _started(run, 1, Around()) as process:
        return process.wait()


def disturbed(
    run: Scratch, reference: Scratch, faults: Sequence[Fault], told: Callable[[str], None] = lambda line: None
) -> Verdict:
    """Train with one fault after another until the run is finished, and look at what is left."""
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        slow = any(fault.kind == "slow disk" for fault in faults)
        disk = held.enter_context(SlowDisk()) if slow else None
        store = held.enter_context(BadStore(run.folder)) if run.where == "s3" else None
        driver = _Driver(run, list(faults), told, Around(disk, store))
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
        0 if disk is None else disk.delayed,
        0 if store is None else store.harmed,
    )


@contextlib.contextmanager
def _started(run: Scratch, start: int, around: Around) -> "Iterator[subprocess.Popen[bytes]]":
    """The command in a session of its own, its screen in a file; whatever it leaves is ended with the block."""
    run.logs.mkdir(parents=True, exist_ok=True)
    with (run.logs / f"start-{start:03d}.log").open("wb") as screen:
        process = subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env=child_environment({} if around.store is None else around.store.environment()),
            preexec_fn=None if around.disk is None else around.disk.begin,
        )
        try:
            yield process
        finally:
            for pid in local.tree_pids(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


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

    def __init__(self, run: Scratch, faults: list[Fault], told: Callable[[str], None], around: Around) -> None:
        self.run, self.faults, self.told, self.around = run, faults, told, around
        self.befell: list[Befell] = []
        self.known: set[int] = set()  # every process that was seen below the command, of this start
        self.findings: list[str] = []
        self.starts = 0
        self.watch = Watch(run.folder)
        self._open: list[_Open] = []  # a second one only while the command opens again after the first
        self._from = 0
        self._full: list[tuple[int, float]] = []  # whose disk, since when
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
        with _started(self.run, self.starts, self.around) as process:
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
        while self._full and time.monotonic() - self._full[0][1] > FULL_DISK_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                make_room(self._full.pop(0)[0])
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
        ending = [one for one in self._open if one.fault.kind not in QUIET]
        if not ending:
            self._survived(self.watch.step)
        elif self.watch.attempt > ending[-1].attempt:
            begun_after = steps[0].step - 1
            last = before if attempt == first.attempt else first.step
            self._survived(begun_after, max(0, last - begun_after))

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
            came = befall(fault, command, self.run.folder, self.around)
        except (ProcessLookupError, FileNotFoundError):
            came = False  # What it was meant for has just gone: the next look finds another.
        if came:
            if fault in self.faults:
                self.faults.remove(fault)
            if fault.kind == "full disk":
                self._full.append((chosen(fault, command), time.monotonic()))
            self._open.append(_Open(fault, self.watch.attempt, self.watch.step, time.monotonic()))
            self.told(f"{fault}, at step {self.watch.step}")

    def _look_for_orphans(self, pids: set[int]) -> None:
        until = time.monotonic() + ORPHAN_SECONDS
        while left := [pid for pid in pids if alive(pid)]:
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
