"""Llama in any size, by default the shape of Llama 3 8B.

Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Llama team 2024, arXiv 2407.21783.
`Llama.size` knows 7b, 13b and 70b of Llama 2, 8b of Llama 3 and 1b of Llama 3.2. Batch 4 of 512
words: no placement paper we read gives its own. Differs in: positions are not stretched as in Llama
3.1 and 3.2.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from roost.zoo import _layers
from roost.zoo._rotary import RotaryDecoder, RotarySettings
from roost.zoo._settings import Sizes

_LLAMA_2 = {"vocab": 32000, "base": 10000.0}


@dataclass(frozen=True)
class Llama(RotarySettings):
    """Settings of Llama."""

    SIZES: ClassVar[Sizes] = {
        "1b": {"layers": 16, "hidden": 2048, "intermediate": 8192, "tied": True},
        "7b": dict(layers=32, hidden=4096, heads=32, kv_heads=32, intermediate=11008, **_LLAMA_2),
        "8b": {},
        "13b": dict(layers=40, hidden=5120, heads=40, kv_heads=40, intermediate=13824, **_LLAMA_2),
        "70b": dict(layers=80, hidden=8192, heads=64, kv_heads=8, intermediate=28672, **_LLAMA_2),
    }

    batch: int = 4
    length: int = 512
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8  # heads of keys and values; each serves heads / kv_heads queries
    intermediate: int = 14336
    vocab: int = 128256
    base: float = 500000.0  # of the rotary wavelengths
    tied: bool = False  # the output layer shares the weights of the embedding
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(
            batch=2, length=6, layers=2, hidden=16, heads=4, kv_heads=2, intermediate=32, vocab=50
        )

    def model(self) -> nn.Module:
        return RotaryDecoder(self, lambda: _layer(self), self.tied)


def _layer(settings: Llama) -> nn.Module:
    hidden = settings.hidden
    heads = settings.heads
    dropout = settings.dropout
    return _layers.PreNormLayer(
        lambda: nn.RMSNorm(hidden, eps=1e-5),
        _layers.RotaryAttention(hidden, heads, settings.kv_heads, dropout),
        _layers.SwiGlu(hidden, settings.intermediate),
        dropout,
    )
