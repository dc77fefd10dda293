"""What a heartbeat costs the rank that writes it, and looking costs the watcher. Prints each with its spread.

Run: python -m benchmarks.heartbeat [--times 20]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.launch.heartbeat import Heart, record_path, waiting
from shardwise.launch.watcher import Watched, Watcher

CALLS = 20_000


def seconds_each(call: Callable[[], object], times: int) -> list[float]:
    """Of one call, in each of so many blocks."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - started) / CALLS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        hearts = [Heart() for _ in range(8)]
        for rank, heart in enumerate(hearts):
            heart.open(record_path(Path(name), rank), rank=rank, world=8)
        watcher = Watcher(Watched(folder=name, run=name, first=0, local=8, world=8, hang_seconds=60.0), None)

        def collective() -> None:
            with waiting("all-reduce"):
                pass

        from shardwise.launch import heartbeat

        heartbeat.HEART.open(record_path(Path(name), 9), rank=9, world=10)
        for what, call in {
            "a beat (phase and micro-batch)": lambda: hearts[0].at("forward", 3),
            "a collective, entered and left": collective,
        }.items():
            each = seconds_each(call, times)
            print(
                f"{what}: median {statistics.median(each) * 1e9:.0f} ns, {min(each) * 1e9:.0f} to {max(each) * 1e9:.0f}"
            )
        looks = []
        for _ in range(10 * times):
            started = time.process_time()
            watcher.look()
            looks.append(time.process_time() - started)
        median, most = statistics.median(looks) * 1e6, max(looks) * 1e6
        print(f"a look at 8 ranks, once a second: median {median:.0f} us, most {most:.0f}")


if __name__ == "__main__":
    main()
