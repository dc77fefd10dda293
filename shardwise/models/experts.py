"""Experts: the feed-forward of a mixture-of-experts block. A router sends each token to some of many networks.

None is dropped: an expert takes what it is sent, so a token's output depends on the token alone, and every plan gives
the same sums. For the same reason there is no balancing loss: it would mix the samples of a micro-batch.
Sources: Mixtral, arXiv 2401.04088, section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2; the families' modules in
transformers for what their configs mean.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.inputs.arch import Experts
from shardwise.models.grouped import GroupedLinear
from shardwise.models.linear import Linear

# Of the chosen scores' sum, where all of them may be zero.
_NO_ZERO = 1e-20


class Choice(nn.Module):
    """The router: of each token its experts and how much each counts.

    Scores are of fp32 products, whatever the precision: in bf16 two experts often come out alike, and which of them a
    token went to would hang on the order of a sum. `bias` is added to choose, and to nothing else; it has no gradient.
    Shapes: [T, hidden] -> weights [T, k], experts int64 [T, k].
    """

    bias: torch.Tensor | None

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, hidden_size))
        self.register_buffer("bias", torch.zeros(experts.count) if experts.scoring == "sigmoid" else None)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _Scored.apply(tokens, self.weight)
        scores = logits.sigmoid() if self.experts.scoring == "sigmoid" else logits.softmax(dim=-1)
        with torch.no_grad():
            by = scores if self.bias is None else scores + self.bias
            chosen = by.topk(self.experts.per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.experts.renormalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_ZERO)
        return (weights if self.experts.scale == 1 else weights * self.experts.scale), chosen


class _Scored(torch.autograd.Function):
    """`tokens @ weight.T` in fp32 or more; what is kept for backward is what was given, in its own dtype."""

    @staticmethod
    def forward(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(_wide(tokens), _wide(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, weight = ctx.saved_tensors
        for_weight = (gradient.t() @ _wide(tokens)).to(weight.dtype)
        return (gradient @ _wide(weight)).to(tokens.dtype), for_weight


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _Sent(torch.autograd.Function):
    """The rows that experts get: `order` says whose token and which of its choices each is, `place` where these are.

    Backward adds up each token's rows in the order of its choices, where torch's own adds in the order of the wind.
    Shapes: tokens [T, hidden], order and place int64 [T * k] -> [T * k, hidden].
    """

    @staticmethod
    def forward(tokens: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return tokens.index_select(0, order // (order.shape[0] // tokens.shape[0]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        tokens, _, place = inputs
        ctx.tokens = tokens.shape[0]
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (place,) = ctx.saved_tensors
        # [T * k, hidden] -> [T, k, hidden]
        return gradient.index_select(0, place).unflatten(0, (ctx.tokens, -1)).sum(dim=1), None, None


class _Returned(torch.autograd.Function):
    """Of each token the weighted sum of what its experts gave, added in fp32 or more.

    Shapes: rows [T * k, hidden] in experts' order, weights [T, k], order and place as in _Sent -> [T, hidden].
    """

    @staticmethod
    def forward(rows: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(weights.shape[0], rows.shape[1], dtype=weights.dtype, device=rows.device)
        for at, weight in zip(place.view_as(weights).unbind(1), weights.unbind(1), strict=True):
            total.addcmul_(rows.index_select(0, at), weight.unsqueeze(1))
        return total.to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, weights, order, place = ctx.saved_tensors
        wide = _wide(gradient)
        for_weights = [(wide * rows.index_select(0, at)).sum(dim=1) for at in place.view_as(weights).unbind(1)]
        for_rows = gradient.index_select(0, order // weights.shape[1])
        for_rows.mul_(weights.flatten().index_select(0, order).unsqueeze(1))
        return for_rows, torch.stack(for_weights, dim=1), None, None


class ExpertNetworks(nn.Module):
    """All experts' feed-forwards. Shapes: rows [n, hidden] sorted by expert, ends int32 [count] -> [n, hidden]."""

    def __init__(self, hidden_size: int, experts: Experts, gated: bool) -> None:
        super().__init__()
        count, width = experts.count, experts.ffn_size
        self.gate_proj = GroupedLinear(count, hidden_size, width) if gated else None
        self.up_proj = GroupedLinear(count, hidden_size, width)
        self.down_proj = GroupedLinear(count, width, hidden_size)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(rows, ends)), ends)
        return self.down_proj(F.silu(self.gate_proj(rows, ends)) * self.up_proj(rows, ends), ends)


class SparseFeedForward(nn.Module):
    """Each token through some of the experts, and through the shared one where there is one.

    Shapes: [B, S, hidden] -> [B, S, hidden].
    """

    def __init__(self, hidden_size: int, experts: Experts, *, gated: bool, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Choice(hidden_size, experts)
        self.experts = ExpertNetworks(hidden_size, experts, gated)
        self.shared = shared
        self.shared_gate = Linear(hidden_size, 1) if shared is not None and experts.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)  # [B, S, hidden] -> [T, hidden]
        weights, chosen = self.router(tokens)
        order, place, ends = by_expert(chosen, self.router.experts.count)
        rows = self.experts(_Sent.apply(tokens, order, place), ends)
        routed = _Returned.apply(rows, weights, order, place).view_as(x)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        return routed + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())


def by_expert(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, those of one expert in the order of their tokens.

    order: at each row, which of the T * k choices it is; place: of each choice, its row; ends: of each expert, the
    first row behind its own.
    Shapes: int64 [T, k] -> int64 [T * k], int64 [T * k], int32 [count].
    """
    experts, order = chosen.flatten().sort(stable=True)
    rows = torch.arange(order.shape[0], device=order.device)
    place = torch.empty_like(order).scatter_(0, order, rows)
    ends = torch.searchsorted(experts, torch.arange(count, device=order.device), right=True, out_int32=True)
    return order, place, ends
