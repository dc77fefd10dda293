"""How long a user waits: the command to its first step, `import shardwise`, `--help`. Prints each against its limit.

Run: python -m benchmarks.startup [--times 5]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardwise.events.reader import read
from shardwise.events.values import Step

ROOT = Path(__file__).resolve().parents[1]
SHARDWISE = str(Path(sys.executable).with_name("shardwise"))


def first_step_seconds() -> float:
    """From the command to the end of its first optimizer step, 2 CPU ranks, tokens already made."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = str(ROOT / "recipes" / "quickstart.toml")
        started = time.time()
        settings = ["train.steps=1", "train.devices=2", "train.evaluate_every_steps=0", "data.valid_fraction=0.0"]
        command = [SHARDWISE, "train", recipe, *(part for one in settings for part in ("--set", one))]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        [events] = Path(folder).glob("runs/*/events/attempt-*.jsonl")
        return next(event.time for event in read(events) if isinstance(event, Step)) - started


def seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def import_seconds() -> float:
    """Over an interpreter that imports nothing."""
    return seconds_of([sys.executable, "-c", "import shardwise"]) - seconds_of([sys.executable, "-c", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    first_step_seconds()
    for name, limit, measure in (
        ("command to first step, 2 CPU ranks", 12.0, first_step_seconds),
        ("import shardwise", 0.2, import_seconds),
        ("shardwise --help", 0.3, lambda: seconds_of([SHARDWISE, "--help"])),
    ):
        found = sorted(measure() for _ in range(times))
        middle = statistics.median(found)
        print(f"{name}: {middle:.2f} s (worst {found[-1]:.2f}), {middle / limit:.2f} of the limit of {limit:g} s")


if __name__ == "__main__":
    main()
