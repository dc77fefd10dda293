"""Kill -9 of a rank to the next step of the run that goes on, against its limit of 15 s: 4 CPU ranks on this machine.

Each time a run of its own, started as a user starts it; a rank that is drawn is killed a few steps after the first
checkpoint, and the clock runs until the next attempt's first step has ended: the others are ended, checkpoint read and
verified, torch imported anew. Run: python -m benchmarks.restart [--times 5] [--seed 0]
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.startup import ROOT, SHARDWISE
from shardwise.events.reader import Tail
from shardwise.events.values import AnyEvent, Resumed, Saved, Step
from shardwise.launch import run_folder
from shardwise.verify.chaos_befall import ranks_below

RANKS, LIMIT_SECONDS, PATIENCE_SECONDS = 4, 15.0, 300.0
SETTINGS = [
    *(f"train.devices={RANKS}", "train.steps=100000", "train.evaluate_every_steps=0", "data.valid_fraction=0.0"),
    *("checkpoint.every_steps=4", "train.plan.zero=3", "data.sequence_length=64"),
]


def wait_for(
    process: "subprocess.Popen[bytes]", events: Tail, found: Callable[[list[AnyEvent]], bool]
) -> list[AnyEvent]:
    """All events so far, once `found` says so of them. Raises: SystemExit after PATIENCE_SECONDS, or its end."""
    seen: list[AnyEvent] = []
    limit = time.monotonic() + PATIENCE_SECONDS
    while not found(seen):
        if process.poll() is not None:
            raise SystemExit(f"the run ended with code {process.returncode}")
        if time.monotonic() > limit:
            raise SystemExit(f"nothing came of it in {PATIENCE_SECONDS:g} s; the last of {len(seen)}: {seen[-1:]}")
        time.sleep(0.02)
        seen += events.new()
    return seen


def restart_seconds(drawn: random.Random) -> tuple[float, float]:
    """From the kill to the end of the resuming, and to the end of the next step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [SHARDWISE, "train", str(ROOT / "recipes" / "quickstart.toml")]
        command += [part for one in [*SETTINGS, f"run={folder}/run"] for part in ("--set", one)]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            run = Path(folder) / "run"
            saved = Tail(run_folder.events_path(run, 1))
            wait_for(
                process, saved, lambda seen: any(isinstance(one, Saved) for one in seen) and isinstance(seen[-1], Step)
            )
            victim = drawn.choice(ranks_below(process.pid))
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            began = Tail(run_folder.events_path(run, 2))
            again = wait_for(process, began, lambda seen: any(isinstance(one, Step) for one in seen))
            resumed = next(one.time for one in again if isinstance(one, Resumed))
            return resumed - killed, next(one.time for one in again if isinstance(one, Step)) - killed
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed)
    found = [restart_seconds(drawn) for _ in range(arguments.times)]
    for name, seconds in zip(("resumed", "next step"), zip(*found, strict=True), strict=True):
        middle = statistics.median(seconds)
        print(
            f"kill -9 of one of {RANKS} ranks to {name}: {middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
            f"{middle / LIMIT_SECONDS:.2f} of the limit of {LIMIT_SECONDS:g} s"
        )


if __name__ == "__main__":
    main()
