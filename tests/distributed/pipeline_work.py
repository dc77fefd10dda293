"""What the pool's ranks run to prove the pipeline: its stages against the whole module, in this same process."""

import gc
import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise import ranks
from shardwise.errors import PlanInfeasible
from shardwise.inputs.arch import Arch
from shardwise.models.decoder import Decoder, next_token_sums
from shardwise.parallel import device_mesh, staging
from shardwise.parallel.pipeline import Pipeline, signature_of
from shardwise.parallel.ties import Ties
from shardwise.plan import schedules
from shardwise.plan.mesh import MeshShape

VOCABULARY, HIDDEN = 61, 16
SIZES = (2, 3, 1, 2, 1, 3, 2, 1)  # samples of the micro-batches, by turns


class MLP(nn.Module):
    """Blocks between two linear layers; each block takes the hidden tensor and a scale that comes from the batch."""

    def __init__(self, blocks: int, tied: bool) -> None:
        super().__init__()
        self.into = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(MLPBlock() for _ in range(blocks))
        self.out = nn.Linear(HIDDEN, HIDDEN)
        if tied:
            self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.square().mean(dim=-1, keepdim=True)
        hidden = self.into(x)
        for layer in self.layers:
            hidden = layer(hidden, scale=scale)
        return self.out(hidden.tanh())


class MLPBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * scale


class LearnedPositions(nn.Module):
    """GPT-2-like: two embeddings, a container in between, blocks that give a tuple, a head without its own weight."""

    def __init__(self, blocks: int, tied: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, HIDDEN),
                "wpe": nn.Embedding(32, HIDDEN),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(TupleBlock() for _ in range(blocks)),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = self.transformer
        x = parts["drop"](parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1])))
        for block in parts["h"]:
            x = block(x)[0]
        return self.lm_head(parts["ln_f"](x))


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.down(torch.relu(self.up(self.norm(x)))), None


def decoder(blocks: int, tied: bool) -> Decoder:
    shape = Arch(
        name="test", vocab_size=VOCABULARY, hidden_size=HIDDEN, num_layers=blocks, num_heads=2, num_kv_heads=1,
        head_dim=8, ffn_size=24, max_sequence_length=16, tied_embeddings=tied,
    )  # fmt: skip
    return Decoder(shape)


