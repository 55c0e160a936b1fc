"""Convolutional layers that several models share."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 0.001  # of batch norm in the TensorFlow models


class ConvBn(nn.Module):
    """Convolution, batch norm and, by default, relu; padded by default to keep the size."""

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
    """Concatenation of channels; as a module its op has a path of its own."""

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=1)


# Op and input of the left part of a sum, then of the right. Inputs 0 and 1 are those of the cell;
# sum k is input k + 2 of later sums.
CellSum = tuple[str, int, str, int]


class CellOfSums(nn.Module):
    """A convolutional cell: sums of two ops each, of which some are the output."""

    concat: nn.Module

    def add_sums(
        self, sums: Sequence[CellSum], reduces: bool, op: Callable[[str, int, int], nn.Module]
    ) -> None:
        """Add the ops; `op` makes one of its kind, its input and its stride."""
        self.sums = sums
        for number, (left, a, right, b) in enumerate(sums):
            for side, kind, source in (("left", left, a), ("right", right, b)):
                stride = 2 if reduces and source < 2 else 1
                self.add_module(f"sum_{number}_{side}", op(kind, source, stride))
        self.concat = Concat()

    def output(self, inputs: Sequence[Tensor], ends: Sequence[int]) -> Tensor:
        """Compute the sums; concatenate the inputs and sums in `ends`."""
        values = list(inputs)
        for number, (_, a, _, b) in enumerate(self.sums):
            left = self.get_submodule(f"sum_{number}_left")(values[a])
            values.append(left + self.get_submodule(f"sum_{number}_right")(values[b]))
        return self.concat(*(values[number] for number in ends))


class ReluConvBn(nn.Module):
    """Relu, convolution, batch norm, in the order of NASNet and ENAS."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(F.relu(x)))


class Separable(nn.Module):
    """Two times relu, a convolution per channel, one across channels, and batch norm.

    Only the first convolution has the stride.
    """

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
    """Halves the sides; half of the output sees the even pixels, half the odd ones."""

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
    """A 3 x 3 average that keeps the size but for the stride, and ignores the padding."""
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def max_pool(stride: int = 1) -> nn.Module:
    """A 3 x 3 maximum that keeps the size but for the stride."""
    return nn.MaxPool2d(3, stride, 1)
