"""The network of `lister` in PyTorch: it scores each device for the unit that comes next.

The inputs are features of each device and of the unit. There is one hidden layer for each device,
their mean as context, a second layer, and a linear rule beside them. All devices share the weights,
so neither their number nor their names matter.
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

    seen: Tensor  # [rows, devices, seen] features of the devices
    known: Tensor  # [rows, known] features of the unit
    mask: Tensor  # [rows, devices] bool: allowed
    choice: Tensor  # [rows] device
    tilt: Tensor  # [rows, seen] added to the linear rule
    heat: Tensor  # [rows] temperature, above 0
    roll: Tensor  # [rows] schedule of the decision


class ListerPolicy(torch.nn.Module):
    """The weights of the network, and its scores."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        super().__init__()
        for name, value in tensors.items():
            tensor = torch.from_numpy(np.array(value, dtype=np.float32))
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def arrays(self) -> dict[str, Array]:
        """Copies of the weights, by name."""
        return {name: value.detach().numpy().copy() for name, value in self.named_parameters()}

    def forward(self, rows: Decisions) -> Tensor:
        """Log-probabilities [rows, devices]; very low for devices that are not allowed."""
        weights = dict(self.named_parameters())
        allowed = rows.mask.unsqueeze(-1).to(rows.seen.dtype)
        base = rows.known @ weights["known"] + weights["bias"]
        first = torch.relu(rows.seen @ weights["seen"] + base.unsqueeze(1)) * allowed
        mean = first.sum(1) / allowed.sum(1)
        context = mean @ weights["context"] + weights["inner_bias"]
        second = torch.relu(first @ weights["inner"] + context.unsqueeze(1))
        rule = (weights["skip"] + rows.tilt).unsqueeze(1)
        scores = second @ weights["out"] + (rows.seen * rule).sum(-1)
        scores = (scores / rows.heat.unsqueeze(1)).masked_fill(~rows.mask, -1e9)
        return torch.log_softmax(scores, dim=-1)
