"""A machine as a probe found it: what tests of measured values share."""

import numpy as np

from shardwise.cost.probed import ProductLaw
from shardwise.inputs.hardware import (
    Attention,
    Cluster,
    Collective,
    MachineFacts,
    Matmul,
    Measured,
    Threads,
    local_cluster,
    of_groups,
    with_measured,
)

CPUINFO = "model name : Test CPU @ 2.00GHz\nflags : fma avx512f\n"
HERE = local_cluster(MachineFacts(cpus=2, host_memory_bytes=16 * 2**30, cpuinfo=CPUINFO))
LAW = ProductLaw(start=0.0, flop=1e-11, number=1e-9)
SHAPES = ((256, 256, 256), (1024, 512, 512), (1024, 1408, 512), (2048, 768, 768), (512, 160, 160))
FACTS = Measured(
    by="a probe",
    matmuls=tuple(
        Matmul(m, n, k, "fp32", 2 * m * n * k / float(LAW.seconds(*(np.array([float(x)]) for x in (m, n, k)))[0]))
        for m, n, k in SHAPES
    ),
    collectives=tuple(
        Collective(kind, 2, 5e-4, 1e9, points=((4096, 5.1e-4),))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    ),
    memory_bytes_per_second=2e10,
    disk_read_bytes_per_second=1e9,
    disk_write_bytes_per_second=5e8,
    attention=(Attention(256, 64, "fp32", 3e10, 2.5e10), Attention(4096, 64, "fp32", 5e10, 4e10)),
    threads=(Threads(2, products=1.8, memory=1.5),),
    pointwise_bytes_per_second=8e9,
    loss_bytes_per_second=1e10,
    optimizer_bytes_per_second=1.5e10,
    block_host_seconds=3e-3,
)


def probed(facts: Measured, cluster: Cluster = HERE) -> Cluster:
    return of_groups((with_measured(cluster.groups[0], facts),))
