"""Devices by name, and tensors from one to another."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roost.errors import InputError, UnknownName

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
    """The same with all its tensors on a device; itself where all are there. What is no tuple, list
    or mapping is left as it is: a cache of keys and values stays where the layers that fill it have
    it."""
    return mapped(value, lambda tensor: _moved(tensor, device), without=("past_key_values",))


# Tensors, their copies on another device, and versions of these.
Lent = list[tuple[Tensor, Tensor, int]]


def lent(value: Any, device: torch.device) -> tuple[Any, Lent]:
    """The same with all its tensors on a device, and those that were copied: for a call, which may
    write into them."""
    copies: Lent = []

    def lend(tensor: Tensor) -> Tensor:
        there = _moved(tensor, device)
        if there is not tensor:
            copies.append((tensor, there, there._version))
        return there

    with torch.inference_mode(False), torch.no_grad():  # inference mode counts no versions
        return mapped(value, lend, without=("past_key_values",)), copies


def given_back(copies: Lent) -> bool:
    """What a call wrote into copies goes into the tensors themselves, as in
    `nn.ReLU(inplace=True)`; whether it did."""
    written = [(tensor, there) for tensor, there, version in copies if there._version != version]
    for tensor, there in written:
        tensor.copy_(there)
    return bool(written)


def mapped(
    value: Any,
    function: Callable[[Tensor], Tensor],
    *,
    objects: bool = False,
    without: Sequence[str] = (),
    around: frozenset[int] = frozenset(),
) -> Any:
    """The same with a function of each tensor in place of it. What does not change is the same
    object: whoever writes into a list or a mapping writes into that of the caller. With `objects`
    tensors in attributes count too. `around` has what a value is inside of: what holds itself has
    an end."""
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in around:
        return value

    def inside(each: Any) -> Any:
        return mapped(each, function, objects=objects, around=around | {id(value)})

    if isinstance(value, tuple | list):
        parts = [inside(each) for each in value]
        return (
            value
            if all(new is old for new, old in zip(parts, value, strict=True))
            else _rebuilt(value, parts)
        )
    if isinstance(value, Mapping):
        changed = {
            key: new
            for key, old in value.items()
            if key not in without and (new := inside(old)) is not old
        }
        if not changed:
            return value
        same: Any = dict(value) if type(value) is dict else copy.copy(value)
        for key, each in changed.items():
            same[key] = each
        return same
    if objects and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        changed = {
            key: new
            for key, old in vars(value).items()
            if not callable(old) and (new := inside(old)) is not old
        }
        if changed:
            same = copy.copy(value)
            vars(same).update(changed)  # also of a frozen dataclass
            return same
    return value


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    kind = type(value)
    try:
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    except TypeError as error:
        raise InputError(
            f"tensors in a {kind.__name__} have to be moved, and it cannot be made of its parts "
            f"({error}); use a plain "
            "tuple or list"
        ) from None


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

    Its own memory where that can be locked: then `unpin` must be called before it goes. Else it
    gets memory that is.
    """
    if tensor.is_pinned():
        return False
    storage = tensor.data.untyped_storage()
    if int(_runtime().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)) == 0:
        return True
    log.info(
        "a tensor of %d bytes could not be locked where it is; it was copied", storage.nbytes()
    )
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # takes the error that was left behind
    tensor.data = tensor.data.pin_memory()
    return False


def unpin(tensor: Tensor) -> None:
    _runtime().cudaHostUnregister(tensor.data.untyped_storage().data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
