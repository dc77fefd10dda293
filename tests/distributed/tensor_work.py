"""What the pool's ranks run to prove tensor parallel: small models of many kinds, under a plan and in one process."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise import ranks
from shardwise.data.batches import Batches
from shardwise.models.decoder import RMSNorm, next_token_sums
from shardwise.models.sharded_loss import sharded_cross_entropy
from shardwise.parallel import collectives, split_layers
from shardwise.parallel.parallelize import parallel_of
from shardwise.train.own_loop import batches
from tests.distributed import work

HIDDEN, HEADS, HEAD_DIM = 24, 12, 4


class Attention(nn.Module):
    """Causal, with biases. `style`: "split" q, k, v; "fused"; "normed" by head; "gpt" as nanoGPT writes it."""

    def __init__(self, style: str, heads: int = HEADS, keys: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.style, self.head_dim, wide = style, HEAD_DIM, keys * HEAD_DIM
        self.sizes = (heads * HEAD_DIM, wide, wide)
        if style in ("fused", "gpt"):
            self.qkv = nn.Linear(HIDDEN, sum(self.sizes))
            self.proj = nn.Linear(heads * HEAD_DIM, HIDDEN)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, size) for size in self.sizes)
            self.o_proj = nn.Linear(heads * HEAD_DIM, HIDDEN)
        if style == "normed":
            self.q_norm, self.k_norm = RMSNorm(HEAD_DIM, 1e-6), nn.LayerNorm(HEAD_DIM)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.style in ("fused", "gpt"):
            both = self.qkv(hidden)
            heads, keys = self.sizes[0], self.sizes[1]
            width = both.shape[-1] * heads // (heads + 2 * keys)
            rest = (both.shape[-1] - width) // 2
            q, k, v = both.split((width, rest, rest), dim=-1)
        else:
            q, k, v = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        q, k, v = (one.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (q, k, v))  # [B, H, S, D]
        if self.style == "normed":
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = F.scaled_dot_product_attention(q * scale, k, v, is_causal=True, enable_gqa=True)
        mixed = self.inner(mixed.transpose(1, 2).flatten(2))
        out = self.proj(mixed) if self.style in ("fused", "gpt") else self.o_proj(mixed)
        return self.outer(out)


class FeedForward(nn.Module):
    """`style`: "plain"; "gated"; "residual", which adds its own input and norms it, all in one module."""

    def __init__(self, style: str, size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.style = style
        if style == "gated":
            self.gate_proj, self.up_proj = nn.Linear(HIDDEN, size), nn.Linear(HIDDEN, size)
            self.down_proj = nn.Linear(size, HIDDEN)
        else:
            self.fc1, self.fc2 = nn.Linear(HIDDEN, size), nn.Linear(size, HIDDEN)
        if style == "residual":
            self.before, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "gated":
            return self.outer(self.down_proj(self.inner(F.silu(self.gate_proj(x)) * self.up_proj(x))))
        if self.style == "residual":
            return x + self.after(self.fc2(F.gelu(self.fc1(self.before(x)))))
        return self.outer(self.fc2(self.inner(F.gelu(self.fc1(x)))))


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None, ffn: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention, self.ffn = attention, ffn
        self.norm1, self.norm2 = norm() if attention is not None else None, norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None and self.norm1 is not None:
            x = x + self.attention(scale=1.5, hidden=self.norm1(x))  # by keywords, the hidden tensor last
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    """Shapes: tokens [B, S] -> logits [B, S, 61]."""

    def __init__(
        self, blocks: list[nn.Module], *, norm: Callable[[], nn.Module], positions: bool = False, tied: bool = False,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(work.VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(16, HIDDEN)) if positions else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm()
        self.head = nn.Linear(HIDDEN, work.VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(kind: str, dropout: float = 0.0) -> nn.Module:
    """The same numbers on every call, biases and norms away from where they start."""
    torch.manual_seed(3)

    def layer() -> nn.Module:
        return nn.LayerNorm(HIDDEN)

    def rms() -> nn.Module:
        return RMSNorm(HIDDEN, 1e-6)

    makers: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: Model([Block(None, FeedForward("plain", 25), layer) for _ in range(3)], norm=layer),
        "residual": lambda: Model([Block(None, FeedForward("residual", 25), layer) for _ in range(3)], norm=layer),
        "llama": lambda: Model(
            [Block(Attention("split"), FeedForward("gated", 37, dropout), rms) for _ in range(3)], norm=rms, tied=True
        ),
        "fused": lambda: Model(
            [Block(Attention("fused", 24, HEADS), FeedForward("plain", 37), layer) for _ in range(3)], norm=layer
        ),
        "gpt": lambda: Model(
            [Block(Attention("gpt", dropout=dropout), FeedForward("plain", 37, dropout), layer) for _ in range(3)],
            norm=layer, positions=True, tied=True, dropout=dropout,
        ),
        "normed": lambda: Model(
            [Block(Attention("normed", 24, HEADS), FeedForward("gated", 37), rms) for _ in range(3)], norm=rms
        ),
        "torch": lambda: Model(
            [nn.TransformerEncoderLayer(HIDDEN, 4, 37, dropout, batch_first=True) for _ in range(3)], norm=layer
        ),
    }  # fmt: skip
    module = makers[kind]().to(torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module


def own_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    """A user's: it takes whole logits of every position."""
    counted = batch["labels"] != -100
    chosen = outputs.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = (outputs.logsumexp(-1) - chosen + 1e-3 * outputs.square().mean(-1)) * counted
    return sw.Loss(each.sum(), counted.sum())


