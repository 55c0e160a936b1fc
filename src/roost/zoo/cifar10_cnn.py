"""The CNN of TensorFlow's CIFAR-10 tutorial, with 1.07 M parameters.

It has two convolutions and three linear layers. Spotlight (Gao et al., ICML 2018) places "the
CIFAR-10 TF benchmark". That this is the network, with batch 128 on crops of 24 x 24 pixels, is our
reading and not confirmed.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.nn.functional as F
from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._convolutions import max_pool
from roost.zoo._networks import ImageClassifier
from roost.zoo._settings import ImageSettings


@dataclass(frozen=True)
class Cifar10Cnn(ImageSettings):
    """Settings of the tutorial's CNN."""

    batch: int = 128
    image: int = 24  # pixels a side, cut out of 32
    classes: int = 10
    channels: int = 64  # of both convolutions
    hidden: int = 384  # of the first linear layer; the second has half as many

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, channels=8, hidden=32)

    def check(self) -> None:
        self.must_be_at_least("hidden", 2)

    def model(self) -> nn.Module:
        return Cifar10CnnNetwork(self)


class Cifar10CnnNetwork(ImageClassifier):
    def __init__(self, settings: Cifar10Cnn) -> None:
        super().__init__()
        channels = settings.channels
        hidden = settings.hidden
        side = (settings.image + 3) // 4  # halved twice, rounding up each time
        self.conv1 = nn.Conv2d(3, channels, 5, padding=2)
        self.pool1 = max_pool(stride=2)
        self.norm1 = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        self.conv2 = nn.Conv2d(channels, channels, 5, padding=2)
        self.norm2 = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        self.pool2 = max_pool(stride=2)
        self.local3 = nn.Linear(channels * side**2, hidden)
        self.local4 = nn.Linear(hidden, hidden // 2)
        self.softmax_linear = nn.Linear(hidden // 2, settings.classes)
        self.loss = _layers.CrossEntropy()

    def logits(self, images: Tensor) -> Tensor:
        x = self.norm1(self.pool1(F.relu(self.conv1(images))))
        x = self.pool2(self.norm2(F.relu(self.conv2(x))))
        x = F.relu(self.local4(F.relu(self.local3(x.flatten(1)))))
        return self.softmax_linear(x)
