"""GPT-2 (Radford et al. 2019), a decoder with learned positions.

By default it is the small size, 124 M parameters. Batch 4 of 512 words: no placement paper we read
gives its own. The original trains with dropout 0.1.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._networks import LanguageModel
from roost.zoo._settings import LanguageSettings, Sizes


@dataclass(frozen=True)
class Gpt2(LanguageSettings):
    """Settings of GPT-2; its feed-forward layers are four times as wide as `hidden`."""

    SIZES: ClassVar[Sizes] = {
        "small": {},
        "medium": {"layers": 24, "hidden": 1024, "heads": 16},
        "large": {"layers": 36, "hidden": 1280, "heads": 20},
        "xl": {"layers": 48, "hidden": 1600, "heads": 25},
    }

    batch: int = 4
    length: int = 512
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocab: int = 50257
    positions: int = 1024  # longest input it has a position for
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, length=6, layers=2, hidden=16, heads=2, vocab=50, positions=8)

    def check(self) -> None:
        self.must_divide("heads", "hidden")
        self.must_not_exceed("length", "positions")

    def model(self) -> nn.Module:
        return Gpt2Network(self)


class Gpt2Network(LanguageModel):
    def __init__(self, settings: Gpt2) -> None:
        super().__init__()
        hidden = settings.hidden
        self.words = nn.Embedding(settings.vocab, hidden)
        self.positions = nn.Embedding(settings.positions, hidden)
        self.dropout = _layers.dropout(settings.dropout)
        self.layers = nn.ModuleList(_layer(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, settings.vocab, bias=False)
        self.output.weight = self.words.weight
        self.loss = _layers.CrossEntropy()
        _layers.init_normal(self)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens) + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def _layer(settings: Gpt2) -> nn.Module:
    hidden = settings.hidden
    heads = settings.heads
    dropout = settings.dropout
    return _layers.PreNormLayer(
        lambda: nn.LayerNorm(hidden),
        Gpt2Attention(hidden, heads, dropout),
        _layers.FeedForward(hidden, 4 * hidden, nn.GELU(approximate="tanh")),
        dropout,
    )


class Gpt2Attention(nn.Module):
    """Causal attention; query, key and value are one product, as in the original."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            _layers.split_heads(part, self.heads)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        probability = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
        return self.output(_layers.join_heads(y))
