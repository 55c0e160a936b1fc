"""ResNet-50 (He et al. 2015, arXiv 1512.03385), or by settings another of its bottleneck kind:
25.56 M parameters.

Batch 32, as Post (Gao et al., NeurIPS 2018) has it; HDP (ICLR 2018) places ResNet-152,
`Resnet50.size("152")`. Differs in: the stride of a block that halves the sides is in its 3 x 3
convolution, as now common.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._convolutions import ConvBn, max_pool
from roost.zoo._networks import ImageClassifier
from roost.zoo._settings import ImageSettings, Sizes


@dataclass(frozen=True)
class Resnet50(ImageSettings):
    """Settings of a ResNet of bottleneck blocks."""

    SIZES: ClassVar[Sizes] = {
        "50": {},
        "101": {"blocks": (3, 4, 23, 3)},
        "152": {"blocks": (3, 8, 36, 3)},
    }

    batch: int = 32
    image: int = 224  # pixels a side
    classes: int = 1000
    blocks: tuple[int, ...] = (3, 4, 6, 3)  # of each stage
    channels: int = 64  # of the stem; a block of the first stage puts out four times as many

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, image=64, classes=10, blocks=(1, 2, 1, 1), channels=8)

    def check(self) -> None:
        whole = isinstance(self.blocks, tuple) and all(
            type(count) is int and count > 0 for count in self.blocks
        )
        if not whole or not self.blocks:
            raise InputError(
                f"blocks is {self.blocks!r}; it must be positive whole numbers, one for each stage"
            )

    def model(self) -> nn.Module:
        return Resnet50Network(self)


class Resnet50Network(ImageClassifier):
    def __init__(self, settings: Resnet50) -> None:
        super().__init__()
        channels = settings.channels
        self.stem = ConvBn(3, channels, 7, stride=2)
        self.pool = max_pool(stride=2)
        self.stages = nn.ModuleList()
        inputs = channels
        for stage, blocks in enumerate(settings.blocks):
            width = channels * 2**stage
            strides = [2 if stage else 1] + [1] * (blocks - 1)
            widths = [inputs] + [4 * width] * (blocks - 1)
            self.stages.append(
                nn.Sequential(
                    *(ResnetBlock(i, width, s) for i, s in zip(widths, strides, strict=True))
                )
            )
            inputs = 4 * width
        self.fc = nn.Linear(inputs, settings.classes)
        self.loss = _layers.CrossEntropy()

    def logits(self, images: Tensor) -> Tensor:
        x = self.pool(self.stem(images))
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class ResnetBlock(nn.Module):
    """Three convolutions added to their input, which is projected if its shape differs."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = ConvBn(inputs, width, 1)
        self.conv2 = ConvBn(width, width, 3, stride=stride)
        self.conv3 = ConvBn(width, outputs, 1, relu=False)
        same = inputs == outputs and stride == 1
        self.shortcut: nn.Module = (
            nn.Identity() if same else ConvBn(inputs, outputs, 1, stride=stride, relu=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv3(self.conv2(self.conv1(x))) + self.shortcut(x))
