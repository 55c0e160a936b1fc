"""Weights of a network and the state of its optimizer as plain arrays, to be kept and restored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from roost.core.arrays import Array, taken
from roost.errors import InputError

_ADAM = ("step", "exp_avg", "exp_avg_sq")


def weight_arrays(policy: nn.Module) -> dict[str, Array]:
    """Copies of the weights, by name."""
    return {name: _copied(value) for name, value in policy.state_dict().items()}


def load_weight_arrays(policy: nn.Module, weights: Mapping[str, Array]) -> None:
    """Set the weights of a network, by name."""
    policy.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    )


def adam_arrays(optimizer: torch.optim.Optimizer) -> dict[str, Array]:
    """Copies of the moments that Adam keeps of each parameter."""
    return {
        f"adam.{number}.{key}": _copied(value)
        for number, moments in optimizer.state_dict()["state"].items()
        for key, value in moments.items()
    }


def state_arrays(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Array]:
    """Copies of the weights and of Adam's moments."""
    weights = {f"weight.{name}": value for name, value in weight_arrays(policy).items()}
    return weights | adam_arrays(optimizer)


def restore_state(
    policy: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Array]
) -> None:
    """Restore from `state_arrays`; raises InputError if these are of another network."""
    weights = {
        name: taken(state, f"weight.{name}", tuple(value.shape))
        for name, value in policy.state_dict().items()
    }
    load_weight_arrays(policy, weights)
    restore_adam(optimizer, state)


def restore_adam(optimizer: torch.optim.Optimizer, state: Mapping[str, Array]) -> None:
    """Restore from `adam_arrays`; raises InputError if these are of other parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = {f"adam.{number}.{key}" for number in range(len(params)) for key in _ADAM}
    for name in state:
        if name.startswith("adam.") and name not in names:
            raise InputError(f"tensor {name!r} belongs to no parameter of this network")
    moments: dict[int, dict[str, Tensor]] = {}
    for number, param in enumerate(params):
        if not any(f"adam.{number}.{key}" in state for key in _ADAM):
            continue  # it had no update yet
        moments[number] = {}
        for key in _ADAM:
            name = f"adam.{number}.{key}"
            shape = () if key == "step" else tuple(param.shape)
            array = taken(state, name, shape)
            if key != "exp_avg" and (array < 0).any():
                raise InputError(f"tensor {name!r} has a number below 0")
            moments[number][key] = torch.from_numpy(np.array(array))
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _copied(value: Tensor) -> Array:
    return value.detach().cpu().numpy().copy()
