"""Which device of this machine a policy learns on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roost.errors import InputError

if TYPE_CHECKING:
    import torch


def check_name(name: str) -> None:
    """Raise InputError where this names no device of any machine; whether it is there is told when
    it is needed."""
    kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name != "auto" and (kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind)):
        raise InputError(f"train_on is {name!r}; it must be auto, cpu, cuda or cuda:N")


def torch_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one, else the CPU."""
    import torch

    check_name(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise InputError(
            f"train_on is {name!r}, but PyTorch sees {torch.cuda.device_count()} GPUs here; try "
            f"auto"
        )
    return torch.device(name)
