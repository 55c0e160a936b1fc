"""The device of this machine that a policy learns on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roost.errors import InputError

if TYPE_CHECKING:
    import torch


def check_train_on(name: str) -> None:
    """Raise InputError if no machine has a device of this name."""
    kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name != "auto" and (kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind)):
        raise InputError(f"train_on is {name!r}; it must be auto, cpu, cuda or cuda:N")


def torch_device(name: str) -> torch.device:
    """The device `cpu`, `cuda` or `cuda:1`; `auto` is a GPU if there is one, else the CPU.

    Raises InputError if this machine does not have it.
    """
    import torch

    check_train_on(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    num_gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(number or 0) >= num_gpus:
        raise InputError(f"train_on is {name!r}, but PyTorch sees {num_gpus} GPUs here; try auto")
    return torch.device(name)
