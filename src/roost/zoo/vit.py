"""ViT (Dosovitskiy et al. 2020, arXiv 2010.11929), by default ViT-B/16: 86.6 M parameters.

Images are 224 x 224 pixels; batch 32 is our choice. The original trains with dropout 0.1 on
ImageNet alone.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from roost.zoo import _layers
from roost.zoo._networks import ImageClassifier
from roost.zoo._settings import ImageSettings, Sizes


@dataclass(frozen=True)
class Vit(ImageSettings):
    """Settings of the vision transformer."""

    SIZES: ClassVar[Sizes] = {
        "base": {},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096},
        "huge": {"patch": 14, "layers": 32, "hidden": 1280, "heads": 16, "intermediate": 5120},
    }

    batch: int = 32
    image: int = 224  # pixels a side
    patch: int = 16  # pixels a side
    classes: int = 1000
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(
            batch=2, image=16, patch=8, classes=10, layers=2, hidden=16, heads=2, intermediate=32
        )

    def check(self) -> None:
        self.must_divide("heads", "hidden")
        self.must_divide("patch", "image")

    def model(self) -> nn.Module:
        return VitNetwork(self)


class VitNetwork(ImageClassifier):
    def __init__(self, settings: Vit) -> None:
        super().__init__()
        hidden = settings.hidden
        patches = (settings.image // settings.patch) ** 2
        self.patches = nn.Conv2d(3, hidden, settings.patch, settings.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, patches + 1, hidden))
        self.dropout = _layers.dropout(settings.dropout)
        self.layers = nn.ModuleList(_layer(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, settings.classes)
        self.loss = _layers.CrossEntropy()
        _layers.init_normal(self)
        nn.init.normal_(self.positions, std=0.02)

    def logits(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # [batch, patches, hidden]
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def _layer(settings: Vit) -> nn.Module:
    hidden = settings.hidden
    dropout = settings.dropout
    return _layers.PreNormLayer(
        lambda: nn.LayerNorm(hidden, eps=1e-6),
        _layers.MultiHeadAttention(hidden, settings.heads),
        _layers.FeedForward(hidden, settings.intermediate, nn.GELU(), dropout_probability=dropout),
        dropout,
    )
