"""NMT: translation by an LSTM encoder and decoder with attention, unrolled over time.

The benchmark of Mirhoseini et al., ICML 2017 (arXiv 1706.04972): 2 layers of 1024, 40 words in and
out, batch 64, as recalled and not confirmed; Hierarchical Device Placement (ICLR 2018) adds 4 and 8
layers. The vocabulary of 32000 is our choice. Attention is Luong et al. 2015, general form, its
result fed to the next step; the paper does not say which. Differs in: one product makes the logits
of all steps; no padding, all sentences have the full length. Published models of this kind train
with dropout 0.2.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._layers import State
from roost.zoo._networks import Translator
from roost.zoo._settings import TranslationSettings


@dataclass(frozen=True)
class Nmt(TranslationSettings):
    """Settings of the translation model."""

    batch: int = 64
    length: int = 40  # of the source
    target_length: int = 40
    layers: int = 2  # of the encoder, and of the decoder
    hidden: int = 1024
    vocab: int = 32000
    # The encoder's first layer reads in both directions, half of `hidden` each.
    bidirectional: bool = False
    residual: bool = False  # each layer but the first adds its input to its output
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, length=5, target_length=4, hidden=16, vocab=50)

    def check(self) -> None:
        if self.bidirectional and self.hidden % 2:
            raise InputError(f"hidden is {self.hidden}; it must be even where bidirectional")

    def model(self) -> nn.Module:
        return NmtNetwork(self)


class NmtNetwork(Translator):
    def __init__(self, settings: Nmt) -> None:
        super().__init__()
        self.encoder = NmtEncoder(settings)
        self.decoder = NmtDecoder(settings)
        self.output = nn.Linear(settings.hidden, settings.vocab)
        self.loss = _layers.CrossEntropy()

    def logits(self, source: Tensor, previous: Tensor) -> Tensor:
        memory, states = self.encoder(source)
        return self.output(self.decoder(previous, memory, states))


class NmtEncoder(nn.Module):
    def __init__(self, settings: Nmt) -> None:
        super().__init__()
        hidden = settings.hidden
        self.embed = nn.Embedding(settings.vocab, hidden)
        self.first = BidirectionalLayer(hidden) if settings.bidirectional else None
        layers = settings.layers - settings.bidirectional
        self.stack = _layers.LstmStack(hidden, hidden, layers, settings.dropout, settings.residual)

    def forward(self, source: Tensor) -> tuple[Tensor, list[State]]:
        """Outputs of the last layer [batch, length, hidden], and the last state of each layer."""
        steps = list(self.embed(source).unbind(1))
        first = []
        if self.first is not None:
            steps, state = self.first(steps)
            first.append(state)
        outputs, states = self.stack(steps)
        return torch.stack(outputs, dim=1), [*first, *states]


class BidirectionalLayer(nn.Module):
    """A layer that reads forwards and backwards, half of the hidden numbers each."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.forwards = _layers.LstmStack(hidden, hidden // 2, 1)
        self.backwards = _layers.LstmStack(hidden, hidden // 2, 1)

    def forward(self, steps: list[Tensor]) -> tuple[list[Tensor], State]:
        ahead, (last,) = self.forwards(steps)
        behind, (first,) = self.backwards(steps[::-1])
        outputs = [torch.cat(pair, dim=-1) for pair in zip(ahead, behind[::-1], strict=True)]
        hidden, memory = (torch.cat(pair, dim=-1) for pair in zip(last, first, strict=True))
        return outputs, (hidden, memory)


class NmtDecoder(nn.Module):
    def __init__(self, settings: Nmt) -> None:
        super().__init__()
        hidden = settings.hidden
        self.embed = nn.Embedding(settings.vocab, hidden)
        self.stack = _layers.LstmStack(
            2 * hidden, hidden, settings.layers, settings.dropout, settings.residual
        )
        self.attention = LuongAttention(hidden)

    def forward(self, previous: Tensor, memory: Tensor, states: list[State]) -> Tensor:
        """The attention's result at each step, [batch, target length, hidden]."""
        embedded = self.embed(previous)
        keys = self.attention.keys(memory)
        attended = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        outputs = []
        for step in embedded.unbind(1):
            (query,), states = self.stack([torch.cat([step, attended], dim=-1)], states)
            attended = self.attention(query, keys, memory)
            outputs.append(attended)
        return torch.stack(outputs, dim=1)


class LuongAttention(nn.Module):
    """Luong's general attention: score = query W memory, result = tanh(V [context, query])."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.keys = nn.Linear(hidden, hidden, bias=False)  # once for all steps
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, query: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        scores = torch.bmm(keys, query.unsqueeze(2))  # [batch, length, 1]
        weights = torch.softmax(scores, dim=1)
        context = torch.bmm(weights.transpose(1, 2), memory).squeeze(1)
        return torch.tanh(self.combine(torch.cat([context, query], dim=-1)))
