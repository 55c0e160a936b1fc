"""Convolutional layers that several models share."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 0.001  # of batch norm in the TensorFlow models


class ConvBn(nn.Module):
    """Convolution, batch norm and, unless told otherwise, relu; padded to keep the size unless told
    otherwise."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int] | int,
        *,
        stride: int = 1,
        padded: bool = True,
        relu: bool = True,
        epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=epsilon)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(self.conv(x))
        return F.relu(y) if self.relu else y


class Concat(nn.Module):
    """Channels after one another: a module, so that the op has a path of its own."""

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=1)


class ReluConvBn(nn.Module):
    """Relu, convolution, batch norm, in the order of NASNet and ENAS."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(F.relu(x)))


class Separable(nn.Module):
    """Twice: relu, a convolution for each channel, one across channels, batch norm. The first may
    have a stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        pad = kernel // 2
        self.depthwise_1 = nn.Conv2d(inputs, inputs, kernel, stride, pad, groups=inputs, bias=False)
        self.pointwise_1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.bn_1 = nn.BatchNorm2d(outputs, eps=EPSILON)
        self.depthwise_2 = nn.Conv2d(outputs, outputs, kernel, 1, pad, groups=outputs, bias=False)
        self.pointwise_2 = nn.Conv2d(outputs, outputs, 1, bias=False)
        self.bn_2 = nn.BatchNorm2d(outputs, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn_1(self.pointwise_1(self.depthwise_1(F.relu(x))))
        return self.bn_2(self.pointwise_2(self.depthwise_2(F.relu(y))))


class FactorizedReduction(nn.Module):
    """Halves the sides without losing half of the input: every second place, and the places
    between."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.bn(torch.cat([self.even(x), self.odd(shifted)], dim=1))


def average_pool(stride: int = 1) -> nn.Module:
    """3 x 3, same size but for the stride; padding does not count."""
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def max_pool(stride: int = 1) -> nn.Module:
    return nn.MaxPool2d(3, stride, 1)
