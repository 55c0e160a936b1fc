"""A decoder with a mixture of experts, by default the shape of Mixtral 8x7B: 46.7 B weights.

Each expert is a module of its own. Shapes never depend on data: each expert takes its own best
tokens, as many as it would have on average (expert choice, Zhou et al. 2022, arXiv 2202.09368). In
Mixtral (arXiv 2401.04088) each token takes its two best experts. The work is the same and balanced.
Trained like this a model can look ahead, since later tokens compete with earlier ones. Batch 4 of
512 words is our choice.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._rotary import RotaryDecoder, RotarySettings


@dataclass(frozen=True)
class Moe(RotarySettings):
    """Settings of the mixture of experts."""

    batch: int = 4
    length: int = 512
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8  # heads of keys and values; each serves heads / kv_heads queries
    intermediate: int = 14336  # of each expert
    experts: int = 8  # in each layer
    top_k: int = 2  # experts for each token, on average
    vocab: int = 32000
    base: float = 1000000.0  # of the rotary wavelengths
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        widths = {"hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 32, "vocab": 50}
        return cls(batch=2, length=6, layers=2, experts=4, **widths)

    @property
    def capacity(self) -> int:
        """Tokens that each expert takes."""
        return self.batch * self.length * self.top_k // self.experts

    def check(self) -> None:
        super().check()
        self.must_not_exceed("top_k", "experts")
        if not self.capacity:
            tokens = self.batch * self.length
            raise InputError(
                f"experts is {self.experts}; {tokens} tokens with top_k {self.top_k} leave some "
                "with none"
            )

    def model(self) -> nn.Module:
        return RotaryDecoder(self, lambda: MoeLayer(self))


class MoeLayer(nn.Module):
    def __init__(self, settings: Moe) -> None:
        super().__init__()
        hidden = settings.hidden
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = _layers.RotaryAttention(
            hidden, settings.heads, settings.kv_heads, settings.dropout
        )
        self.mixture_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mixture = Mixture(settings)
        self.dropout = _layers.dropout(settings.dropout)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cosine, sine))
        return x + self.dropout(self.mixture(self.mixture_norm(x)))


class Mixture(nn.Module):
    """Experts side by side. An expert gets only the tokens it takes, and returns only those."""

    def __init__(self, settings: Moe) -> None:
        super().__init__()
        self.top_k = settings.top_k
        self.router = nn.Linear(settings.hidden, settings.experts, bias=False)
        self.experts = nn.ModuleList(
            _layers.SwiGlu(settings.hidden, settings.intermediate) for _ in range(settings.experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [tokens, hidden]
        capacity = tokens.shape[0] * self.top_k // len(self.experts)
        gates = torch.softmax(self.router(tokens), dim=-1).t()  # [experts, tokens]
        weights, chosen = gates.topk(capacity, dim=-1)  # [experts, capacity]
        parts = []
        for number, expert in enumerate(self.experts):
            taken = tokens.index_select(0, chosen[number])
            parts.append(expert(taken) * weights[number].unsqueeze(1))
        mixed = torch.zeros_like(tokens).index_add(0, chosen.flatten(), torch.cat(parts))
        return mixed.view_as(x)
