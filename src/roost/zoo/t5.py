"""T5 (Raffel et al. 2019, arXiv 1910.10683), small by default, 60.5 M parameters.

Relative positions are learned scores, one table for all layers of a stack. One embedding serves
source, target and output. Source 512 words as in its pre-training, target 128, batch 4: our choice.
Differs in: no padding. The original trains with dropout 0.1.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._networks import Translator
from roost.zoo._settings import Sizes, TranslationSettings

BUCKETS = 32  # of distances, each with a learned score for each head
FARTHEST = 128  # words; greater distances share a bucket


@dataclass(frozen=True)
class T5(TranslationSettings):
    """Settings of T5."""

    SIZES: ClassVar[Sizes] = {
        "small": {},
        "base": {"layers": 12, "hidden": 768, "heads": 12, "intermediate": 3072},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096},
        "3b": {"layers": 24, "hidden": 1024, "heads": 32, "head_width": 128, "intermediate": 16384},
        "11b": {
            "layers": 24,
            "hidden": 1024,
            "heads": 128,
            "head_width": 128,
            "intermediate": 65536,
        },
    }

    batch: int = 4
    length: int = 512  # of the source
    target_length: int = 128
    layers: int = 6  # of the encoder, and of the decoder
    hidden: int = 512
    heads: int = 8
    head_width: int = 64
    intermediate: int = 2048
    vocab: int = 32128
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        widths = {"hidden": 16, "heads": 2, "head_width": 8, "intermediate": 32, "vocab": 50}
        return cls(batch=2, length=6, target_length=5, layers=2, **widths)

    def model(self) -> nn.Module:
        return T5Network(self)


class T5Network(Translator):
    def __init__(self, settings: T5) -> None:
        super().__init__()
        hidden = settings.hidden
        self.embed = nn.Embedding(settings.vocab, hidden)
        self.dropout = _layers.dropout(settings.dropout)
        self.encoder = Stack(settings, settings.length, decodes=False)
        self.decoder = Stack(settings, settings.target_length, decodes=True)
        self.output = nn.Linear(hidden, settings.vocab, bias=False)
        self.loss = _layers.CrossEntropy()
        self.scale = hidden**-0.5
        _layers.init_normal(self, hidden**-0.5)
        for module in self.modules():
            if isinstance(module, _layers.MultiHeadAttention):
                nn.init.normal_(module.query.weight, std=(hidden * settings.head_width) ** -0.5)
        nn.init.normal_(self.embed.weight)
        self.output.weight = self.embed.weight

    def logits(self, source: Tensor, previous: Tensor) -> Tensor:
        memory = self.encoder(self.dropout(self.embed(source)))
        x = self.decoder(self.dropout(self.embed(previous)), memory)
        return self.output(x * self.scale)


class Stack(nn.Module):
    """The layers of the encoder, or of the decoder."""

    def __init__(self, settings: T5, length: int, decodes: bool) -> None:
        super().__init__()
        self.distances = Distances(settings.heads, length, decodes)
        self.layers = nn.ModuleList(T5Layer(settings, decodes) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.hidden, eps=1e-6)
        self.dropout = _layers.dropout(settings.dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        scores = self.distances(x.shape[1])
        for layer in self.layers:
            x = layer(x, scores, memory)
        return self.dropout(self.norm(x))


class Distances(nn.Module):
    """The score that each pair of positions adds to attention; a decoder cannot look ahead."""

    buckets: Tensor
    ahead: Tensor

    def __init__(self, heads: int, length: int, decodes: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)
        position = torch.arange(length)
        distance = position[None, :] - position[:, None]  # [query, key]
        self.register_buffer("buckets", _buckets(distance, both_ways=not decodes), persistent=False)
        self.decodes = decodes
        if decodes:
            self.register_buffer("ahead", distance > 0, persistent=False)

    def forward(self, length: int) -> Tensor:
        """Scores [1, heads, length, length]."""
        scores: Tensor = self.table(self.buckets[:length, :length]).permute(2, 0, 1).unsqueeze(0)
        if self.decodes:
            scores = scores.masked_fill(self.ahead[:length, :length], -math.inf)
        return scores


def _buckets(distance: Tensor, both_ways: bool) -> Tensor:
    """The bucket of each distance. Near distances have their own; far ones share, by logarithm."""
    count = BUCKETS // 2 if both_ways else BUCKETS
    far = distance.abs() if both_ways else (-distance).clamp(min=0)
    near = count // 2
    scaled = torch.log(far.clamp(min=1) / near) / math.log(FARTHEST / near) * (count - near)
    shared = (near + scaled.to(torch.long)).clamp(max=count - 1)
    bucket = torch.where(far < near, far, shared)
    return bucket + count * (distance > 0) if both_ways else bucket


class T5Layer(nn.Module):
    def __init__(self, settings: T5, decodes: bool) -> None:
        super().__init__()
        hidden = settings.hidden
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.attention = _attention(settings)
        self.decodes = decodes
        if decodes:
            self.cross_attention_norm = nn.RMSNorm(hidden, eps=1e-6)
            self.cross_attention = _attention(settings)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.feed_forward = _layers.FeedForward(
            hidden,
            settings.intermediate,
            nn.ReLU(),
            bias=False,
            dropout_probability=settings.dropout,
        )
        self.dropout = _layers.dropout(settings.dropout)

    def forward(self, x: Tensor, scores: Tensor, memory: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), scores=scores))
        if self.decodes:
            x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), memory))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def _attention(settings: T5) -> nn.Module:
    """Attention with unscaled scores: the queries of T5 start smaller instead."""
    return _layers.MultiHeadAttention(
        settings.hidden,
        settings.heads,
        bias=False,
        dropout_probability=settings.dropout,
        head_width=settings.head_width,
        scale=1.0,
    )
