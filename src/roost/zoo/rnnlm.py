"""RNNLM: a language model of stacked LSTMs, unrolled over time.

The benchmark of Mirhoseini et al., ICML 2017 (arXiv 1706.04972): 2 layers of 2048, 40 steps, batch
64, as recalled and not confirmed. The vocabulary, 10000 words as in Penn Treebank, is our choice.
Differs in: all embeddings are looked up at once and all logits are one product, where that paper's
groups seem to have one of each for every step; the state starts at zero. Published language models
of this kind train with dropout.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._networks import LanguageModel
from roost.zoo._settings import LanguageSettings


@dataclass(frozen=True)
class Rnnlm(LanguageSettings):
    """Settings of the LSTM language model."""

    batch: int = 64
    length: int = 40
    layers: int = 2
    hidden: int = 2048
    vocab: int = 10000
    fused: bool = False  # one op for all steps of a layer, nn.LSTM, instead of a cell for each step
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, length=4, hidden=16, vocab=50)

    def model(self) -> nn.Module:
        return RnnlmNetwork(self)


class RnnlmNetwork(LanguageModel):
    def __init__(self, settings: Rnnlm) -> None:
        super().__init__()
        hidden = settings.hidden
        self.embed = nn.Embedding(settings.vocab, hidden)
        stack = FusedLstm if settings.fused else UnrolledLstm
        self.lstm: nn.Module = stack(hidden, settings.layers, settings.dropout)
        self.dropout = _layers.dropout(settings.dropout)
        self.output = nn.Linear(hidden, settings.vocab)
        self.loss = _layers.CrossEntropy()

    def logits(self, tokens: Tensor) -> Tensor:
        return self.output(self.dropout(self.lstm(self.embed(tokens))))


class UnrolledLstm(nn.Module):
    """An LSTM with a cell for each layer, called at each step."""

    def __init__(self, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.stack = _layers.LstmStack(hidden, hidden, layers, dropout)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.stack(x.unbind(1))
        return torch.stack(outputs, dim=1)


class FusedLstm(nn.Module):
    """An LSTM with one op for each layer."""

    def __init__(self, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers)
        )
        self.dropout = _layers.dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(self.dropout(x))
        return x
