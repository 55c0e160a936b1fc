"""Moves of tensors between the devices of a placed model, and pinned memory for them."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from roost.errors import InputError, UnknownName

log = logging.getLogger(__name__)


def torch_device(name: str) -> torch.device:
    """Give PyTorch's device for a name in a cluster; `cpu:0`, `cpu:1` and so on are all `cpu`."""
    kind, _, number = name.partition(":")
    if kind == "cpu" and (not number or number.isdecimal()):
        return torch.device("cpu")
    known = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if name not in known:
        raise UnknownName("device on this machine", name, known)
    return torch.device(name)


def moved(value: Any, device: torch.device) -> Any:
    """Move all tensors in a value to a device; give the value itself if all are there.

    Only tuples, lists and mappings are searched. A cache of keys and values stays as it is: the
    layers that fill it keep it on their devices.
    """
    return mapped(value, lambda tensor: _moved(tensor, device), without=("past_key_values",))


class LentCopy(NamedTuple):
    """A copy of a tensor that a call on another device may write into."""

    tensor: Tensor
    copy: Tensor
    version: int  # of the copy, before the call


def lent(value: Any, device: torch.device) -> tuple[Any, list[LentCopy]]:
    """Move all tensors in a value to a device, for a call; also give the copies."""
    copies: list[LentCopy] = []

    def lend(tensor: Tensor) -> Tensor:
        copy = _moved(tensor, device)
        if copy is not tensor:
            copies.append(LentCopy(tensor, copy, copy._version))
        return copy

    with torch.inference_mode(False), torch.no_grad():  # inference mode counts no versions
        return mapped(value, lend, without=("past_key_values",)), copies


def given_back(copies: list[LentCopy]) -> bool:
    """Copy what a call wrote into copies back to the tensors; tell if it wrote into any.

    `nn.ReLU(inplace=True)` is such a call.
    """
    written = [each for each in copies if each.copy._version != each.version]
    for each in written:
        each.tensor.copy_(each.copy)
    return bool(written)


def mapped(
    value: Any,
    function: Callable[[Tensor], Tensor],
    *,
    objects: bool = False,
    without: Sequence[str] = (),
    around: frozenset[int] = frozenset(),
) -> Any:
    """Apply a function to each tensor in a value; parts that do not change stay the same objects.

    So whoever writes into a list or a mapping writes into that of the caller.

    - `objects`: search attributes of objects too.
    - `without`: keys of the mapping that are left alone.
    - `around`: the values that this one is inside of; a value may hold itself.
    """
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in around:
        return value

    def inside(each: Any) -> Any:
        return mapped(each, function, objects=objects, around=around | {id(value)})

    def changes(items: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: new for key, old in items.items() if (new := inside(old)) is not old}

    if isinstance(value, tuple | list):
        parts = [inside(each) for each in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same else _rebuilt(value, parts)
    if isinstance(value, Mapping):
        changed = changes({key: each for key, each in value.items() if key not in without})
        if not changed:
            return value
        result: Any = dict(value) if type(value) is dict else copy.copy(value)
        for key, each in changed.items():
            result[key] = each
        return result
    if objects and hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        changed = changes({key: each for key, each in vars(value).items() if not callable(each)})
        if changed:
            result = copy.copy(value)
            vars(result).update(changed)  # also of a frozen dataclass
            return result
    return value


def _rebuilt(value: Any, parts: list[Any]) -> Any:
    kind = type(value)
    try:
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    except TypeError as error:
        raise InputError(
            f"tensors in a {kind.__name__} must be moved, but it cannot be made of its parts "
            f"({error}); use a plain tuple or list"
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
    """Pin the memory of a tensor on the CPU, so that the GPU copies from it by itself.

    True if its own memory was pinned: then call `unpin` before it is freed. If that fails, the
    tensor gets other memory, which is pinned.
    """
    if tensor.is_pinned():
        return False
    storage = tensor.data.untyped_storage()
    if int(_runtime().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)) == 0:
        return True
    log.info(
        "a tensor of %d bytes could not be pinned where it is; it was copied", storage.nbytes()
    )
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # clears the error of the failed call
    tensor.data = tensor.data.pin_memory()
    return False


def unpin(tensor: Tensor) -> None:
    _runtime().cudaHostUnregister(tensor.data.untyped_storage().data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
