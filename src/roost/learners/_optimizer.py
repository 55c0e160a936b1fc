"""The state of a network and its optimizer as plain arrays, to be kept and taken up again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from roost.core.arrays import Array


def state_arrays(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Array]:
    """Weights, and what Adam knows of each of them."""
    found = {f"weight.{name}": value.detach().cpu().numpy().copy() for name, value in policy.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        found |= {f"adam.{number}.{key}": value.detach().cpu().numpy().copy() for key, value in entry.items()}
    return found


def take_up(policy: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Array]) -> None:
    """What `state_arrays` gave."""
    weights = {name.removeprefix("weight."): value for name, value in state.items() if name.startswith("weight.")}
    policy.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        if name.startswith("adam."):
            _, number, key = name.split(".")
            entries.setdefault(int(number), {})[key] = torch.from_numpy(np.array(value))
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
