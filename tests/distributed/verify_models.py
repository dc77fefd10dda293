"""Modules of a user's, as a factory makes them, for verify's tests."""

import torch
from torch import nn


class Layer(nn.Module):
    """Attention whose key has a bias: softmax takes no notice of it, so its true gradient is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.key_bias = nn.Parameter(torch.ones(width))
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mixed = nn.functional.scaled_dot_product_attention(
            self.query(y), self.key(y) + self.key_bias, self.value(y), is_causal=True
        )
        x = x + mixed
        return x + self.feed(x)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(Layer(24) for _ in range(7))
        self.head = nn.Linear(24, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def language_model() -> nn.Module:
    return LanguageModel()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
