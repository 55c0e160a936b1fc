"""The state of a network and its optimizer as plain arrays, to be kept and taken up again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from roost.core.arrays import Array, taken
from roost.errors import InputError

_ADAM = ("step", "exp_avg", "exp_avg_sq")


def state_arrays(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Array]:
    """Weights, and what Adam knows of each of them."""
    found = {
        f"weight.{name}": value.detach().cpu().numpy().copy()
        for name, value in policy.state_dict().items()
    }
    for number, entry in optimizer.state_dict()["state"].items():
        found |= {
            f"adam.{number}.{key}": value.detach().cpu().numpy().copy()
            for key, value in entry.items()
        }
    return found


def take_up(
    policy: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Array]
) -> None:
    """What `state_arrays` gave; raises InputError where it is of another network."""
    own = policy.state_dict()
    weights = {
        name: taken(state, f"weight.{name}", tuple(value.shape)) for name, value in own.items()
    }
    policy.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    )
    take_up_adam(optimizer, state)


def take_up_adam(optimizer: torch.optim.Optimizer, state: Mapping[str, Array]) -> None:
    """What Adam knew of each parameter; raises InputError where these are others."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = {f"adam.{number}.{key}" for number in range(len(params)) for key in _ADAM}
    for name in state:
        if name.startswith("adam.") and name not in known:
            raise InputError(f"tensor {name!r} belongs to nothing that is learned here")
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for number, param in enumerate(params):
        if not any(f"adam.{number}.{key}" in state for key in _ADAM):
            continue  # it was not learned yet
        for key in _ADAM:
            shape = () if key == "step" else tuple(param.shape)
            found = taken(state, f"adam.{number}.{key}", shape)
            if key != "exp_avg" and (found < 0).any():
                raise InputError(f"tensor 'adam.{number}.{key}' has a number below 0")
            entries.setdefault(number, {})[key] = torch.from_numpy(np.array(found))
    optimizer.load_state_dict(
        {"state": entries, "param_groups": optimizer.state_dict()["param_groups"]}
    )
