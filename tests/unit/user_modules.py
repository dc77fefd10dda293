"""Small language models as users write them, each with one fault against a pipeline or tensor parallel, or without."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, ROWS, HEADS = 12, 257, 3


class Attention(nn.Module):
    """Counts its heads from the width that it is given: tensor parallel splits it where heads divide."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.head_dim = WIDTH // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, S, D] -> [B, H, S, head]
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, heads: int = HEADS, scaled: bool = False) -> None:
        super().__init__()
        self.norm, self.attention, self.scaled = nn.LayerNorm(WIDTH), Attention(heads), scaled

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x * 1.5 if self.scaled else x


class Twice(Block):
    """One norm before the attention and before the feed-forward."""

    def __init__(self, norms: int = 1) -> None:
        super().__init__()
        self.second = self.norm if norms == 1 else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Embed(nn.Module):
    """Its forward takes what a recipe's batch calls tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows(tokens)


class Model(nn.Module):
    """`fault` names what is odd about it; "" is nothing."""

    def __init__(self, fault: str = "", blocks: int = 4, heads: int = 0, scaled: bool = False) -> None:
        super().__init__()
        self.fault = fault
        if fault == "late":
            self.norm = nn.LayerNorm(WIDTH)
        if fault == "parameter":
            self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Embedding(ROWS, WIDTH)
        made = [Block(heads or HEADS, scaled) for _ in range(blocks)]
        if fault == "scattered":
            self.first, self.second, self.third, self.fourth = made
        else:
            self.blocks = nn.ModuleList(made)
        if fault != "late":
            self.norm = nn.LayerNorm(WIDTH)
        if fault != "functional":
            self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if fault == "scale module":
            self.norm = nn.Sequential(Scale(), self.norm)
        if fault == "tied":
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = x = self.embed(tokens)
        parts = (self.first, self.second, self.third, self.fourth) if self.fault == "scattered" else self.blocks
        for block in parts:
            x = block(x, start) if self.fault == "argument" else block(x)
            if self.fault == "between":
                x = x * 1.5
        if self.fault == "parameter":
            x = x * self.scale
        x = self.norm(x)
        if self.fault == "output":
            x = x + start
        return F.linear(x, self.embed.weight) if self.fault == "functional" else self.head(x)


def sound() -> nn.Module:
    return Model()


def between() -> nn.Module:
    return Model("between")


def as_split() -> nn.Module:
    """What `between` means, said in three parts."""
    from shardwise import Split

    whole = Model("between", scaled=True)
    return Split(Embed(), list(whole.blocks), nn.Sequential(whole.norm, whole.head))


def scattered() -> nn.Module:
    return Model("scattered")


def functional() -> nn.Module:
    return Model("functional")


def tied() -> nn.Module:
    return Model("tied")


def scaled_by_a_module() -> nn.Module:
    return Model("scale module")


def one_norm_twice() -> nn.Module:
    module = Model()
    module.blocks = nn.ModuleList(Twice() for _ in range(4))
    return module


def a_norm_each() -> nn.Module:
    module = Model()
    module.blocks = nn.ModuleList(Twice(norms=2) for _ in range(4))
    return module


def short() -> nn.Module:
    return Model(blocks=3)


def looks_at_numbers() -> nn.Module:
    """A forward that no shapes alone can run."""

    class Looks(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert tokens.max().item() < ROWS
            return super().forward(tokens)

    return Looks()