def shard_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
    return sw.Loss(*next_token_sums(outputs, batch["labels"]))


def loss_of(own: bool) -> Any:
    return own_loss if own else shard_loss


def expected(kind: str, *, own: bool, length: int = 12, frozen: str = "") -> dict[str, Any]:
    """One process, one batch, no part of the engine."""
    module, data = build(kind), work.UnevenTokens(12, length)
    freeze(module, frozen)
    rows = [data[index] for index in range(12)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("tokens", "labels")}
    outputs = module(batch["tokens"])
    loss = loss_of(own)(outputs, batch)
    (loss.total / loss.count).backward()
    gradients = {name: work.whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    return {
        "loss": float(loss.total.detach() / loss.count),
        "gradients": gradients,
        "outputs": outputs.detach().numpy(),
    }


def freeze(module: nn.Module, words: str) -> None:
    for name, parameter in module.named_parameters():
        if any(word in name for word in words.split()):
            parameter.requires_grad_(False)


def gradients(
    out: str, *, kind: str, world: int, own: bool = False, fault: str = "", length: int = 12, zero: int = 0,
    frozen: str = "", given: dict[str, str] | None = None, sequence: Any = "auto", **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """One step's loss and gradients, and the outputs of an evaluation, by keyword."""
    ranks.start()
    made = work.plan(
        world, zero=zero, global_batch=12, model={"roles": given or {}, "sequence_parallel": sequence}, **more
    )
    module = build(kind)
    freeze(module, frozen)
    with planted(fault):
        module = sw.parallelize(module, made, vocabulary_loss=not own)
        parallel = parallel_of(module)
        break_(fault, module)
        micros = next(iter(batches(Batches(work.UnevenTokens(12, length), workers=0), made)))
        loss = sw.forward_backward(module, micros, loss_of(own)).loss
        saved = {name: work.whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    np.savez(f"{out}.{ranks.rank()}.npz", **saved)
    answer: dict[str, Any] = {"loss": loss, "sequence": parallel.tensor.sequence if parallel.tensor else None}
    if made.decision.mesh.pp == 1 and not fault:
        module.eval()
        with torch.no_grad():
            rows = torch.stack([work.UnevenTokens(12, length)[index]["tokens"] for index in range(12)])
            outputs = module(tokens=rows)
            answer["outputs"] = work.whole(outputs).tolist()
            answer["short"] = work.whole(module(rows[:, :5])).tolist()
    return answer


class planted:
    """A fault in the engine's own parts, for the time of one step."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __enter__(self) -> None:
        self.summed, self.row = collectives.summed, split_layers.Row.local
        if self.fault == "no all-reduce in backward":
            split_layers.Copied.backward = staticmethod(lambda ctx, gradient: (gradient, None))
        if self.fault == "bias on every rank":
            split_layers.Row.local = split_layers.Around.local

    def __exit__(self, *_: object) -> None:
        split_layers.Row.local = self.row
        split_layers.Copied.backward = staticmethod(lambda ctx, gradient: (self.summed(gradient, ctx.group), None))


def break_(fault: str, module: nn.Module) -> None:
    tensor = parallel_of(module).tensor
    assert tensor is not None
    finish = tensor.finish
    if fault == "no finish":
        tensor.finish = lambda: None
    if fault == "finish twice":

        def twice() -> None:
            finish()
            finish()

        tensor.finish = twice
    if fault == "gradients times tp":
        gradients_ = parallel_of(module).finish_gradients

        def scaled() -> None:
            gradients_()
            for p in module.parameters():
                (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(dist.get_world_size())

        parallel_of(module).finish_gradients = scaled
    if fault == "untied head":
        module.head.weight = nn.Parameter(module.head.weight.detach().clone())


def masks(*, kind: str, sequence: Any, recompute: str = "none", world: int = 2) -> dict[str, Any]:
    """Which numbers dropout took, by module: of two equal steps, of a third, and of what recompute drew again."""
    ranks.start()
    made = work.plan(
        world, zero=0, global_batch=4, mesh={"tp": world}, recompute=recompute, model={"sequence_parallel": sequence}
    )
    module = sw.parallelize(build(kind, dropout=0.5), made, vocabulary_loss=True)
    seen: dict[str, list[list[bool]]] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            kept = (output != 0).flatten()
            seen.setdefault(name, []).append(kept.tolist())

        return see

    for name, inner in module.named_modules():
        if isinstance(inner, nn.Dropout) and inner.p:
            inner.register_forward_hook(watch(name))
    batch = {key: torch.stack([work.UnevenTokens(4)[i][key] for i in range(4)]) for key in ("tokens", "labels")}
    for step in (1, 1, 2):
        sw.forward_backward(module, batch, shard_loss, step=step)
        if step == 1:
            module.zero_grad()
    return seen


def copied(*, world: int) -> bool:
    """A deep copy (an average of weights) computes with its own weights, and the module with its own."""
    ranks.start()
    module = sw.parallelize(build("fused"), work.plan(world, zero=0, global_batch=4, mesh={"tp": world}))
    rows = torch.stack([work.UnevenTokens(4)[i]["tokens"] for i in range(4)])
    with torch.no_grad():
        before = module(rows)
        average = copy.deepcopy(module)
        for parameter in module.parameters():
            parameter.to_local().zero_()
        return torch.equal(average(rows), before) and not module(rows).any()


def logits_and_labels(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some labels are ignored, one row whole; some logits would overflow an exponential that is not shifted."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 4, vocabulary, generator=generator, dtype=torch.float64) * 3
    logits[1] += 800.0
    logits[2, 0] -= 800.0
    labels = torch.randint(0, vocabulary, (3, 4), generator=generator)
    labels[0, 1:3], labels[2] = -100, -100
    labels[2, 0] = vocabulary - 1
    return logits, labels


def whole_loss(vocabulary: int) -> dict[str, Any]:
    logits, labels = logits_and_labels(vocabulary)
    logits.requires_grad_(True)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (total * 1.7).backward()
    return {"loss": total.item(), "gradient": work.whole(logits.grad).tolist()}


def split_loss(*, ranks: int, vocabulary: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("rest", "tp"))["tp"]
    logits, labels = logits_and_labels(vocabulary)
    shards = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_(True)
    total = sharded_cross_entropy(shards, labels, -100)
    (total * 1.7).backward()
    return {"loss": total.item(), "gradient": work.whole(shards.grad).tolist()}


class Shared(nn.Module):
    """One norm by head that also norms outside the attention: whole there, in part here."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention("normed")
        self.norm = self.attention.q_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return self.norm(x.unflatten(-1, (-1, HEAD_DIM))).flatten(-2)


class Leaking(nn.Module):
    """Its feed-forward part multiplies by what did not pass a column layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)) * x.mean(-1, keepdim=True))


class Open(Leaking):
    """In training, which a trial does not see, it ends between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        return x + self.fc1(x).mean(-1, keepdim=True)


class Adding(Leaking):
    """It adds its own input, with no weight that would show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class Bypassed(nn.Module):
    """It calls the layers of a module in it, and not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = FeedForward("plain", 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn.fc2(F.relu(self.ffn.fc1(x)))


STRANGE: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared, "leaking": Leaking, "open": Open, "bypassed": Bypassed, "adding": Adding,
    "residual": lambda: FeedForward("residual", 24),
}  # fmt: skip


def strange(*, kind: str, given: dict[str, str] | None = None, sequence: Any = False, tokens: int = 12) -> float:
    """The worst relative difference of a gradient from one process, for a model that is not as others are."""
    ranks.start()

    def made() -> nn.Module:
        torch.manual_seed(4)
        blocks: list[nn.Module] = [STRANGE[kind](), STRANGE[kind]()]
        return Model(blocks, norm=lambda: nn.LayerNorm(HIDDEN)).to(torch.float64)

    batch = {key: torch.stack([work.UnevenTokens(4, tokens)[i][key] for i in range(4)]) for key in ("tokens", "labels")}
    one = made()
    loss = shard_loss(one(batch["tokens"]), batch)
    (loss.total / loss.count).backward()
    plan = work.plan(
        2, zero=0, global_batch=4, mesh={"tp": 2}, model={"roles": given or {}, "sequence_parallel": sequence}
    )
    module = sw.parallelize(made(), plan, vocabulary_loss=True)
    sw.forward_backward(module, batch, shard_loss)
    alone = dict(one.named_parameters())
    pairs = [(torch.as_tensor(work.whole(p.grad)), alone[name].grad) for name, p in module.named_parameters()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if float(b.norm()) > 1e-12)


def bf16() -> dict[str, list[float]]:
    """Losses and gradients' relative differences in bf16: tensor parallel against the same in one process's fp64."""
    ranks.start()
    found: dict[str, list[float]] = {}
    batch = {key: torch.stack([work.UnevenTokens(4)[i][key] for i in range(4)]) for key in ("tokens", "labels")}
    exact = build("llama")
    loss = shard_loss(exact(batch["tokens"]), batch)
    (loss.total / loss.count).backward()
    true = {name: p.grad for name, p in exact.named_parameters()}
    for name, mesh in (("split", {"tp": 2}), ("whole", {"dp_replicate": 2})):
        plan = work.plan(2, zero=0, global_batch=8 if name == "whole" else 4, mesh=mesh, precision="bf16")
        module = sw.parallelize(build("llama").float(), plan, vocabulary_loss=name == "split")
        outcome = sw.forward_backward(module, batch, shard_loss)
        differences = [abs(outcome.loss / float(loss.total.detach() / loss.count) - 1)]
        for key, p in module.named_parameters():
            if not key.endswith("k_proj.bias"):
                differences.append(float((torch.as_tensor(work.whole(p.grad)) - true[key]).norm() / true[key].norm()))
        found[name] = differences
    return found
