"""Step time of the engine over a hand-written torch loop, Accelerate and Fabric, on the same model and machine.

Run: make bench          (or python -m benchmarks.engine [--blocks 150] [--steps 1] [--ranks 2] [--gate 1.10])

Every loop weighs by tokens over the global batch, clips, checks that the norm is finite, sets the learning rate by a
schedule and logs the global loss each step. Kinds take turns, block by block, in the same processes. The loops over
torch have the fused AdamW that is Shardwise's default; Accelerate and Fabric have theirs, AdamW as it comes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import ratio

PAIRS = [
    ("shardwise zero 0", "torch DDP"),
    ("shardwise zero 0", "accelerate defaults"),
    ("shardwise zero 0", "fabric defaults"),
    ("shardwise zero 3", "torch FSDP2"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=150)
    parser.add_argument("--steps", type=int, default=1, help="steps of one kind in one block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gate", type=float, default=None, help="exit 1 where a ratio over torch is surely above this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}",
             "-m", "benchmarks.engine_rank", str(out), str(arguments.blocks), str(arguments.steps)],
            check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "SHARDWISE_WATCHED": "1"},
        )  # fmt: skip
        times = json.loads(out.read_text())
    for kind, blocks in times.items():
        print(f"{kind:18} {1e3 * min(blocks):8.1f} ms at best, {1e3 * sorted(blocks)[len(blocks) // 2]:8.1f} ms median")
    worst = 0.0
    for ours, theirs in PAIRS:
        if theirs in times:
            found = ratio(times[ours], times[theirs])
            print(f"{ours} / {theirs}: {found}")
            worst = max(worst, found.low) if theirs.startswith("torch") else worst
    return 1 if arguments.gate is not None and worst > arguments.gate else 0


if __name__ == "__main__":
    sys.exit(main())
