"""Both halves of verify for llama-3-70b on 512 ranks: the dry run within 90 s and 4 GB, parity within 60 s.

Each runs in a process of its own, from its start (torch is imported too) to its verdict; parity's ranks are its
children. CPU seconds stand beside the wall's, which on a shared machine say as much of the others.

Run: python -m benchmarks.verify [--half dry|parity] [--split NAME]
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from shardwise.inputs import recipe as recipes
from shardwise.inputs.arch import PRESETS
from shardwise.inputs.hardware import parse_cluster
from shardwise.plan import rule_of_thumb
from shardwise.plan.plan import Plan

MODEL, CLUSTER = "llama-3-70b", "64x8xH100-SXM5-80GB"
LIMIT_SECONDS, LIMIT_BYTES, PARITY_SECONDS = 90.0, 4 * 10**9, 60.0
SPLITS: dict[str, dict[str, object]] = {
    "zero 3 over 512": {"zero": 3, "dp_shard": 512, "recompute": "full"},
    "pp 4 x dp_shard 16 x tp 8, zero 1, 1f1b": {"pp": 4, "dp_shard": 16, "tp": 8, "zero": 1, "schedule": "1f1b"},
    "HSDP, 8 copies of 64 shards": {"zero": 3, "dp_replicate": 8, "dp_shard": 64, "recompute": "full"},
}


def plan_of(split: str) -> Plan:
    """Sequences of 4,096 tokens, 1,024 a step; what the split leaves open is the rule of thumb's."""
    keys = {
        "model": {"preset": MODEL},
        "data": {"given": recipes.SHAPE_ALONE, "sequence_length": 4096},
        "batch": {"global_batch": 1024},
        "train": {"steps": 1, "plan": SPLITS[split]},
        "run": "runs/verify",
    }
    return rule_of_thumb.plan(recipes.from_keys(keys, "benchmark"), PRESETS[MODEL], parse_cluster(CLUSTER))


def dry(split: str) -> dict[str, object]:
    """In the process that runs it: what the dry run found, CPU seconds and the most bytes that this process held."""
    from shardwise.verify.dry_run import dry_run

    plan = plan_of(split)
    found = dry_run(plan)
    fullest = found.fullest
    return {
        "ranks": len(found.ranks),
        "world": found.world,
        "micro_batches": f"{plan.decision.accumulation} of {plan.decision.micro_batch}",
        "peak_bytes": fullest.peak.live.total if fullest is not None else 0,
        "wrong": len(found.mismatches),
        "failed": [*(one.what for one in found.violations), *map(str, found.mismatches)],
        "cpu_seconds": time.process_time(),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def parity(split: str) -> dict[str, object]:
    """What parity found on the shrunk plan, and the CPU seconds of its ranks and of this process."""
    from shardwise.verify.parity import parity

    found = parity(plan_of(split))
    ranks = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "shrunk": found.shrunk,
        "wrong": 0 if found.passed else 1,
        "failed": [str(found.fault or found.skipped)] if not found.passed else [],
        "cpu_seconds": time.process_time() + ranks.ru_utime + ranks.ru_stime,
    }


def run(split: str, half: str) -> int:
    """Run one half of one split, print it beside its limits, and return how much of it was wrong."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.verify", "--split", split, "--half", half, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    wall, said = time.perf_counter() - started, json.loads(done.stdout.splitlines()[-1])
    limit = LIMIT_SECONDS if half == "dry" else PARITY_SECONDS
    print(f"{split}, {half}: " + (said["shrunk"] if half == "parity" else (
        f"{said['ranks']} distinct of {said['world']} ranks, {said['micro_batches']} samples each, "
        f"{said['peak_bytes'] / 10**9:.1f} GB live at the peak")))  # fmt: skip
    print(f"  {wall:.1f} s ({said['cpu_seconds']:.1f} s of CPU), {wall / limit:.2f} of the limit of {limit:g} s")
    if half == "dry":
        print(f"  {said['resident_bytes'] / 10**9:.2f} GB resident, {said['resident_bytes'] / LIMIT_BYTES:.2f} of the "
              f"limit of {LIMIT_BYTES / 10**9:g} GB")  # fmt: skip
    print(f"  verdict: {'; '.join(said['failed']) or 'passed'}", flush=True)
    return int(said["wrong"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, help="this one alone")
    parser.add_argument("--half", choices=HALVES, help="this one alone")
    parser.add_argument("--json", action="store_true", help="of one half of one split, in this process")
    asked = parser.parse_args()
    if asked.json:
        print(json.dumps(HALVES[asked.half](asked.split)))
        return
    wrong = sum(
        run(split, half)
        for split in ([asked.split] if asked.split else SPLITS)
        for half in ([asked.half] if asked.half else HALVES)
    )
    # That a plan does not fit is an answer; collectives that do not match, or parity's no, are a fault of the engine.
    sys.exit(1 if wrong else 0)


HALVES = {"dry": dry, "parity": parity}

if __name__ == "__main__":
    main()
