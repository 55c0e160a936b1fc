"""A step as PyTorch runs it by itself, on one device: what predictions are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from roost.errors import InputError
from roost.presets.clock import host_time

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-6, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
}


def eager_step_time(
    model: nn.Module,
    inputs: Any,
    device: torch.device,
    optimizer: str | None = None,
    seconds: float = 1.0,
) -> float:
    """Seconds of a step, the median of some; inference where there is no optimizer. The model stays
    on the device."""
    model = model.to(device).train(optimizer is not None)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    updates = _OPTIMIZERS[optimizer](model.parameters()) if optimizer else None

    def step() -> None:
        with torch.set_grad_enabled(updates is not None):
            found = model(*args, **kwargs)
        if updates is not None:
            with torch.enable_grad():
                _loss(found).backward()  # type: ignore[no-untyped-call]
            updates.step()
            updates.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return host_time([step], seconds)


def _loss(found: Any) -> Tensor:
    """As the front-end has it: the only output, or the one called loss, or the first."""
    if isinstance(found, Mapping):
        found = found.get("loss")
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", None) if hasattr(found, "loss") else found[0]
    if not isinstance(found, Tensor):
        raise InputError("the model returned no loss")
    return found
