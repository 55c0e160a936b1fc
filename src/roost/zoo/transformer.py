"""Transformer base (Vaswani et al. 2017, arXiv 1706.03762): 6 + 6 layers of 512, for translation.

One embedding of 37000 words serves source, target and output. The paper says 65 M parameters; this
one, with no biases in attention as in the authors' code, has 63.0 M. Differs in: batches of 64
sentences of 64 words, without padding, in place of about 25000 words over 8 GPUs. The original
trains with dropout 0.1 and label smoothing 0.1.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._networks import Translator
from roost.zoo._settings import Sizes, TranslationSettings


@dataclass(frozen=True)
class Transformer(TranslationSettings):
    """Settings of the encoder-decoder Transformer."""

    SIZES: ClassVar[Sizes] = {
        "base": {},
        "big": {"hidden": 1024, "heads": 16, "intermediate": 4096},
    }

    batch: int = 64
    length: int = 64  # of the source
    target_length: int = 64
    layers: int = 6  # of the encoder, and of the decoder
    hidden: int = 512
    heads: int = 8
    intermediate: int = 2048
    vocab: int = 37000
    dropout: float = 0.0
    smoothing: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(
            batch=2,
            length=6,
            target_length=5,
            layers=2,
            hidden=16,
            heads=2,
            intermediate=32,
            vocab=50,
        )

    def check(self) -> None:
        self.must_divide("heads", "hidden")

    def model(self) -> nn.Module:
        return TransformerNetwork(self)


class TransformerNetwork(Translator):
    def __init__(self, settings: Transformer) -> None:
        super().__init__()
        self.embed = TransformerEmbedding(settings)
        self.encoder = nn.ModuleList(_encoder_layer(settings) for _ in range(settings.layers))
        self.decoder = nn.ModuleList(DecoderLayer(settings) for _ in range(settings.layers))
        self.output = nn.Linear(settings.hidden, settings.vocab, bias=False)
        self.output.weight = self.embed.words.weight
        self.loss = _layers.CrossEntropy(settings.smoothing)

    def logits(self, source: Tensor, previous: Tensor) -> Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(previous)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.output(x)


class TransformerEmbedding(nn.Module):
    """Words and positions."""

    positions: Tensor

    def __init__(self, settings: Transformer) -> None:
        super().__init__()
        hidden = settings.hidden
        self.words = nn.Embedding(settings.vocab, hidden)
        nn.init.normal_(self.words.weight, std=hidden**-0.5)
        length = max(settings.length, settings.target_length)
        self.register_buffer("positions", _layers.sinusoids(length, hidden), persistent=False)
        self.scale = math.sqrt(hidden)
        self.dropout = _layers.dropout(settings.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.words(tokens) * self.scale + self.positions[: tokens.shape[1]])


def _encoder_layer(settings: Transformer) -> nn.Module:
    return _layers.PostNormLayer(
        lambda: nn.LayerNorm(settings.hidden),
        _attention(settings, causal=False),
        _feed_forward(settings),
        settings.dropout,
    )


class DecoderLayer(nn.Module):
    def __init__(self, settings: Transformer) -> None:
        super().__init__()
        self.attention = _attention(settings, causal=True)
        self.attention_norm = nn.LayerNorm(settings.hidden)
        self.cross_attention = _attention(settings, causal=False)
        self.cross_attention_norm = nn.LayerNorm(settings.hidden)
        self.feed_forward = _feed_forward(settings)
        self.feed_forward_norm = nn.LayerNorm(settings.hidden)
        self.dropout = _layers.dropout(settings.dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        x = self.cross_attention_norm(x + self.dropout(self.cross_attention(x, memory)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


def _attention(settings: Transformer, causal: bool) -> nn.Module:
    return _layers.MultiHeadAttention(
        settings.hidden,
        settings.heads,
        bias=False,
        dropout_probability=settings.dropout,
        causal=causal,
    )


def _feed_forward(settings: Transformer) -> nn.Module:
    return _layers.FeedForward(
        settings.hidden, settings.intermediate, nn.ReLU(), dropout_probability=settings.dropout
    )
