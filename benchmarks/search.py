"""How long the planner searches: seconds, plans a second, growth with the GPUs, and the command from start to table.

Of several repeats the least, which a busy machine disturbs the least; seconds of a core are the process's own, those of
the wall beside them have what other processes took in them. `searched` are the plans of the space, which
the answer is exact for; `costed` those that the cost model was asked about. For scale stands beside them a tool that
needs about 5 ms a candidate and did not finish 175B on 64 GPUs in 500 s.
The rate is that of the cost model alone, over plans drawn from the space: memory and step of each.

Run: OMP_NUM_THREADS=1 python -m benchmarks.search [--times 5]
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.cli import plan_target
from shardwise.inputs.arch import Arch
from shardwise.inputs.hardware import parse_cluster
from shardwise.plan import automatic, search, space
from shardwise.plan.questions import Question
from shardwise.plan.search import CostModel, Found
from shardwise.plan.subject import Subject

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
PEER_SECONDS_A_CANDIDATE = 5e-3
LIMIT_SECONDS, LIMIT_COLD, LEAST_RATE = 1.0, 1.5, 100_000
CASES = (
    ("llama-3-405b", "64x8xH100-SXM5-80GB"),
    ("llama-3-405b", "256x8xH100-SXM5-80GB"),
    ("llama-3-405b", "2048x8xH100-SXM5-80GB"),
    ("llama-3-70b", "8x8xH100-SXM5-80GB"),
    ("deepseek-v3", "64x8xH100-SXM5-80GB"),
)
# One sample a GPU, so that data parallel reaches over all of them: the largest space.
LARGEST = ("llama-3-405b", "2048x8xH100-SXM5-80GB", "batch.global_batch=16384")
COLD = (CASES[2], CASES[3], ("llama-3-8b", "8xH100-SXM5-80GB"))
RATED = 8192


class Timed(NamedTuple):
    seconds: float
    processor: float
    found: Found
    gpus: int


def subject_of(model: str, cluster: str, *overrides: str) -> Subject:
    """What `shardwise plan` searches."""
    machines = parse_cluster(cluster)
    target = plan_target.of(model, overrides, machines.kind)
    if not isinstance(target.shape, Arch):
        raise TypeError(f"{model} has no shape")
    return Question(target.recipe, target.shape, machines, {}).subject()


def least(measure: Callable[[], float], times: int) -> float:
    return min(measure() for _ in range(times))


def timed(subject: Subject, model: CostModel, times: int) -> Timed:
    """The least of so many searches."""
    best: Timed | None = None
    for _ in range(times):
        wall, processor = time.perf_counter(), time.process_time()
        found = search.search(subject, model)
        took = Timed(time.perf_counter() - wall, time.process_time() - processor, found, subject.task.world)
        best = took if best is None or took.processor < best.processor else best
    if best is None:
        raise ValueError("times must be 1 or more")
    return best


def told(name: str, took: Timed) -> str:
    searched, costed = took.found.searched, took.found.costed
    peer = searched * PEER_SECONDS_A_CANDIDATE / took.processor
    return (
        f"{name}: {took.processor:.2f} s of a core ({took.seconds:.2f} s of the wall), "
        f"{took.processor / LIMIT_SECONDS:.2f} of the limit of {LIMIT_SECONDS:g} s; {searched:,} plans, "
        f"{searched / took.processor:,.0f} a second, {costed:,} of them costed; {peer:,.0f} times a tool of 5 ms each"
    )


def costed_a_second(subject: Subject, model: CostModel, times: int) -> float:
    """Plans drawn from the space, memory and step of each."""
    cores = space.cores(subject.task)
    some = space.rows(cores, np.random.default_rng(0).permutation(len(cores["pp"]))[:64])
    table = space.with_splits(subject.task, space.with_pipelines(subject.task, some))
    drawn = np.random.default_rng(0).permutation(len(table["pp"]))[:RATED]
    plans = search.candidates(space.rows(table, drawn))

    def once() -> float:
        started = time.process_time()
        model.memory(subject.workload, subject.cluster, plans)
        model.step(subject.workload, subject.cluster, plans)
        return time.process_time() - started

    return len(plans) / least(once, times)


def growth(small: Timed, large: Timed) -> float:
    """e where the time grows as GPUs ** e: below 1 is less than they do."""
    return math.log(large.processor / small.processor) / math.log(large.gpus / small.gpus)


def cold_seconds(model: str, cluster: str) -> tuple[float, float]:
    """The command in a fresh interpreter, from its start to its table: of a core, and of the wall."""
    started, before = time.perf_counter(), os.times()
    subprocess.run([SHARDWISE, "plan", model, "--cluster", cluster], check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    times, model = parser.parse_args().times, automatic.costs()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, least of {times}")
    found = [timed(subject_of(*case), model, times) for case in CASES]
    for case, took in zip(CASES, found, strict=True):
        print(told(f"{case[0]} on {took.gpus:,} GPUs", took))
    largest = timed(subject_of(*LARGEST), model, times)
    print(told(f"{LARGEST[0]} on {largest.gpus:,} GPUs, {LARGEST[2]}", largest))
    print(f"growth from {found[0].gpus:,} to {found[2].gpus:,} GPUs: GPUs ** {growth(found[0], found[2]):.2f}")
    print(f"and with {LARGEST[2]}: GPUs ** {growth(found[0], largest):.2f} (a batch 16 times as large too)")
    rate = costed_a_second(subject_of(*CASES[2]), model, times)
    print(
        f"cost model: {rate:,.0f} plans a second, {rate / LEAST_RATE:.2f} of the least of {LEAST_RATE:,}, "
        f"{rate * PEER_SECONDS_A_CANDIDATE:,.0f} times a tool of 5 ms each"
    )
    for one in COLD:
        used, wall = min(cold_seconds(*one) for _ in range(times))
        print(
            f"shardwise plan {one[0]} --cluster {one[1]}: {used:.2f} s of a core ({wall:.2f} s of the wall), "
            f"{used / LIMIT_COLD:.2f} of the limit of {LIMIT_COLD:g} s"
        )


if __name__ == "__main__":
    main()
