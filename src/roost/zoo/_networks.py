"""Base classes of networks: logits from the inputs, or the loss if targets are given.

The parameters of `forward` name the inputs of the captured graph, hence three classes.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """A network that takes images [batch, 3, side, side]."""

    loss: nn.Module

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss if targets [batch] are given."""
        logits = self.logits(images)
        return logits if targets is None else self.loss(logits, targets)

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Logits [batch, classes]."""


class LanguageModel(nn.Module):
    """A network that takes words [batch, length]."""

    loss: nn.Module

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss if targets [batch, length] are given."""
        logits = self.logits(tokens)
        return logits if targets is None else self.loss(logits, targets)

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocab]."""


class Translator(nn.Module):
    """A network that takes source words and, for each target word, the word before it."""

    loss: nn.Module

    def forward(self, source: Tensor, previous: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss if targets [batch, target length] are given."""
        logits = self.logits(source, previous)
        return logits if targets is None else self.loss(logits, targets)

    @abstractmethod
    def logits(self, source: Tensor, previous: Tensor) -> Tensor:
        """Logits [batch, target length, vocab]."""
