"""BERT (Devlin et al. 2018, arXiv 1810.04805), base, as it is pre-trained: 110 M parameters.

Differs in: masked words only, no next-sentence head; logits at every position, not at the masked 15
%; no padding; batch 4, as no placement paper we read says its own. The original trains with dropout
0.1.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._settings import ModelSettings, Sizes

EPSILON = 1e-12


@dataclass(frozen=True)
class Bert(ModelSettings):
    """Settings of BERT."""

    SIZES: ClassVar[Sizes] = {
        "base": {},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096},
    }

    batch: int = 4
    length: int = 512
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocab: int = 30522
    positions: int = 512  # longest input it has a position for
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(
            batch=2, length=6, layers=2, hidden=16, heads=2, intermediate=32, vocab=50, positions=8
        )

    def check(self) -> None:
        self.must_divide("heads", "hidden")
        self.must_not_exceed("length", "positions")

    def model(self) -> nn.Module:
        return BertNetwork(self)

    def inputs(self, train: bool) -> tuple[Tensor, ...]:
        shape = (self.batch, self.length)
        tokens = torch.randint(self.vocab, shape)
        segments = torch.randint(2, shape)
        return (tokens, segments, torch.randint(self.vocab, shape)) if train else (tokens, segments)


class BertNetwork(nn.Module):
    def __init__(self, settings: Bert) -> None:
        super().__init__()
        self.embed = BertEmbedding(settings)
        self.layers = nn.ModuleList(_layer(settings) for _ in range(settings.layers))
        self.head = BertHead(settings)
        self.loss = _layers.CrossEntropy()
        _layers.init_normal(self)
        self.head.words.weight = self.embed.words.weight

    def forward(self, tokens: Tensor, segments: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocab]; segments say which of two sentences a word belongs to."""
        x = self.embed(tokens, segments)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if targets is None else self.loss(logits, targets)


class BertEmbedding(nn.Module):
    """Words, positions and segments."""

    def __init__(self, settings: Bert) -> None:
        super().__init__()
        self.words = nn.Embedding(settings.vocab, settings.hidden)
        self.positions = nn.Embedding(settings.positions, settings.hidden)
        self.segments = nn.Embedding(2, settings.hidden)
        self.norm = nn.LayerNorm(settings.hidden, eps=EPSILON)
        self.dropout = _layers.dropout(settings.dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        positions = self.positions.weight[: tokens.shape[1]]
        return self.dropout(self.norm(self.words(tokens) + positions + self.segments(segments)))


def _layer(settings: Bert) -> nn.Module:
    hidden = settings.hidden
    dropout = settings.dropout
    return _layers.PostNormLayer(
        lambda: nn.LayerNorm(hidden, eps=EPSILON),
        _layers.MultiHeadAttention(hidden, settings.heads, dropout_probability=dropout),
        _layers.FeedForward(hidden, settings.intermediate, nn.GELU()),
        dropout,
    )


class BertHead(nn.Module):
    """Logits of the masked words; the product shares the weights of the embedding."""

    def __init__(self, settings: Bert) -> None:
        super().__init__()
        self.dense = nn.Linear(settings.hidden, settings.hidden)
        self.norm = nn.LayerNorm(settings.hidden, eps=EPSILON)
        self.words = nn.Linear(settings.hidden, settings.vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(F.gelu(self.dense(x))))
