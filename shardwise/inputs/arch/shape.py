"""The Arch: a decoder's shape, and what follows from it alone: parameters and FLOPs. No torch."""

from typing import Annotated, Literal

import msgspec

from shardwise.errors import ModelError

Positive = Annotated[int, msgspec.Meta(gt=0)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The feed-forward of a mixture-of-experts block: each token goes through `per_token` of `count` experts.

    ffn_size: the inner width of one expert; shared_ffn_size: of the experts that every token goes through, together.
    dense_layers: so many first blocks have the Arch's own feed-forward instead. shared_gate: a gate on the shared ones.
    scoring: softmax over all experts; or a sigmoid of each, chosen by the score and a bias that only chooses.
    renormalised: weights of the chosen sum to one; then they are multiplied by `scale`. balance_coefficient: of the
    balancing loss that the model's config names, which our decoder leaves out, and says so.
    """

    count: Positive
    per_token: Positive
    ffn_size: Positive
    shared_ffn_size: NonNegative = 0
    dense_layers: NonNegative = 0
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = True
    scale: float = 1.0
    balance_coefficient: float = 0.0


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention: keys and values from a vector of `key_value_rank`, queries from one of `query_rank`.

    query_rank 0: queries come from the hidden state. A head's query and key have nope_head_dim + rope_head_dim numbers;
    the rotary part of the key is shared by all heads. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    key_value_rank: Positive
    nope_head_dim: Positive
    rope_head_dim: Positive
    value_head_dim: Positive
    query_rank: NonNegative = 0


class Arch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder. The defaults are Llama's: RMSNorm, RoPE, grouped-query attention, gated feed-forward, no biases.

    attention_bias: on queries, keys and values; output_bias: on the projection after them. norms_per_block: 4 where
    outputs are normalised too. qk_norm: of queries and keys, by the head or over the whole width. sliding_window
    (positions; 0: none) bounds what a layer looks back on, but in one of every `full_attention_every` layers (0: in
    none is it whole). prediction_layers: extra blocks that predict later tokens. specials: what it does besides that
    changes no count here, in words.
    """

    name: str
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    ffn_size: Positive
    max_sequence_length: Positive
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    gated_ffn: bool = True
    dropout: Rate = 0.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norms_per_block: Literal[1, 2, 4] = 2
    position: Literal["rope", "learned", "none"] = "rope"
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"
    experts: Experts | None = None
    latent: Latent | None = None
    sliding_window: NonNegative = 0
    full_attention_every: NonNegative = 1
    prediction_layers: NonNegative = 0
    specials: tuple[str, ...] = ()

    @property
    def key_head_dim(self) -> int:
        """Of a query or a key of one head."""
        return self.latent.nope_head_dim + self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Of a value of one head."""
        return self.latent.value_head_dim if self.latent else self.head_dim

    @property
    def dense_layers(self) -> int:
        """Blocks without experts; with `moe_layers` all of them."""
        return min(self.experts.dense_layers, self.num_layers) if self.experts else self.num_layers

    @property
    def moe_layers(self) -> int:
        """Blocks with experts."""
        return self.num_layers - self.dense_layers

    @property
    def full_attention_layers(self) -> int:
        """Layers that look back on all positions."""
        if not self.sliding_window:
            return self.num_layers
        return self.num_layers // self.full_attention_every if self.full_attention_every else 0

    def attention_parameters(self) -> int:
        """Query, key, value and output projections of one block, with their biases."""
        if self.latent is not None:
            return self._latent_parameters(self.latent)
        query = self.num_heads * self.head_dim
        key_value = 2 * self.num_kv_heads * self.head_dim
        biases = (query + key_value if self.attention_bias else 0) + (self.hidden_size if self.output_bias else 0)
        return self.hidden_size * (query + key_value) + query * self.hidden_size + biases

    def _latent_parameters(self, latent: Latent) -> int:
        """Source: DeepSeek-V2, arXiv 2405.04434, equations 37 to 47."""
        hidden, heads = self.hidden_size, self.num_heads
        into = latent.query_rank or hidden
        query = hidden * latent.query_rank + into * heads * self.key_head_dim
        down = hidden * (latent.key_value_rank + latent.rope_head_dim)
        up = latent.key_value_rank * heads * (latent.nope_head_dim + latent.value_head_dim)
        return query + down + up + heads * latent.value_head_dim * hidden

    def _feed_forward(self, width: int) -> int:
        return (3 if self.gated_ffn else 2) * self.hidden_size * width

    def ffn_parameters(self) -> int:
        """Feed-forward projections of one dense block, with their biases."""
        biases = (2 if self.gated_ffn else 1) * self.ffn_size + self.hidden_size if self.mlp_bias else 0
        return self._feed_forward(self.ffn_size) + biases

    def expert_parameters(self) -> int:
        """One expert of one block."""
        return self._feed_forward(self.experts.ffn_size) if self.experts else 0

    def shared_expert_parameters(self) -> int:
        """The experts of one block that every token goes through, with their gate."""
        if self.experts is None:
            return 0
        gate = self.hidden_size if self.experts.shared_gate else 0
        return self._feed_forward(self.experts.shared_ffn_size) + gate

    def router_parameters(self) -> int:
        """Of one block. A bias that only balances the load has no gradient and is not counted."""
        return self.hidden_size * self.experts.count if self.experts else 0

    def norm_parameters(self) -> int:
        """All norms of one block: before and after, of queries and keys, of latents."""
        outer = self.norms_per_block * self._norm(self.hidden_size)
        inner = self._norm(self.latent.query_rank) + self._norm(self.latent.key_value_rank) if self.latent else 0
        if not self.qk_norm:
            return outer + inner
        over_heads = self.num_heads + self.num_kv_heads if self.qk_norm_over == "width" else 2
        return outer + inner + self._norm(over_heads * self.head_dim)

    def _norm(self, size: int) -> int:
        return size * (2 if self.norm == "layer" else 1)

    def block_parameters(self) -> int:
        """One dense block with its norms."""
        return self.attention_parameters() + self.ffn_parameters() + self.norm_parameters()

    def moe_block_parameters(self) -> int:
        """One block with experts, all of them."""
        experts = self.experts.count * self.expert_parameters() if self.experts else 0
        feed_forward = experts + self.shared_expert_parameters() + self.router_parameters()
        return self.attention_parameters() + feed_forward + self.norm_parameters()

    def layer_parameters(self, layer: int) -> int:
        """Of the block with this number, from 0."""
        return self.block_parameters() if layer < self.dense_layers else self.moe_block_parameters()

    def embedding_parameters(self) -> int:
        """What is looked up: tokens, and learned positions."""
        positions = self.max_sequence_length if self.position == "learned" else 0
        return (self.vocab_size + positions) * self.hidden_size

    def prediction_parameters(self) -> int:
        """The extra prediction layers: each a last block, three norms, and a matrix that joins two states.

        They share the embedding and the head. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
        """
        joined = 2 * self.hidden_size * self.hidden_size + 3 * self._norm(self.hidden_size)
        return self.prediction_layers * (self.layer_parameters(self.num_layers - 1) + joined)

    def parameters(self) -> int:
        """All trainable numbers; tied embeddings count once."""
        head = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        blocks = self.dense_layers * self.block_parameters() + self.moe_layers * self.moe_block_parameters()
        return self.embedding_parameters() + blocks + self._norm(self.hidden_size) + head + self.prediction_parameters()

    def active_parameters(self) -> int:
        """Those that one token meets: all but the experts that it does not go through."""
        if self.experts is None:
            return self.parameters()
        blocks = self.moe_layers + (self.prediction_layers if self.moe_layers else 0)
        return self.parameters() - blocks * (self.experts.count - self.experts.per_token) * self.expert_parameters()

    def matmul_parameters(self) -> int:
        """Those that each token is multiplied with: the head, tied or not, but no lookup, no norm and no bias.

        Of experts those it goes through. A prediction layer uses the head again.
        """
        bare = msgspec.structs.replace(self, attention_bias=False, output_bias=False, mlp_bias=False)
        attention, dense = bare.attention_parameters(), bare.ffn_parameters()
        sparse = self.shared_expert_parameters() + self.router_parameters()
        sparse += self.experts.per_token * self.expert_parameters() if self.experts else 0
        head = self.vocab_size * self.hidden_size
        blocks = self.num_layers * attention + self.dense_layers * dense + self.moe_layers * sparse
        last = attention + (sparse if self.moe_layers else dense) + 2 * self.hidden_size * self.hidden_size + head
        return blocks + head + self.prediction_layers * last

    def attended_positions(self, sequence_length: int) -> float:
        """Positions that a token looks back on, over all layers, on average: half the sequence where it sees all of it.

        With a window of w in a sequence of s: w - w^2 / 2s.
        """
        whole, window = sequence_length / 2, min(self.sliding_window, sequence_length)
        windowed = window - window * window / (2 * sequence_length) if window else 0.0
        full = self.full_attention_layers + self.prediction_layers
        return full * whole + (self.num_layers - self.full_attention_layers) * windowed

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of forward and backward for one token of a sequence: the one definition behind utilisation.

        Two a multiply-add; backward twice the forward; causal attention counted as the half it needs, a window as its
        part; of experts those that the token goes through; recompute left out, so that it shows as lost utilisation.
        """
        heads = self.num_heads * (self.key_head_dim + self.value_head_dim)
        attention = 2 * heads * self.attended_positions(sequence_length)
        return 3 * (2 * self.matmul_parameters() + attention)

    def engine_problem(self) -> str:
        """Why Shardwise's own decoder cannot build this yet; empty where it can."""
        found = {
            "latent attention": self.latent is not None,
            "biases": self.attention_bias or self.output_bias or self.mlp_bias,
            "LayerNorm": self.norm != "rms",
            f"{self.position} positions": self.position != "rope",
            "queries and keys normalised over the whole width": self.qk_norm and self.qk_norm_over == "width",
            f"{self.norms_per_block} norms a block": self.norms_per_block != 2,
            "a sliding window": self.sliding_window > 0 and self.full_attention_layers < self.num_layers,
            "prediction layers": self.prediction_layers > 0,
        }
        missing = [*(name for name, present in found.items() if present), *self.specials]
        return f"it has {', '.join(missing)}, which our decoder does not have yet" if missing else ""

    def left_out(self) -> tuple[str, ...]:
        """What its config asks of training and our decoder does not do, in words: a plan's reasons tell it."""
        if self.experts is None:
            return ()
        asked = self.experts.balance_coefficient
        named = f", so the coefficient of {asked:g} in the model's config is left out" if asked else ""
        return (
            "experts: none drops a token, and there is no balancing loss: it would mix the samples of a micro-batch"
            f"{named}",
        )


def shape_problem(arch: Arch) -> str:
    """Why no model can have this shape; empty where one can."""
    if arch.num_heads % arch.num_kv_heads:
        return f"num_heads = {arch.num_heads} is not a multiple of num_kv_heads = {arch.num_kv_heads}"
    if arch.head_dim % 2 and arch.position == "rope":
        return f"head_dim = {arch.head_dim} is odd, and rotary embeddings turn pairs"
    experts = arch.experts
    if experts is not None and experts.per_token > experts.count:
        return f"a token goes through {experts.per_token} experts, and there are {experts.count}"
    if experts is not None and experts.dense_layers > arch.num_layers:
        return f"{experts.dense_layers} of {arch.num_layers} layers are dense"
    return ""


def require_buildable(arch: Arch) -> None:
    """Raises: ModelError where our decoder cannot build this shape."""
    problem = arch.engine_problem() or shape_problem(arch)
    if problem:
        raise ModelError(
            f"{arch.name!r} can be planned, and this engine cannot build it.",
            why=problem,
            fix='give the module itself with model.factory = "my.module:build", or a Llama-style preset',
        )
