"""Checkpoints against torch.save and torch.distributed.checkpoint, and against a copy and the disk themselves.

Run: python -m benchmarks.checkpoint [--blocks 12] [--ranks 2] [--mib 512] [--folder PATH] [--no-plan]

Every kind takes a turn in every block, in alternating order, in the same processes; a turn takes as long as its slowest
rank. Saves end when the bytes are durable (fsync of every file is counted, for all kinds); loads begin with the page
cache dropped. Weights and moments of AdamW, fp32, sharded by FSDP2.

`--no-plan` leaves out the planning of 1,024 ranks' save of 70 billion parameters in a fake world.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import Ratio, ratio

# What is compared, and the bar: of the first two at most, of the others at least.
STALLS = [("begin", "warm copy", 1.3), ("begin", "dcp async: stall", 1.0)]
RATES = [
    ("save", "raw write", 0.9),
    ("begin to commit", "raw write", 0.9),
    ("save", "torch.save", 1.0),
    ("save", "dcp", 1.0),
    ("begin to commit", "dcp async", 1.0),
    ("verified load", "raw read", 0.9),
    ("verified load", "torch.load", 1.0),
    ("verified load", "dcp.load", 1.0),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512, help="of state on each rank")
    parser.add_argument("--folder", default=None, help="where to write: on the disk that is asked about")
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--gate", action="store_true", help="exit 1 where a bar is surely missed")
    arguments = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    times = measured(arguments)
    for kind, blocks in times.items():
        rate = arguments.mib * arguments.ranks * 2**20 / 1e9 / statistics.median(blocks)
        print(f"{kind:18} {min(blocks):8.4f} s at best, {statistics.median(blocks):8.4f} s median, {rate:7.2f} GB/s")
    missed = [tell(f"{ours} / {theirs}", ratio(times[ours], times[theirs]), most=bar) for ours, theirs, bar in STALLS]
    # A rate is over a time: theirs / ours.
    missed += [
        tell(f"rate of {ours} / rate of {theirs}", ratio(times[theirs], times[ours]), least=bar)
        for ours, theirs, bar in RATES
    ]
    print(f"load after: {os.getloadavg()[0]:.1f}")
    if not arguments.no_plan:
        subprocess.run([sys.executable, "-m", "benchmarks.checkpoint_planning"], check=True)
    return 1 if arguments.gate and any(missed) else 0


def measured(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds by kind, block by block."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        out = Path(folder) / "times.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}",
             "-m", "benchmarks.checkpoint_rank", folder, str(arguments.blocks), str(arguments.mib)],
            check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found: dict[str, list[float]] = json.loads(out.read_text())
        return found


def tell(what: str, found: Ratio, *, most: float = float("inf"), least: float = 0.0) -> bool:
    """Prints a ratio beside its bar; True where even the favourable end of the interval misses it."""
    bar = f"at most {most:g}" if least == 0.0 else f"at least {least:g}"
    sure = found.high <= most and found.low >= least
    missed = found.low > most or found.high < least
    print(f"{what}: {found}, {bar}: {'shown' if sure else 'missed' if missed else 'not decided'}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
