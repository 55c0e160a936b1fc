"""Which device of this machine a policy learns on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roost.errors import InputError

if TYPE_CHECKING:
    import torch


def torch_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one, else the CPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind):
        raise InputError(f"train_on is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise InputError(f"train_on is {name!r}, but PyTorch sees {torch.cuda.device_count()} GPUs here; try auto")
    return torch.device(name)
