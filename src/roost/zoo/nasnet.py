"""NASNet-A (Zoph et al. 2018, arXiv 1707.07012), by default in the mobile size 4 @ 1056.

`Nasnet.size("large")` is 6 @ 4032. Placeto (arXiv 1906.08879) places it with batch 64 and does not
give the size. We take mobile: its 1.28 s a step on one GPU of a K80 would be about 7 TFLOP/s for
large, more than that GPU can do. Differs in: no auxiliary head, no drop-path. The original trains
with dropout 0.5 before the last layer.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._convolutions import (
    CellOfSums,
    CellSum,
    FactorizedReduction,
    ReluConvBn,
    Separable,
    average_pool,
    max_pool,
)
from roost.zoo._networks import ImageClassifier
from roost.zoo._settings import ImageSettings, Sizes

# A cell is five sums of two ops each. Input 0 is the output of the last cell, input 1 that of the
# cell before it. `NORMAL_OUTPUT` and `REDUCTION_OUTPUT` list the cell's output.
NORMAL: tuple[CellSum, ...] = (
    ("separable_5", 0, "separable_3", 1),
    ("separable_5", 1, "separable_3", 1),
    ("average", 0, "identity", 1),
    ("average", 1, "average", 1),
    ("separable_3", 0, "identity", 0),
)
NORMAL_OUTPUT = (1, 2, 3, 4, 5, 6)
REDUCTION: tuple[CellSum, ...] = (
    ("separable_5", 0, "separable_7", 1),
    ("max", 0, "separable_7", 1),
    ("average", 0, "separable_5", 1),
    ("identity", 3, "average", 2),
    ("separable_3", 2, "max", 0),
)
REDUCTION_OUTPUT = (3, 4, 5, 6)


@dataclass(frozen=True)
class Nasnet(ImageSettings):
    """Settings of NASNet-A; the last layer sees 24 times `filters` channels."""

    SIZES: ClassVar[Sizes] = {
        "mobile": {},
        "large": {"image": 331, "cells": 6, "filters": 168, "stem": 96, "skips_reduction": True},
    }

    batch: int = 64
    image: int = 224  # pixels a side
    classes: int = 1000
    cells: int = 4  # normal cells before, between and after the two reductions
    filters: int = 44
    stem: int = 32  # channels of the first convolution
    # A cell after a reduction looks back past the reduction's own input.
    skips_reduction: bool = False
    dropout: float = 0.0

    @classmethod
    def small(cls) -> Self:
        return cls(batch=2, image=64, classes=10, cells=1, filters=8, stem=4)

    def check(self) -> None:
        if self.filters % 4:
            raise InputError(f"filters is {self.filters}; it must be a multiple of 4")
        self.must_be_at_least("image", 32)

    def model(self) -> nn.Module:
        return NasnetNetwork(self)


class NasnetNetwork(ImageClassifier):
    def __init__(self, settings: Nasnet) -> None:
        super().__init__()
        filters = settings.filters
        self.stem_conv = nn.Conv2d(3, settings.stem, 3, stride=2, bias=False)
        self.stem_bn = nn.BatchNorm2d(settings.stem, eps=0.001)
        # Cell -> the output it takes beside the last: 2 is the one before it.
        self.looks_back: dict[str, int] = {}
        # Channels of each output so far, and how often its sides were halved.
        self.shapes = [(settings.stem, 0)]
        self._add("stem_cell_0", filters // 4, reduces=True, back=1)
        self._add("stem_cell_1", filters // 2, reduces=True)
        for group in range(3):
            if group:
                self._add(f"reduction_{group - 1}", filters * 2**group, reduces=True)
            for cell in range(settings.cells):
                back = 3 if settings.skips_reduction and group and not cell else 2
                self._add(f"cell_{group * settings.cells + cell}", filters * 2**group, back=back)
        self.dropout = _layers.dropout(settings.dropout)
        self.fc = nn.Linear(self.shapes[-1][0], settings.classes)
        self.loss = _layers.CrossEntropy()

    def _add(self, name: str, filters: int, reduces: bool = False, back: int = 2) -> None:
        (channels, halved) = self.shapes[-1]
        (before, halved_before) = self.shapes[-back]
        # The first cell has one input only, and takes it twice.
        adjust = None if back == 1 else _adjust(before, filters, halved - halved_before)
        self.add_module(name, NasnetCell(channels, before, filters, adjust, reduces))
        outputs = REDUCTION_OUTPUT if reduces else NORMAL_OUTPUT
        self.looks_back[name] = back
        self.shapes.append((filters * len(outputs), halved + reduces))

    def logits(self, images: Tensor) -> Tensor:
        outputs: list[Tensor] = [self.stem_bn(self.stem_conv(images))]
        for name, back in self.looks_back.items():
            outputs.append(self.get_submodule(name)(outputs[-1], outputs[-back]))
        features = F.relu(outputs[-1]).mean((2, 3))
        return self.fc(self.dropout(features))


def _adjust(channels: int, filters: int, halvings: int) -> nn.Module:
    """A module that brings an earlier output to the size of the last."""
    if halvings:
        return FactorizedReduction(channels, filters)
    return ReluConvBn(channels, filters) if channels != filters else nn.Identity()


class NasnetCell(CellOfSums):
    """A normal cell, or one that halves the sides."""

    def __init__(
        self, channels: int, before: int, filters: int, adjust: nn.Module | None, reduces: bool
    ) -> None:
        super().__init__()
        self.ends = REDUCTION_OUTPUT if reduces else NORMAL_OUTPUT
        self.adjust = nn.Identity() if adjust is None else adjust
        self.squeeze = ReluConvBn(channels, filters)
        widths = {1: before if adjust is None else filters}

        def op(kind: str, source: int, stride: int) -> nn.Module:
            return _op(kind, widths.get(source, filters), filters, stride)

        self.add_sums(REDUCTION if reduces else NORMAL, reduces, op)

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        return self.output([self.squeeze(last), self.adjust(before)], self.ends)


def _op(kind: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    if kind == "identity":
        return nn.Identity()
    if kind in ("average", "max"):
        return average_pool(stride) if kind == "average" else max_pool(stride)
    return Separable(inputs, outputs, int(kind.removeprefix("separable_")), stride)
