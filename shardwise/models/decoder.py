"""The reference decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU or experts; loss and sampling."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardwise.inputs.arch import Arch, require_buildable
from shardwise.models.counter_rng import fill_normal_
from shardwise.models.experts import Choice, SparseFeedForward
from shardwise.models.linear import Linear
from shardwise.models.sharded_loss import sharded_cross_entropy
from shardwise.names import canonical

IGNORED_LABEL = -100
EMBEDDING_STD = 0.02


class RMSNorm(nn.Module):
    """Scale by the inverse root mean square over the last dim. Shapes: [..., size] -> [..., size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryTables(nn.Module):
    """Cosines and sines of every (position, pair) angle, as buffers that are not saved.

    `forward(length)` returns both as [length, 1, head_dim]: ready to multiply [B, S, heads, head_dim].
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.theta = arch.rope_theta
        shape = (arch.max_sequence_length, 1, arch.head_dim)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Compute the tables in fp64 and round once, so that they do not depend on the dtype's own powers."""
        positions, _, head_dim = self.cos.shape
        pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device=self.cos.device)
        position = torch.arange(positions, dtype=torch.float64, device=self.cos.device)
        angles = torch.outer(position, self.theta ** (-pair / head_dim))  # [S, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [S, 1, head_dim]
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos[:length], self.sin[:length]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pair (i, i + head_dim / 2) of each head by its position's angle, in the tables' precision.

    Shapes: [B, S, heads, head_dim] with tables [S, 1, head_dim] -> the same.
    Source: Llama's half-split layout.
    """
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; each key head serves a group of query heads.

    Shapes: q [B, H, S, D], k and v [B, K, S, D], H a multiple of K -> [B, H, S, D].
    """
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.device.type != "cpu" and q.dtype not in (torch.bfloat16, torch.float16):
        # On GPUs only the half-precision kernels know groups; in fp32 torch would fall back to the slow path.
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        group = 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; where the shape says so, each query and key is normalised first.

    Shapes: [B, S, hidden] -> [B, S, hidden].
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.q_proj = Linear(arch.hidden_size, arch.num_heads * arch.head_dim)
        self.k_proj = Linear(arch.hidden_size, arch.num_kv_heads * arch.head_dim)
        self.v_proj = Linear(arch.hidden_size, arch.num_kv_heads * arch.head_dim)
        self.o_proj = Linear(arch.num_heads * arch.head_dim, arch.hidden_size)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # [B, S, heads * D] -> [B, S, heads, D]; heads are counted from the width: a shard of them fits.
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [B, H, S, D]
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # [B, H, S, D] -> [B, S, H * D] -> [B, S, hidden]


