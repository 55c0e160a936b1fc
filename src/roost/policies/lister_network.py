"""The network of `lister` in PyTorch: the score of each device, from what was seen of it and what
is known of the unit.

One hidden layer for each device, their mean as context, a second layer, and a linear rule beside
them. The weights are shared by all devices, so nothing depends on how many there are or on what
they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array


class Decisions(NamedTuple):
    """Decisions of one problem, a row for each."""

    seen: Tensor  # [rows, devices, seen]
    known: Tensor  # [rows, known]
    mask: Tensor  # [rows, devices] bool
    choice: Tensor  # [rows]
    tilt: Tensor  # [rows, seen]
    heat: Tensor  # [rows] temperature, above 0
    roll: Tensor  # [rows] the schedule that each belongs to


class Policy(torch.nn.Module):
    """The weights, and what they make of decisions."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(
                name, torch.nn.Parameter(torch.from_numpy(np.array(value, dtype=np.float32)))
            )

    def arrays(self) -> dict[str, Array]:
        return {name: value.detach().numpy().copy() for name, value in self.named_parameters()}

    def forward(self, rows: Decisions) -> Tensor:
        """[rows, devices] the logarithm of how likely each device is; very low where it is
        masked."""
        weights = dict(self.named_parameters())
        there = rows.mask.unsqueeze(-1).to(rows.seen.dtype)
        base = rows.known @ weights["known"] + weights["bias"]
        first = torch.relu(rows.seen @ weights["seen"] + base.unsqueeze(1)) * there
        mean = first.sum(1) / there.sum(1)
        context = mean @ weights["context"] + weights["inner_bias"]
        second = torch.relu(first @ weights["inner"] + context.unsqueeze(1))
        rule = (weights["skip"] + rows.tilt).unsqueeze(1)
        scores = second @ weights["out"] + (rows.seen * rule).sum(-1)
        scores = (scores / rows.heat.unsqueeze(1)).masked_fill(~rows.mask, -1e9)
        return torch.log_softmax(scores, dim=-1)
