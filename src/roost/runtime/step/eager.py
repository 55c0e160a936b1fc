"""The time of a step that PyTorch runs by itself on one device, for `roost profile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from roost.presets.clock import host_time
from roost.runtime.step.calls import call_arguments, loss_of
from roost.runtime.step.optimizers import Optimizer

_SETTINGS = Optimizer(rate=1e-6)


def eager_step_time(
    model: nn.Module,
    inputs: Any,
    device: torch.device,
    optimizer: str | None = None,
    seconds: float = 1.0,
) -> float:
    """Time some steps; give the median in seconds. Without an optimizer a step is inference.

    The model stays on the device.
    """
    model = model.to(device).train(optimizer is not None)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
    args, kwargs = call_arguments(inputs)
    updates = _SETTINGS.of_torch(optimizer, model.parameters()) if optimizer else None

    def step() -> None:
        with torch.set_grad_enabled(updates is not None):
            returned = model(*args, **kwargs)
        if updates is not None:
            with torch.enable_grad():
                loss_of(returned).backward()  # type: ignore[no-untyped-call]
            updates.step()
            updates.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return host_time([step], seconds)