class FeedForward(nn.Module):
    """SwiGLU, or GELU where the shape is not gated. Shapes: [B, S, hidden] -> [B, S, hidden]."""

    def __init__(self, arch: Arch, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(arch.hidden_size, width) if arch.gated_ffn else None
        self.up_proj = Linear(arch.hidden_size, width)
        self.down_proj = Linear(width, arch.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def feed_forward(arch: Arch, layer: int) -> nn.Module:
    """That of the block with this number, from 0: of experts behind the first, dense ones."""
    experts = arch.experts
    if experts is None or layer < arch.dense_layers:
        return FeedForward(arch, arch.ffn_size)
    shared = FeedForward(arch, experts.shared_ffn_size) if experts.shared_ffn_size else None
    return SparseFeedForward(arch.hidden_size, experts, gated=arch.gated_ffn, shared=shared)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normalised before and added back after."""

    def __init__(self, arch: Arch, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(arch)
        self.ffn_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.ffn = feed_forward(arch, layer)
        self.dropout = nn.Dropout(arch.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Decoder(nn.Module):
    """A Llama-style language model. Shapes: tokens int64 [B, S] -> logits [B, S, vocab_size].

    Built on CPU it is initialised by torch's current seed; built on meta it waits for `initialize_decoder`.
    Raises: ModelError where the shape has what this decoder has not.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        require_buildable(arch)
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.rotary = RotaryTables(arch)
        self.blocks = nn.ModuleList(Block(arch, layer) for layer in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.lm_head = Linear(arch.hidden_size, arch.vocab_size)
        if arch.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if not self.norm.weight.is_meta:
            self.init_weights()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(tokens.shape[1])
        x = self.embed_tokens(tokens)  # [B, S] -> [B, S, hidden]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.norm(x))  # [B, S, hidden] -> [B, S, vocab]

    def init_weights(self, seed: int | None = None) -> None:
        """Fill every parameter and buffer that this rank holds; `seed` defaults to torch's current one.

        A value depends on (seed, canonical name, index) alone: the same bits for every mesh.
        """
        seed = torch.initial_seed() if seed is None else seed
        if self.arch.tied_embeddings and self.lm_head.weight is not self.embed_tokens.weight:
            self.lm_head.weight = self.embed_tokens.weight  # torch's to_empty() gives each name its own storage
        for name, parameter in self.named_parameters():
            std = _initial_std(canonical(name), parameter.shape, self.arch.num_layers)
            if std == 0:
                nn.init.ones_(parameter)
            else:
                fill_normal_(parameter, seed=seed, name=canonical(name), std=std)
        self.rotary.fill()
        for module in self.modules():
            if isinstance(module, Choice) and module.bias is not None:
                nn.init.zeros_(module.bias)


def _initial_std(name: str, shape: torch.Size, layers: int) -> float:
    """0 says that it is a norm's scale, which starts at one.

    A matrix keeps the variance of what it is given: the inverse root of its inputs. (0.02 throughout fits wide
    models: in the smallest preset it cost 0.16 nats a byte after 150 steps.) Each block adds two outputs to the
    residual stream, so these start smaller by the root of their number. Source: GPT-2 for the latter.
    """
    if name.endswith("norm.weight"):
        return 0.0
    if name == "embed_tokens.weight":
        return EMBEDDING_STD
    std = float(shape[1] ** -0.5)
    return std / (2 * layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else std


def initialize_decoder(module: nn.Module, seed: int) -> None:
    """`init_weights(seed)` of the decoder in `module`, which may be wrapped or sharded with storage.

    Raises: LookupError where there is no Decoder.
    """
    for candidate in module.modules():
        if isinstance(candidate, Decoder):
            candidate.init_weights(seed)
            return
    raise LookupError(f"{type(module).__name__} holds no Decoder")


def next_token_sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of cross entropies (nats) over the labels that are not -100, and how many they are.

    `labels[b, s]` is the token that follows position s. Half-precision logits are summed in fp32. Logits that are a
    DTensor over the vocabulary (tensor parallel) are never gathered.
    Shapes: [B, S, V], [B, S] -> [], [].
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    counted = (labels != IGNORED_LABEL).sum()
    if isinstance(logits, DTensor):
        return sharded_cross_entropy(logits, labels, IGNORED_LABEL), counted
    flat = logits.flatten(0, 1)  # [B, S, V] -> [B * S, V]
    total = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total, counted


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: torch.Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    generator: torch.Generator | None = None,
    multiple: int = 1,
) -> torch.Tensor:
    """`prompt` and `count` sampled tokens after each row; temperature 0 takes the likeliest.

    Keeps no cache: each token costs a forward of what came before, at most `max_sequence_length` of it.
    `vocabulary` bounds the ids where a head is padded. `multiple`: what the model is given is padded on the right to
    such a number of positions, which causal attention never looks at (sequence parallel wants a multiple of tp).
    Modes are as before afterwards, and what was sharded is again. Collective where the parameters are sharded.
    Shapes: int64 [B, S] -> [B, S + count].
    """
    longest = getattr(getattr(model, "arch", None), "max_sequence_length", None)
    tokens, modes = prompt, [(inner, inner.training) for inner in model.modules()]
    model.eval()
    try:
        for _ in range(count):
            window = tokens if longest is None else tokens[:, -(longest - longest % multiple) :]
            outputs = model(F.pad(window, (0, -window.shape[1] % multiple)))
            outputs = outputs.full_tensor() if isinstance(outputs, DTensor) else outputs
            logits = outputs[:, window.shape[1] - 1, :vocabulary].float()  # [B, S, V] -> [B, V]
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                weights = torch.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(weights, 1, generator=generator)
            tokens = torch.cat((tokens, following), dim=1)
    finally:
        for inner, training in modes:
            inner.training = training
            if isinstance(inner, FSDPModule):
                inner.reshard()  # FSDP2 leaves the root whole after a forward that has no backward
    return tokens
