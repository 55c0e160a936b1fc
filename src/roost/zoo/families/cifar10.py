"""Image classifiers with random convolutional cells.

After the family `cifar10` of Placeto (arXiv 1906.08879), drawn from a search space like the micro
one of ENAS (Pham et al. 2018, arXiv 1802.03268). A node of a cell sums two ops on earlier nodes, or
on the outputs of the two cells before. The sums that no node takes are the cell's output. Numbers
of nodes and cells and the widths are our own. Differs in: also plain convolutions, where ENAS has
separable ones only.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from roost.errors import InputError
from roost.zoo import _layers
from roost.zoo._convolutions import (
    CellOfSums,
    CellSum,
    ConvBn,
    FactorizedReduction,
    ReluConvBn,
    Separable,
    average_pool,
    max_pool,
)
from roost.zoo._networks import ImageClassifier
from roost.zoo._settings import ImageSettings
from roost.zoo.families._random_model import RandomModel

OPS = ("identity", "conv_3", "conv_5", "separable_3", "separable_5", "average", "max")


@dataclass(frozen=True)
class Cifar10Family(RandomModel, ImageSettings):
    """A classifier of small images with random cells."""

    normal: tuple[CellSum, ...] = (("separable_3", 0, "identity", 1),)
    reduction: tuple[CellSum, ...] = (("max", 0, "average", 1),)
    batch: int = 128
    image: int = 32  # pixels a side
    classes: int = 10
    cells: int = 2  # normal cells before, between and after the two reductions
    channels: int = 36  # of the first cells; doubled by each reduction

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        count = int(rng.integers(4, 7))
        return cls(
            normal=_draw_cell(rng, count),
            reduction=_draw_cell(rng, count),
            batch=int(rng.choice([64, 128, 256])),
            cells=int(rng.integers(1, 4)),
            channels=int(rng.choice([20, 36, 64])),
        )

    def shrunk(self) -> Self:
        return dataclasses.replace(self, batch=2, image=16, cells=1, channels=4)

    def check(self) -> None:
        for cell in (self.normal, self.reduction):
            for number, (left, a, right, b) in enumerate(cell):
                earlier = min(a, b) >= 0 and max(a, b) < number + 2
                if not earlier or not {left, right} <= set(OPS):
                    raise InputError(
                        f"node {number} of a cell is {cell[number]!r}; its ops or inputs do not "
                        "exist"
                    )

    def model(self) -> nn.Module:
        return Cifar10Network(self)


def _draw_cell(rng: np.random.Generator, count: int) -> tuple[CellSum, ...]:
    def half(node: int) -> tuple[str, int]:
        return str(rng.choice(OPS)), int(rng.integers(node + 2))

    return tuple((*half(node), *half(node)) for node in range(count))


class Cifar10Network(ImageClassifier):
    def __init__(self, settings: Cifar10Family) -> None:
        super().__init__()
        channels = settings.channels
        self.stem = ConvBn(3, 3 * channels, 3, relu=False)
        self.cells = nn.ModuleList()
        # Channels of each output so far, and how often its sides were halved.
        shapes = [(3 * channels, 0)] * 2
        for stage in range(3):
            kinds = [True] * (stage > 0) + [False] * settings.cells
            for reduces in kinds:
                (last, halved) = shapes[-1]
                (before, halved_before) = shapes[-2]
                sums = settings.reduction if reduces else settings.normal
                cell = RandomConvCell(
                    (last, before),
                    channels * 2**stage,
                    sums,
                    reduces,
                    shrinks=halved > halved_before,
                )
                self.cells.append(cell)
                shapes.append((cell.channels, halved + reduces))
        self.fc = nn.Linear(shapes[-1][0], settings.classes)
        self.loss = _layers.CrossEntropy()

    def logits(self, images: Tensor) -> Tensor:
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(last, before)
        return self.fc(F.relu(last).mean((2, 3)))


class RandomConvCell(CellOfSums):
    """Random sums, normal or halving the sides."""

    def __init__(
        self,
        inputs: tuple[int, int],
        channels: int,
        sums: Sequence[CellSum],
        reduces: bool,
        shrinks: bool,
    ) -> None:
        super().__init__()
        used = {source for _, a, _, b in sums for source in (a, b)}
        self.ends = [source for source in range(2, len(sums) + 2) if source not in used]
        self.channels = channels * len(self.ends)
        last, before = inputs
        # An input that no sum takes needs no preparation.
        self.last = ReluConvBn(last, channels) if 0 in used else None
        adjust = FactorizedReduction(before, channels) if shrinks else ReluConvBn(before, channels)
        self.before = adjust if 1 in used else None
        self.add_sums(sums, reduces, lambda kind, _, stride: _op(kind, channels, stride))

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        prepared = [
            last if self.last is None else self.last(last),
            before if self.before is None else self.before(before),
        ]
        return self.output(prepared, self.ends)


def _op(kind: str, channels: int, stride: int) -> nn.Module:
    if kind == "identity":
        return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)
    if kind in ("average", "max"):
        return average_pool(stride) if kind == "average" else max_pool(stride)
    name, _, kernel = kind.partition("_")
    layer = Separable if name == "separable" else ReluConvBn
    return layer(channels, channels, int(kernel), stride)
