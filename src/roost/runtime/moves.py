"""Devices by name, and tensors from one to another."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roost.errors import UnknownName

log = logging.getLogger(__name__)


def here() -> list[str]:
    """Names of the devices of this machine; `cpu:0`, `cpu:1` and so on are threads of `cpu`."""
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]


def place_of(name: str) -> torch.device:
    """The device of PyTorch that a device of a cluster is."""
    kind, _, number = name.partition(":")
    if kind == "cpu" and (not number or number.isdecimal()):
        return torch.device("cpu")
    if name not in here():
        raise UnknownName("device on this machine", name, here())
    return torch.device(name)


def moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device. What is no tuple, list or mapping is left as it is: a cache of keys
    and values stays where the layers that fill it have it."""
    if isinstance(value, Tensor):
        return _moved(value, device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, Mapping):
        found = {key: each if key == "past_key_values" else moved(each, device) for key, each in value.items()}
        if type(value) is dict or all(found[key] is value[key] for key in found):
            return found if type(value) is dict else value
        same = copy.copy(value)
        for key, each in found.items():
            same[key] = each  # type: ignore[index]
        return same
    return value


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cuda" and device.type == "cpu":
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return host
    if tensor.device.type == "cpu" and device.type == "cuda" and not tensor.is_pinned():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def pin(tensor: Tensor) -> bool:
    """Lock the pages of a tensor that is on the CPU, so that copies from it need nobody's help.

    Its own memory where that can be locked: then `unpin` must be called before it goes. Else it gets memory that is.
    """
    if tensor.is_pinned():
        return False
    storage = tensor.data.untyped_storage()
    if int(_runtime().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)) == 0:
        return True
    log.info("a tensor of %d bytes could not be locked where it is; it was copied", storage.nbytes())
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # takes the error that was left behind
    tensor.data = tensor.data.pin_memory()
    return False


def unpin(tensor: Tensor) -> None:
    _runtime().cudaHostUnregister(tensor.data.untyped_storage().data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
