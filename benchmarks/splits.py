"""Step time of every kind of split over the same split written by hand with torch's own parts.

Run: python -m benchmarks.splits [--blocks 40] [--plans zero1,zero2,zero3,tp,pp,3d]

A decoder of 1.4 million parameters, 4 samples of 256 tokens a micro-batch, 4 micro-batches a step; 2 ranks, 8 for 3d
(pp 2 x dp_shard 2 x tp 2, zero 1). The two take turns, step by step, in the same processes. The target: the interval's
upper end at most 1.03.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare import ratio
from benchmarks.splits_rank import PLANS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--plans", default=",".join(PLANS))
    arguments = parser.parse_args()
    for plan in arguments.plans.split(","):
        world = math.prod(PLANS[plan]["mesh"].values())
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
                 "-m", "benchmarks.splits_rank", plan, str(out), str(arguments.blocks)],
                check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "SHARDWISE_WATCHED": "1"},
            )  # fmt: skip
            told = json.loads(out.read_text())
        times, second = told["times"], {name: losses[1] for name, losses in told["losses"].items()}
        medians = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
        print(
            f"{plan:6} shardwise / torch {ratio(times['shardwise'], times['torch'])}   medians "
            f"{1e3 * medians['shardwise']:.0f} and {1e3 * medians['torch']:.0f} ms   losses "
            f"{second['shardwise']:.4f} and {second['torch']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
