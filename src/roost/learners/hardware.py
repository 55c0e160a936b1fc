"""The device of this machine that a policy learns on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from roost.errors import InputError

if TYPE_CHECKING:
    import torch


def check_train_on(name: str) -> None:
    """Raise InputError if no machine has a device of this name."""
    if not isinstance(name, str) or not re.fullmatch("auto|(cpu|cuda)(:[0-9]+)?", name):
        raise InputError(f"train_on is {name!r}; it must be auto, cpu, cuda or cuda:N")


def torch_device(name: str) -> torch.device:
    """The device `cpu`, `cuda` or `cuda:1`; `auto` is a GPU if there is one, else the CPU.

    Raises InputError if this machine does not have it.
    """
    import torch

    check_train_on(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        raise InputError(f"train_on is {name!r}, but PyTorch sees {num_gpus} GPUs here; try auto")
    return device