def build(kind: str, blocks: int, tied: bool) -> tuple[nn.Module, str]:
    """The module and the path of its blocks; the same values on every rank."""
    torch.manual_seed(3)
    made: tuple[nn.Module, str]
    if kind == "decoder":
        made = decoder(blocks, tied), "blocks"
    elif kind == "mlp":
        made = MLP(blocks, tied), "layers"
    elif kind == "positions":
        made = LearnedPositions(blocks, tied), "transformer.h"
    else:
        before = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        parts = [
            nn.Sequential(nn.LeakyReLU(inplace=True), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(blocks)
        ]
        made = staging.Split(before, parts, nn.Linear(HIDDEN, HIDDEN)), "blocks"
    return made[0].double(), made[1]


def batch(kind: str, micro: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(micro)
    samples = SIZES[micro % len(SIZES)]
    if kind in ("decoder", "positions"):
        length = 6 + micro % 3
        tokens = torch.randint(0, VOCABULARY, (samples, length + 1), generator=generator)
        return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    x = torch.randn(samples, 3, HIDDEN, dtype=torch.float64, generator=generator)
    return {"inputs": x, "labels": x.flip(0).roll(1, -1)}


def objective(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.is_floating_point():
        return (outputs - labels).square().sum()
    return next_token_sums(outputs, labels)[0]


def reference(module: nn.Module, kind: str, micros: int) -> tuple[float, dict[str, torch.Tensor]]:
    """One process, the whole module: the summed loss and every gradient by every one of its names."""
    total = 0.0
    for micro in range(micros):
        piece = batch(kind, micro)
        loss = objective(module(piece["inputs"]), piece["labels"])
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}


class Run:
    """A module over the stages of the whole world, and what its micro-batches gave."""

    def __init__(
        self, kind: str, schedule: str, stages_per_rank: int, blocks: int, tied: bool, sizes: Any = "even"
    ) -> None:
        self.kind, self.schedule = kind, schedule
        self.module, path = build(kind, blocks, tied)
        self.mesh = device_mesh.build(MeshShape(pp=ranks.world()))
        self.count = ranks.world() * stages_per_rank
        units = list(self.module.get_submodule(path))
        mine = schedules.stages_of_rank(schedule, ranks.rank(), ranks.world(), stages_per_rank)
        found = staging.ties_across(self.module, units, self.count, sizes)
        self.stages = staging.split(self.module, units, self.count, mine, sizes)
        self.ties = Ties(found, self.module, self.mesh, schedule)
        self.pipeline = Pipeline(self.stages, self.mesh, schedule, stages_per_rank)
        self.losses: list[float] = []
        self.announced: list[tuple[int, bool]] = []
        self.watched: list[Any] = []

    def call(self, stage: staging.Stage, micro: int, received: torch.Tensor | None) -> torch.Tensor | None:
        piece = batch(self.kind, micro)
        outputs = stage(received, (piece["inputs"],), {})
        self.watched.append(weakref.ref(outputs))
        if not stage.last:
            return outputs
        loss = objective(outputs, piece["labels"])
        self.losses.append(loss.item())
        return loss if torch.is_grad_enabled() else None

    def step(self, micros: int, *, signature: bool = True, untie: bool = False) -> None:
        self.pipeline.train(
            micros, self.call, lambda stage, last: self.announced.append((stage, last)),
            (lambda micro: signature_of(batch(self.kind, micro))) if signature else None,
        )  # fmt: skip
        if not untie:
            self.ties.finish()

    def differences(self, expected: dict[str, torch.Tensor]) -> dict[str, float]:
        """By name of what this rank holds: the gradient's distance from the reference's, relative to its norm."""
        return {
            name: 9.9
            if p.grad is None
            else float((p.grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-300))
            for name, p in self.module.named_parameters(remove_duplicate=False)
        }

    def digest(self) -> str:
        summed = hashlib.sha256()
        for name, p in self.module.named_parameters():
            summed.update(name.encode() + p.grad.numpy().tobytes())
        return summed.hexdigest()


def parity(
    *, kind: str, schedule: str, stages_per_rank: int = 1, blocks: int = 5, micros: int = 4, tied: bool = False,
    sizes: Any = "even", signature: bool = True, fault: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Two steps and an evaluation in between; gradients of the second."""
    whole, _ = build(kind, blocks, tied)
    total, expected = reference(whole, kind, micros)
    run = Run(kind, schedule, stages_per_rank, blocks, tied, sizes)
    names = [name for name, _ in run.module.named_parameters(remove_duplicate=False)]
    assert set(names) <= set(expected)
    run.ties.start()
    run.step(micros, signature=signature)
    first = run.digest()
    run.module.zero_grad()
    run.losses.clear()
    run.pipeline.forward_only(micros + 1, run.call)
    evaluated = list(run.losses)
    run.losses.clear()
    run.announced.clear()
    with planted(fault, run):
        run.step(micros, signature=signature, untie=fault == "untie")
    gc.collect()
    return {
        "names": names,
        "differences": run.differences(expected),
        "same_bits": first == run.digest(),
        "loss": sum(run.losses) / total if run.losses else None,
        "evaluated": sum(evaluated[:micros]) / total if evaluated else None,
        "announced": run.announced,
        "alive": sum(ref() is not None for ref in run.watched),
        "alias": run.ties.alias,
    }


@contextmanager
def planted(fault: str, run: Run) -> Iterator[None]:
    """A fault that a comparison must see, on one rank, for the time of a step."""
    rank, original = ranks.rank(), schedules.taken_by
    if fault == "swap" and rank == 1:
        # Two micro-batches of one shape change places on their way.
        def swapped(action: schedules.Action, stages: int) -> schedules.Message | None:
            other = {0: 3, 3: 0}.get(action.micro, action.micro) if action.kind == "F" else action.micro
            return original(action._replace(micro=other), stages)

        with mock.patch.object(schedules, "taken_by", swapped):
            yield
    elif fault == "drop" and rank == ranks.world() - 1:
        before = run.call

        def dropped(stage: staging.Stage, micro: int, received: torch.Tensor | None) -> torch.Tensor | None:
            outputs = before(stage, micro, received)
            return outputs * 0.0 if micro == 1 and outputs is not None else outputs

        with mock.patch.object(run, "call", dropped):
            yield
    else:
        yield


def sharded_under_zero_bubble() -> str:
    """What a train step says where a stage is an FSDP unit."""
    run = Run("decoder", "interleaved-zb", 1, 4, False)
    mesh = init_device_mesh("cpu", (ranks.world(), 1), mesh_dim_names=("pp", "dp_shard"))["dp_shard"]
    fully_shard(run.stages[0], mesh=mesh)
    try:
        run.step(4)
    except PlanInfeasible as error:
        return str(error)
    return ""
