"""Inception-V3 (Szegedy et al. 2015, arXiv 1512.00567) with 23.83 M parameters.

Images are 299 x 299 pixels, of 1000 classes. Batch 32, as Mirhoseini et al., ICML 2017, place it.
Modules have the names of TF-slim and `examples/inception_v3.py`. The original trains with dropout
0.2 before the last layer, and with the auxiliary head at weight 0.4.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch.nn.functional as F
from torch import Tensor, nn

from roost.zoo import _convolutions, _layers
from roost.zoo._settings import ImageSettings

AUXILIARY_WEIGHT = 0.4

# Each block is a list of branches side by side; a branch is a list of layers in turn. A layer is
# "name kernel channels", with "/2" for a stride of 2, or "pool average" or "pool max/2". Two layers
# in brackets are side by side as well.
LayerText = str | tuple[str, str]
BlockText = Sequence[Sequence[LayerText]]


def mixed_35(pooled: int) -> BlockText:
    return [
        ["b1x1 1x1 64"],
        ["b5x5_1 1x1 48", "b5x5_2 5x5 64"],
        ["b3x3dbl_1 1x1 64", "b3x3dbl_2 3x3 96", "b3x3dbl_3 3x3 96"],
        ["pool average", f"pool_conv 1x1 {pooled}"],
    ]


def mixed_17(n: int) -> BlockText:
    double = [
        f"b7x7dbl_1 1x1 {n}",
        f"b7x7dbl_2 7x1 {n}",
        f"b7x7dbl_3 1x7 {n}",
        f"b7x7dbl_4 7x1 {n}",
    ]
    return [
        ["b1x1 1x1 192"],
        [f"b7x7_1 1x1 {n}", f"b7x7_2 1x7 {n}", "b7x7_3 7x1 192"],
        [*double, "b7x7dbl_5 1x7 192"],
        ["pool average", "pool_conv 1x1 192"],
    ]


MIXED_8: BlockText = [
    ["b1x1 1x1 320"],
    ["b3x3_1 1x1 384", ("b3x3_2a 1x3 384", "b3x3_2b 3x1 384")],
    ["b3x3dbl_1 1x1 448", "b3x3dbl_2 3x3 384", ("b3x3dbl_3a 1x3 384", "b3x3dbl_3b 3x1 384")],
    ["pool average", "pool_conv 1x1 192"],
]

BLOCKS: dict[str, BlockText] = {
    "Mixed_5b": mixed_35(32),
    "Mixed_5c": mixed_35(64),
    "Mixed_5d": mixed_35(64),
    "Mixed_6a": [
        ["b3x3 3x3/2 384"],
        ["b3x3dbl_1 1x1 64", "b3x3dbl_2 3x3 96", "b3x3dbl_3 3x3/2 96"],
        ["pool max/2"],
    ],
    "Mixed_6b": mixed_17(128),
    "Mixed_6c": mixed_17(160),
    "Mixed_6d": mixed_17(160),
    "Mixed_6e": mixed_17(192),
    "Mixed_7a": [
        ["b3x3_1 1x1 192", "b3x3_2 3x3/2 320"],
        ["b7x7x3_1 1x1 192", "b7x7x3_2 1x7 192", "b7x7x3_3 7x1 192", "b7x7x3_4 3x3/2 192"],
        ["pool max/2"],
    ],
    "Mixed_7b": MIXED_8,
    "Mixed_7c": MIXED_8,
}


@dataclass(frozen=True)
class InceptionV3(ImageSettings):
    """Settings of Inception-V3."""

    batch: int = 32
    image: int = 299  # pixels a side
    classes: int = 1000
    width: float = 1.0  # channels of every layer, as a share of the original's
    auxiliary: bool = False  # a second head on Mixed_6e, used in training only
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, image=107, classes=10, width=0.125)

    def check(self) -> None:
        self.must_be_at_least("image", 299 if self.auxiliary else 75)

    def model(self) -> nn.Module:
        return InceptionV3Network(self)


class InceptionV3Network(nn.Module):
    def __init__(self, settings: InceptionV3) -> None:
        super().__init__()
        width = settings.width
        first, second, third, fourth = (_channels(n, width) for n in (32, 64, 80, 192))
        self.Conv2d_1a_3x3 = _conv(3, first, (3, 3), stride=2, padded=False)
        self.Conv2d_2a_3x3 = _conv(first, first, (3, 3), padded=False)
        self.Conv2d_2b_3x3 = _conv(first, second, (3, 3))
        self.maxpool1 = nn.MaxPool2d(3, 2)
        self.Conv2d_3b_1x1 = _conv(second, third, (1, 1))
        self.Conv2d_4a_3x3 = _conv(third, fourth, (3, 3), padded=False)
        self.maxpool2 = nn.MaxPool2d(3, 2)
        channels = fourth
        self.auxiliary: nn.Module | None = None
        for name, layers in BLOCKS.items():
            block = MixedBlock(channels, layers, width)
            self.add_module(name, block)
            channels = block.channels
            if name == "Mixed_6e" and settings.auxiliary:
                self.auxiliary = AuxiliaryHead(channels, settings.classes, width)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = _layers.dropout(settings.dropout)
        self.fc = nn.Linear(channels, settings.classes)
        self.loss = _layers.CrossEntropy()

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, classes] for images [batch, 3, side, side]."""
        x = self.maxpool1(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images))))
        x = self.maxpool2(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        middle = x
        for name in BLOCKS:
            x = self.get_submodule(name)(x)
            middle = x if name == "Mixed_6e" else middle
        logits = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        if targets is None:
            return logits
        loss = self.loss(logits, targets)
        if self.auxiliary is not None:
            loss = loss + AUXILIARY_WEIGHT * self.loss(self.auxiliary(middle), targets)
        return loss


class MixedBlock(nn.Module):
    """Branches side by side; their channels are concatenated."""

    def __init__(self, inputs: int, block: BlockText, width: float) -> None:
        super().__init__()
        self.branches = [[_names(layer) for layer in branch] for branch in block]
        self.channels = 0
        for branch in block:
            channels = inputs
            for layer in branch:
                fork = [layer] if isinstance(layer, str) else layer
                channels = sum(self._add(text, channels, width) for text in fork)
                if len(fork) == 2:
                    self.add_module(_concat(_names(layer)), _convolutions.Concat())
            self.channels += channels
        self.concat = _convolutions.Concat()

    def _add(self, text: str, inputs: int, width: float) -> int:
        """Add one layer; return the channels of its output."""
        name, shape, *rest = text.split()
        shape, _, stride = shape.partition("/")
        if not rest:
            pool = nn.MaxPool2d(3, 2) if shape == "max" else _convolutions.average_pool()
            self.add_module(name, pool)
            return inputs
        height, across = (int(side) for side in shape.split("x"))
        outputs = _channels(int(rest[0]), width)
        self.add_module(
            name, _conv(inputs, outputs, (height, across), int(stride or 1), padded=not stride)
        )
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for branch in self.branches:
            y = x
            for names in branch:
                parts = [self.get_submodule(name)(y) for name in names]
                y = parts[0] if len(parts) == 1 else self.get_submodule(_concat(names))(*parts)
            outputs.append(y)
        return self.concat(*outputs)


class AuxiliaryHead(nn.Module):
    """A classifier on the 17 x 17 maps."""

    def __init__(self, inputs: int, classes: int, width: float) -> None:
        super().__init__()
        first = _channels(128, width)
        second = _channels(768, width)
        self.conv0 = _conv(inputs, first, (1, 1))
        self.conv1 = _conv(first, second, (5, 5), padded=False)
        self.fc = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(F.avg_pool2d(x, 5, 3)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _conv(
    inputs: int, outputs: int, kernel: tuple[int, int], stride: int = 1, padded: bool = True
) -> _convolutions.ConvBn:
    return _convolutions.ConvBn(
        inputs, outputs, kernel, stride=stride, padded=padded, epsilon=_convolutions.EPSILON
    )


def _channels(original: int, width: float) -> int:
    return max(1, round(original * width))


def _names(layer: LayerText) -> list[str]:
    return [text.split()[0] for text in ([layer] if isinstance(layer, str) else layer)]


def _concat(names: list[str]) -> str:
    """The name of the concatenation of a fork: b3x3_concat for b3x3_2a and b3x3_2b."""
    return names[0].rpartition("_")[0] + "_concat"
