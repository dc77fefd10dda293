"""A small cost model of the tests' own: a roofline and a count of bytes. It holds the search, not the truth."""

from dataclasses import dataclass

import numpy as np

from shardwise.cost.bubble import bubble
from shardwise.cost.candidates import Candidates
from shardwise.cost.workload import Workload
from shardwise.inputs.hardware import Cluster
from shardwise.plan.bounds import Reals, expert_parameters
from shardwise.plan.search import CostModel


@dataclass(frozen=True)
class Seconds:
    parts: dict[str, Reals]

    @property
    def seconds(self) -> Reals:
        return np.asarray(np.sum(list(self.parts.values()), axis=0))

    @property
    def low(self) -> Reals:
        return 0.9 * self.seconds

    @property
    def high(self) -> Reals:
        return 1.2 * self.seconds


@dataclass(frozen=True)
class Bytes:
    parts: dict[str, Reals]

    @property
    def device(self) -> Reals:
        return np.asarray(np.sum(list(self.parts.values()), axis=0))

    @property
    def low(self) -> Reals:
        return 0.95 * self.device

    @property
    def high(self) -> Reals:
        return 1.1 * self.device


def step(workload: Workload, cluster: Cluster, c: Candidates) -> Seconds:
    arch, gpu = workload.arch, cluster.device
    peak = gpu.dense_bf16_flops_per_second or 1e12
    blocks = np.ceil(arch.num_layers / c.stages) * c.stages_per_rank / arch.num_layers
    tokens = c.micro_batch * c.accumulation * workload.sequence_length / c.cp
    flops = arch.flops_per_token(workload.sequence_length) * tokens * blocks / c.tp
    efficiency = 0.6 * (1 - 0.3 / (1 + c.micro_batch)) / (1 + 0.02 * c.tp)
    matmul = flops * np.array([1.0, 1.1, 4 / 3])[c.recompute] / (peak * efficiency)
    memory_bound = matmul * np.where(c.compiled, 0.1, 0.2)
    hidden_bytes = 2 * tokens * arch.hidden_size * arch.num_layers / c.pp
    tensor = np.where(c.tp > 1, 8 * hidden_bytes * (1 - 1 / c.tp) / 3e11, 0) * np.where(c.sequence_parallel, 1, 1.1)
    waiting = bubble(c.schedule, c.pp, c.stages_per_rank, c.accumulation) / c.accumulation
    waited = (1.1 * matmul + memory_bound + tensor) * waiting
    transfers = np.where(c.pp > 1, 2 * hidden_bytes / arch.num_layers * c.stages / 5e10, 0)
    held = arch.parameters() / (c.pp * c.tp)
    passes = np.array([2.0, 2.0, 2.2, 3.0])[c.zero] + 1e-9 * c.bucket_bytes / 2**20
    data = np.where(c.data_parallel > 1, passes * 2 * held / np.where(c.dp_replicate > 1, 4e10, 5e10), 0)
    parts = {
        "matmul": matmul, "attention": 0.1 * matmul, "memory_bound": memory_bound, "tensor_parallel": tensor,
        "bubble": waited, "pipeline_transfers": transfers, "data_parallel": data,
        "optimizer": held / np.where(c.zero >= 1, c.dp_shard, 1) * 28 / 2e12,
        "offload": np.array([0.0, 1.0, 4.0])[c.offload] * held * 16 / 2e10,
    }  # fmt: skip
    return Seconds({name: np.broadcast_to(part, matmul.shape).astype(np.float64) for name, part in parts.items()})


def memory(workload: Workload, cluster: Cluster, c: Candidates) -> Bytes:
    arch = workload.arch
    blocks = np.ceil(arch.num_layers / c.stages) * c.stages_per_rank
    spread = expert_parameters(arch)
    held = (arch.parameters() - spread + spread / c.ep) / (c.pp * c.tp)
    kept = np.where(c.zero >= 1, arch.parameters() / (c.pp * c.tp) / (c.dp_shard * c.cp), held)
    states = np.where(c.offload == 0, 16 * kept, 2 * kept)
    gathered = np.where(c.zero >= 1, held * 2 / np.where(c.zero == 3, blocks, 1), 0)
    line = 2 * c.micro_batch * workload.sequence_length / c.cp * arch.hidden_size
    kept = np.array([17.0, 10.0, 1.0])[c.recompute] / np.where(c.sequence_parallel, c.tp, 1 + (c.tp - 1) / 2)
    flights = np.where(c.schedule == 1, c.accumulation, np.minimum(c.accumulation, c.pp))
    activations = line * kept * blocks * flights + np.where(c.recompute > 0, 17 * line, 0)
    parts = {"states": states, "gathered": gathered, "activations": activations, "context": 1e9 + 0 * states}
    return Bytes({name: np.broadcast_to(part, states.shape).astype(np.float64) for name, part in parts.items()})


def data_floor(workload: Workload, cluster: Cluster, c: Candidates) -> Reals:
    """It hides nothing: a split's own part is its floor."""
    return step(workload, cluster, c).parts["data_parallel"]


def keeping_floor(workload: Workload, cluster: Cluster, c: Candidates) -> Reals:
    """So with what is updated and moved."""
    parts = step(workload, cluster, c).parts
    return parts["optimizer"] + parts["offload"]


def bytes_floor(cluster: Cluster, live: Reals) -> Reals:
    """The upper end with the context."""
    return 1.1 * (live + 1e9)


ROOFLINE = CostModel(memory, step, memory, bytes_floor, data_floor, keeping_floor)
