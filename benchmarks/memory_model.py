"""Predicted against measured memory by family, rows of 5 GB and more: python benchmarks/memory_model.py RUNS.csv."""

import sys
from collections import defaultdict

import numpy as np

from shardwise.cost.measured import memory_model
from shardwise.cost.published import rows

SMALLEST = 5e9


def main(path: str) -> None:
    """Print rows, median and 90th percentile of |predicted / measured - 1|, and out-of-memory rows called fitting."""
    errors, fitting = defaultdict[str, list[float]](list), 0
    for row in rows(path):
        if row.workload is None or row.cluster is None or row.candidate is None:
            continue
        held, device = memory_model(row.workload, row.cluster, row.candidate, row.memory_kind, row.measured_rank)
        fitting += row.out_of_memory and bool(device.high[0] <= row.cluster.device.hbm_bytes)
        if row.measured_bytes and row.measured_bytes >= SMALLEST:
            errors[row.family].append(float(held.value[0] / row.measured_bytes - 1))
    for family, found in sorted(errors.items()):
        far = np.abs(found)
        print(f"{family:20} {len(found):4} rows  median {np.median(far):6.1%}  p90 {np.quantile(far, 0.9):6.1%}"
              f"  bias {np.median(found):+6.1%}")  # fmt: skip
    print(f"out-of-memory rows called fitting: {fitting}")


if __name__ == "__main__":
    main(sys.argv[1])
